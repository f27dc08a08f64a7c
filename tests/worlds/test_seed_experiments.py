"""The commands of docs/seeds.md, some of them in a tiny form on CPU ranks."""

import re
import shlex
from pathlib import Path

import pytest

from runner import app, command
from runner.__main__ import parser
from runner.config import overrides
from runner.output import display, results, summary
from runner.record.result import Result
from runner.report import tables
from runner.report.runs import read
from tests.support.composing import configured
from tests.support.paths import ROOT

TINY = ["config=tiny", "hardware=cpu", "batch=1", "timing.timing_runs=2", "timing.warmup_runs=1", "timing.settle_ms=0"]
TOKENS = ["seq_len=128", "heads=2", "kv_heads=2", "head_dim=16"]
PAIRS = ["attention.segments=[32,64]", "attention.rates=[1,2]", *TOKENS]
MODEL = [
    "+experiment=model_quick", "model=decoder_tiny", "seq_len=64", "heads=2", "kv_heads=2", "head_dim=16", "model.layers=1",
    "model.hidden=32", "model.vocabulary=256", "model.steps=2", "world_size=1",
]  # fmt: skip
TIMES = ("Correctness passed", "forward", "backward", "total", "tokens/s", "speedup", "eff.", "Peak memory by rank")
# Commands of docs/seeds.md in a tiny form, and what the page promises of them
PROMISED = {
    "a ring": (["attention=ring", *TOKENS, "timing.timing_runs=3", "phases=table"], (*TIMES, "median of 3 samples", "wait_kv")),
    "dilated tiles": (
        ["attention=balanced", "mask=block_sparse", "mask.pattern=dilated_sparse", "mask.block=16", *TOKENS],
        (*TIMES, "mask block_sparse(pattern=dilated_sparse, block=16)", "fewer than dense"),
    ),
    "sparse beside dense": (
        ["attention=dense", "mask=dca", "baseline=dense", "world_size=1", *TOKENS],
        ("fewer than dense", "density", "dense", "speedup"),
    ),
    "a training": (
        [*MODEL, "mode=training", "phases=table"],
        ("parameters", "loss over", "optimizer", "tokens/s", "comp_mlp", "comp_head", "comp_loss", "comp_optimizer"),
    ),
    "dilated over ranks": (["+experiment=dilated_ring", "attention.mixing=longnet", *PAIRS], TIMES[:5]),
}  # fmt: skip


def done(pool, monkeypatch, folder: Path, *given: str) -> Result:
    """A tiny run on the warm pool, as its folder keeps it."""
    monkeypatch.setattr(app, "pool", pool)
    result = app.run(configured(*TINY, "world_size=2", *given), folder, seed=1)
    assert result.status == "ok", result.reason
    results.write_result(result)
    return result


@pytest.mark.parametrize("name", PROMISED)
def test_a_command_of_the_page_prints_or_records_what_the_page_promises(name, pool, tmp_path, monkeypatch, capsys):
    given, promised = PROMISED[name]
    result = done(pool, monkeypatch, tmp_path, *given)
    capsys.readouterr()
    display.run_table(result)
    text = capsys.readouterr().out + " ".join(path.name for path in tmp_path.iterdir())
    assert [word for word in promised if word not in text] == []
    row = summary.row(result)
    assert row["flops"] > 0 and row["peak_bytes"] > 0
    if name == "sparse beside dense":
        assert row["sparsity_ratio"] > 0 and row["flops"] < result.metrics.dense_flops["total"]
        assert row["speedup"] == pytest.approx(row["baseline_ms"] / row["total_ms"])


def test_the_profile_of_tree_attention_prints_its_phases(pool, tmp_path, monkeypatch, capsys):
    given = ["+experiment=tree_profile", "q_len=1", "causal=false", "baseline=none", "timing.phase_runs=4", *TOKENS]
    display.run_table(done(pool, monkeypatch, tmp_path, *given))
    text = capsys.readouterr().out
    computation, reductions = (
        ("shard_kv", "local_attention", "num_den", "final_output"),
        ("max_lse", "sum_den", "sum_num"),
    )
    for name in (*(f"comp_{x}" for x in computation), *(f"comm_{x}" for x in reductions)):
        # ms, share, mean ± deviation, total, the ranks' medians
        assert re.search(name + r" +\S+ +(\d+%|overlaps) +\S+ ± \S+ +\S+ +\d+\.\d+ \d+\.\d+", text), name


def test_inference_and_training_of_a_model_have_their_ratio_in_the_report(pool, tmp_path, monkeypatch):
    for mode in ("inference", "training"):
        done(pool, monkeypatch, tmp_path / mode, *MODEL, f"mode={mode}", "phases=false")
    runs = read([tmp_path])
    assert {run.mask for run in runs} == {"causal"}  # not causal & causal
    by_mode = {run.mode: run.ms("total") for run in runs}
    table = tables.models_table(runs)
    ratios = [row[table.titles.index(tables.RATIO)] for row in table.rows]
    assert sorted(ratios) == ["", f"{by_mode['training'] / by_mode['inference']:.2f}"]


def test_groupings_have_their_modelled_bytes_what_they_save_and_their_speedup(pool, tmp_path, monkeypatch):
    for grouping in ("separate", "packed"):
        given = ["attention=grouped", f"attention.grouping={grouping}", "world_size=1", "baseline=none", *TOKENS]
        done(pool, monkeypatch, tmp_path / grouping, *given)
    separate, packed = summary.summarize_sweep(tmp_path)
    assert packed["kv_read_bytes"] == 192 * 2 * 2 * 16 * 2  # prefixes of 64 and 128 keys, and as many values
    assert packed["speedup_over_separate"] == separate["total_ms"] / packed["total_ms"]


def test_every_command_of_the_table_of_earlier_suites_is_accepted():
    text = (ROOT / "docs" / "seeds.md").read_text()
    commands = re.findall(r"`(?:python -m runner )?((?:-m |\+experiment=|attention=\w+ )[^`]*)`", text)
    assert len(commands) > 30
    for line in commands:
        options = parser().parse_intermixed_args(shlex.split(line))
        assert overrides.jobs(options.overrides, options.multirun or command.is_sweep(options.overrides)), line
