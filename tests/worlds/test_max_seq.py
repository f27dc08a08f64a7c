"""The longest sequence that fits: the search, and a real one under a limit on a CPU."""

import json

import pytest

from runner import max_seq
from runner.config import overrides
from runner.max_seq import PRECISION, longest
from runner.measure.memory_model import needed_bytes
from tests.support.composing import resolved

DENSE = [
    "config=tiny", "batch=1", "heads=16", "kv_heads=16", "head_dim=128", "dtype=fp32", "attention=dense", "world_size=1",
    "hardware=cpu", "mode=forward", "launch.memory_limit_gb=0.0625",
]  # fmt: skip
SMALL = [
    "model=decoder_tiny", "model.layers=2", "model.hidden=256", "model.vocabulary=256", "heads=4", "kv_heads=4", "dtype=fp32",
]  # fmt: skip


@pytest.mark.parametrize("guess", [64, 640_000])
@pytest.mark.parametrize("fixed, each", [(300_000, 7), (0, 17_000)])
def test_the_search_ends_beside_a_length_that_does_not_fit(guess, fixed, each):
    limit, unit, tried = 1_000_000, 64, {}

    def held(n):
        tried[n] = fixed + each * n if fixed + each * n <= limit else None
        return tried[n]

    found = longest(held, limit, guess, unit)
    assert found == max((n for n, size in tried.items() if size), default=0)
    assert min(n for n, size in tried.items() if not size) - found <= PRECISION * found + unit
    assert len(tried) < 50


H200 = ["config=llama3_8b", "batch=1", "attention=dense", "world_size=1"]
INFERENCE = [*SMALL, "attention=zigzag", "hardware=cpu", "mode=inference"]


@pytest.mark.parametrize(
    ("given", "mib", "within"),
    [  # what a GPU allocated; a process has more than its tensors
        ([*H200, "mode=forward", "seq_len=150400"], 2958.1, 0.005),
        ([*H200, "mode=forward_backward", "seq_len=54400"], 3844.3, 0.005),
        ([*SMALL, "attention=ring", "hardware=cpu", "world_size=1", "seq_len=1792"], 122.5, 0.1),
        ([*INFERENCE, "world_size=1", "seq_len=4096"], 74.8, 0.1),
        ([*INFERENCE, "world_size=4", "seq_len=16384"], 86.0, 0.1),
    ],
)
def test_the_predicted_peak_is_near_what_was_measured(given, mib, within):
    assert needed_bytes(resolved(*given, gpus=1), "sdpa_flash") / 2**20 == pytest.approx(mib, rel=within)


def test_the_longest_sequence_is_near_the_prediction(pool, tmp_path):
    (row,) = max_seq.search(overrides.jobs(DENSE), pool, tmp_path)
    assert (row.status, row.reason, row.limit) == ("ok", None, 2**26)
    assert abs(row.predicted / row.longest - 1) < 0.1 and row.error == row.predicted / row.longest - 1
    fitting = {trial["seq_len"]: trial for trial in row.trials if trial["fits"]}
    assert max(fitting) == row.longest < min(t["seq_len"] for t in row.trials if not t["fits"])
    assert row.measured_peak == fitting[row.longest]["memory"]["by_rank"][0]["peak_resident"] <= row.limit
    assert row.experiment["workload"]["seq_len"] == row.longest


def test_settings_that_cannot_be_searched_are_rows_with_the_reason(tmp_path, capsys):
    swept = ["attention=dense,zigzag", "config=tiny", "causal=false", "hardware=cpu", "world_size=1"]
    assert max_seq.main([*swept, f"output={tmp_path}"]) == 1
    (file,) = tmp_path.glob("max_seq/*/max_seq.json")
    rows = json.loads(file.read_text())["rows"]
    assert [row["setting"] for row in rows] == ["attention=dense", "attention=zigzag"]
    assert "launch.memory_limit_gb=null" in rows[0]["reason"]
    assert "causal=false" in rows[1]["reason"]
    assert {row["status"] for row in rows} == {"invalid"} and "launch.memory_limit_gb=null" in " ".join(
        capsys.readouterr().out.split()
    )
    assert max_seq.main(["no_such_key=1"]) == 2


def test_a_search_that_takes_a_cpu_more_than_minutes_is_refused_with_the_way_out(pool, tmp_path):
    given = ["attention=dense", "config=llama3_8b", "world_size=1", "hardware=cpu", "launch.memory_limit_gb=16"]
    (row,) = max_seq.search(overrides.jobs(given), pool, tmp_path)
    assert row.status == "unsupported" and not row.trials
    assert "on this CPU; use a GPU, a smaller launch.memory_limit_gb, or launch.timeout_s=" in row.reason
