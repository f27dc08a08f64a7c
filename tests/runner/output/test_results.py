"""Results: the schema, files that appear whole or not at all, and a sweep's summary."""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest
from rich.console import Console

from runner import app, compare, pack
from runner.launch.worlds import WorldSpec
from runner.measure import metrics
from runner.measure.statistics import summarize
from runner.output import display, results, summary, terminal
from runner.output.reader import Problem, read_result, read_results
from runner.output.record import Result
from runner.report import runs as report_runs
from runner.report.comparison import comparison_table
from runner.report.tables import runs_table
from tests.support.composing import python, resolved

ROOT = Path(__file__).parents[3]
# the names in outputs/README.md; those before a <...> begin others, as comm_<what> does
SPANS = re.findall(r"`([^`\n]+)`", (ROOT / "outputs" / "README.md").read_text())
NAMED = {name for span in SPANS for name in re.findall(r"[A-Za-z_]\w*", span)}
BEGUN = tuple({start for span in SPANS for start in re.findall(r"(\w+_)<", span)})
# under these stand names that are not ours, or the configuration's
OPEN = {
    "config", "experiment", "options", "variables", "packages", "stage_seconds", "estimates_ms", "tried_ms", "left_out",
    "gpus_before", "gpus_after", "passed_over", "settings_ms", "settings_left_out",
}  # fmt: skip

NAN, INF = float("nan"), float("inf")


def refused(name: str, status: str, reason: str) -> dict:
    return results.result(status=status, reason=reason, key="0", name=name, config={"attention": {"name": "ring"}})


def measured(name: str, seq_len: int = 1024) -> dict:
    """A run that went well: 4 ms forward, 10 ms backward."""
    spec = resolved(f"seq_len={seq_len}")
    passes = {"forward": [4.0] * 10, "backward": [10.0] * 10, "total": [14.0] * 10}
    summaries = {which: summarize(ms) for which, ms in passes.items()}
    return results.result(
        status="ok",
        key="0",
        name=name,
        config={"config": "default", "attention": {"name": spec.variant}},
        experiment=spec.plain(),
        chosen={"kernel": "sdpa_flash", "transport": "gloo"},
        correctness={"passed": True, "tensors": {"out": {"rel_l2": 2e-3}}},
        timing={"passes": {which: s.plain() for which, s in summaries.items()}},
        metrics=metrics.compute(spec, {which: s.median for which, s in summaries.items()}, None),
        memory={"by_rank": [{"peak_resident": 100}, {"peak_resident": 300}]},
        baseline={"speedup": {"total": 1.5}, "efficiency": {"total": 0.75}},
        phases={"forward": {"exposed_communication_ms": 0.25}},
    )


def files(folder) -> set[str]:
    return {path.name for path in folder.rglob("*") if path.is_file()}


def unnamed(value) -> Iterator[str]:
    """The keys of a result, at any depth, that outputs/README.md does not name."""
    for entry in value if isinstance(value, list) else []:
        yield from unnamed(entry)
    for key, below in value.items() if isinstance(value, dict) else []:
        if key not in NAMED and not key.startswith(BEGUN):
            yield key
        if key not in OPEN:
            yield from unnamed(below)


def strict(text: str):
    """JSON as the standard has it: NaN and Infinity are errors."""

    def refuse(constant: str):
        raise ValueError(constant)

    return json.loads(text, parse_constant=refuse)


def test_a_result_has_every_field_and_none_where_there_is_nothing_to_say():
    value = results.result(status="oom", reason="too large")
    assert set(value) == set(results.FIELDS)
    assert value["schema_version"] == results.SCHEMA_VERSION
    assert {key for key, x in value.items() if x is not None} == {"schema_version", "status", "reason"}


@pytest.mark.parametrize("fields", [{"status": "ok", "speed": 3}, {"status": "fine"}])
def test_unknown_fields_and_statuses_are_refused(fields):
    with pytest.raises(AssertionError):
        results.result(**fields)


def test_a_result_is_read_back_as_written(tmp_path):
    folder = tmp_path / "deep" / "run"
    value = measured("a")
    results.write_result(folder, value)
    found = read_result(folder)
    assert found.plain == json.loads(json.dumps(value))
    assert found.timing.passes["backward"].median == 10 and found.experiment.workload.seq_len == 1024
    assert files(folder) == {"result.json"}


def test_a_later_result_replaces_an_earlier_one(tmp_path):
    results.write_result(tmp_path, refused("a", "crash", "rank 1"))
    results.write_result(tmp_path, measured("a"))
    assert read_result(tmp_path).status == "ok"
    assert files(tmp_path) == {"result.json"}


def test_nan_and_infinity_become_null_at_any_depth(tmp_path):
    value = results.result(status="incorrect", correctness={"a": NAN, "b": [1.5, INF, {"c": (-INF, 2)}]}, comm=NAN)
    results.write_result(tmp_path, value)
    found = strict((tmp_path / "result.json").read_text())
    assert found["correctness"] == {"a": None, "b": [1.5, None, {"c": [None, 2]}]}
    assert found["comm"] is None


def changed(path: str, new) -> bytes:
    """A good result with one place changed; without it where `new` is ...; every key but the last one of the path is
    there."""
    value = json.loads(json.dumps(measured("odd")))
    *way, last = path.split(".")
    at = value
    for key in way:
        at = at[key]
    if new is ...:
        del at[last]
    else:
        at[last] = new
    return json.dumps(value).encode()


ODD = {
    "empty": (b"", "is empty"),
    "truncated": (b'{"schema_version": 2, "na', "is no JSON"),
    "binary": (b"\x80\x02\xff\x00", "is no text"),
    "null": (b"null", "must be a JSON object, is null"),
    "object": (b"{}", "schema_version is missing"),
    "list": (b"[]", r"must be a JSON object, is \[\]"),
    "number": (b"3", "must be a JSON object, is 3"),
    "deep": (b"[" * 100_000, "nested too deep"),
    **{f"no {key}": (changed(key, ...), f"{key} is missing") for key in ("name", "status", "key", "schema_version")},
    **{
        f"{path}={new!r}": (changed(path, new), said)
        for path, new, said in (
            ("schema_version", 99, "schema_version 99 is newer than 2"),
            ("schema_version", "2", 'schema_version must be a whole number, is "2"'),
            ("status", "fine", 'status must be one of ok, invalid, .*, is "fine"'),
            ("name", 3, "name must be a text, is 3"),
            ("reason", ["x"], r'reason must be a text, is \["x"\]'),
            ("config", "x", 'config must be an object, is "x"'),
            ("experiment", None, "timing is there and experiment is null"),
            ("experiment.workload", None, "experiment.workload is missing"),
            ("experiment.workload.window", None, "experiment.workload.window is missing"),
            ("experiment.workload.window", [1], r"experiment.workload.window must have 2 values, is \[1\]"),
            ("experiment.workload.seq_len", "x", "experiment.workload.seq_len must be a whole number"),
            ("experiment.workload.causal", 1, "experiment.workload.causal must be true or false, is 1"),
            ("experiment.timing", [], r"experiment.timing must be an object, is \[\]"),
            ("chosen", {}, "chosen.kernel is missing"),
            ("environment", "x", "environment must be an object"),
            ("correctness", {"tensors": 3}, "correctness.tensors must be an object, is 3"),
            ("timing", "x", 'timing must be an object, is "x"'),
            ("timing", None, "status is ok and timing is null"),
            ("timing.passes", {}, "timing.passes must have forward"),
            ("timing.passes.total.median", "x", "timing.passes.total.median must be a number"),
            ("timing.passes.total.median", True, "timing.passes.total.median must be a number, is true"),
            ("metrics", None, "timing is there and metrics is null"),
            ("metrics.passes", {}, "metrics.passes must have backward, forward, total"),
            ("memory", None, "timing is there and memory is null"),
            ("memory", {"by_rank": []}, "memory.by_rank must have a rank"),
            ("memory", {"by_rank": [3]}, r"memory.by_rank\[0\] must be an object"),
            ("baseline", {"speedup": {"total": 2}}, "of the same passes"),
            ("phases", {"forward": 1}, "phases.forward must be an object, is 1"),
        )
    },
}


@pytest.mark.parametrize("name", ODD)
def test_a_file_that_is_no_result_is_named_in_a_line_and_the_others_are_kept(tmp_path, capsys, name):
    content, said = ODD[name]
    results.write_result(tmp_path / "good", measured("good"))
    odd = tmp_path / "odd" / "result.json"
    odd.parent.mkdir()
    odd.write_bytes(content)
    assert read_result(tmp_path / "nothing") is None
    assert isinstance(read_result(tmp_path / "odd"), Problem)
    found, problems = read_results(tmp_path)
    assert [result.name for result in found] == ["good"]
    assert re.search(f"^{re.escape(str(odd))}: left out: .*{said}", str(problems[0])) and len(problems) == 1
    assert [row["name"] for row in summary.summarize_sweep(tmp_path)] == ["good"]
    assert compare.main([str(tmp_path), str(tmp_path)]) == 0
    assert [run.result.name for run in report_runs.read([tmp_path])] == ["good"]
    assert capsys.readouterr().err == f"{problems[0]}\n"


@pytest.mark.parametrize("value", [None, 3, [], ["x"], "x", {}, {"name": 3}, {"name": ["x"]}, True])
@pytest.mark.parametrize(
    "key",
    [
        "attention",
        "kernel",
        "timing",
        "dtype",
        "seq_len",
        "window",
        "causal",
        "seqlens",
        "graphs",
        "world_size",
        "config",
    ],
)
def test_a_refused_runs_configuration_may_hold_anything(tmp_path, key, value):
    refusal = refused("odd", "invalid", "why not")
    refusal["config"] |= {"causal": True, "window": [-1, -1], key: value}
    results.write_result(tmp_path / "odd", refusal)
    results.write_result(tmp_path / "good", measured("good"))
    runs = report_runs.read([tmp_path])
    assert sorted(run.result.name for run in runs) == ["good", "odd"]
    assert runs_table(runs).rows and comparison_table(runs).rows
    assert len(summary.sweep_rows(tmp_path)) == len(compare.compare(runs, runs, "total", 0.02, 0.05)) == 2


@pytest.mark.parametrize(
    ("content", "key", "said"),
    [(ODD[name][0], "0", "left out") for name in ("empty", "object", "list", "no status", "schema_version=99")]
    + [(json.dumps(measured("a")).encode(), "abc", "its key is 0, this run's is abc")],
    ids=["empty", "object", "list", "no status", "newer", "foreign key"],
)
def test_resume_runs_again_what_is_no_result_of_this_run_and_names_it(tmp_path, capsys, content, key, said):
    path = tmp_path / "a" / "result.json"
    path.parent.mkdir()
    path.write_bytes(content)
    assert app._earlier(path.parent, key) is None
    assert re.fullmatch(f"{re.escape(str(path))}: .*{said}.*\n", capsys.readouterr().err)
    results.write_result(path.parent, measured("a"))
    assert app._earlier(path.parent, "0").status == "ok"
    assert app._earlier(tmp_path / "b", "0") is None


def test_an_older_result_is_read(tmp_path):
    older = measured("a") | {"schema_version": 1}
    older["timing"] = {"passes": older["timing"]["passes"]}
    results.write_result(tmp_path, older)
    assert read_result(tmp_path).schema_version == 1


# each writes far more than the 4096 bytes that a file may have
WRITERS = {
    "result.json": "results.write_result(folder, results.result(status='ok', reason='x' * 100_000))",
    "samples.parquet": "results.write_samples(folder / 'samples.parquet', [{'forward': [i / 7 for i in range(9999)]}])",
    "phases.csv": "results.write_csv(folder / 'phases.csv', [{'ms': i / 7} for i in range(9999)], ['ms'])",
    "summary.parquet": "summary.write_parquet(folder / 'summary.parquet', [{'ms': i / 7} for i in range(9999)])",
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_full_disk_is_an_error_that_leaves_the_earlier_file_and_nothing_else(tmp_path, name):
    (tmp_path / name).write_bytes(b"as it was")
    program = f"""
import resource, sys
from pathlib import Path
import pyarrow.parquet
from runner.output import results, summary
folder = Path({str(tmp_path)!r})
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))  # Python ignores SIGXFSZ: writing beyond it gives EFBIG
try:
    {WRITERS[name]}
except OSError as error:
    sys.exit(f"refused: {{error.errno}}")
"""
    done = python("-c", program, cwd=tmp_path)
    assert done.stderr.startswith("refused"), done.stderr
    assert (tmp_path / name).read_bytes() == b"as it was"
    assert os.listdir(tmp_path) == [name]


def test_samples_have_a_row_for_every_iteration_of_every_rank_and_pass(tmp_path):
    by_rank = [{"forward": [1.5, 2.5, 3.5], "backward": [7, 8, 9]}, {"forward": [4, 5, 6], "backward": [1, 1, 2.25]}]
    results.write_samples(tmp_path / "samples.parquet", by_rank)
    found = pd.read_parquet(tmp_path / "samples.parquet")
    assert list(found.columns) == ["iteration", "round", "rank", "pass", "ms"]
    assert found["ms"].dtype == "float64"
    for rank, passes in enumerate(by_rank):
        for which, ms in passes.items():
            rows = found[(found["rank"] == rank) & (found["pass"] == which)]
            assert list(rows["iteration"]) == [0, 1, 2]
            assert list(rows["ms"]) == ms
    assert len(found) == 12
    assert files(tmp_path) == {"samples.parquet"}


def test_a_table_is_written_as_csv_with_the_asked_columns(tmp_path):
    rows = [{"phase": "comp, block", "ms": 1.25, "more": 1}, {"phase": "wait_kv", "ms": None}]
    results.write_csv(tmp_path / "phases.csv", rows, ["phase", "ms"])
    assert (tmp_path / "phases.csv").read_text().splitlines() == ["phase,ms", '"comp, block",1.25', "wait_kv,"]


def test_a_row_of_the_summary_is_the_last_pass_of_the_slowest_rank():
    row = summary.row(Result.of(measured("a", 2048)))
    assert tuple(row) == summary.COLUMNS
    expected = {
        "name": "a", "status": "ok", "reason": None, "attention": "zigzag", "config": "default", "world_size": 2,
        "device": "cpu", "kernel": "sdpa_flash", "transport": "gloo", "batch": 2, "seq_len": 2048, "heads": 8,
        "kv_heads": 8, "head_dim": 64, "causal": True, "window": "-1,-1", "dtype": "bf16", "timing": "warmup",
        "forward_ms": 4, "backward_ms": 10, "total_ms": 14, "forward_iqr": 0, "backward_iqr": 0, "sol": None,
        "speedup": 1.5, "efficiency": 0.75, "exposed_forward_ms": 0.25, "exposed_backward_ms": None,
        "peak_bytes": 300, "rel_l2_out": 2e-3,
    }  # fmt: skip
    assert {key: row[key] for key in expected} == expected
    assert row["tokens_per_s"] == pytest.approx(2 * 2048 / 14e-3)
    # 4 B H D S (S + 1) / 2 pairs, three and a half times, on 2 devices in 14 ms
    assert row["tflops_per_device"] == pytest.approx(4 * 2 * 8 * 64 * 2048 * 2049 / 2 * 3.5 / 2 / 14e-3 / 1e12)


def test_a_sweeps_summary_has_a_row_for_every_run_the_failed_ones_with_their_reason(tmp_path):
    results.write_result(tmp_path / "a", measured("a"))
    results.write_result(tmp_path / "b", refused("b", "oom", "rank 1 in phase timing: out of memory, 3 GiB asked"))
    rows = summary.summarize_sweep(tmp_path)
    assert [row["name"] for row in rows] == ["a", "b"]
    for table in (pd.read_csv(tmp_path / "summary.csv"), pd.read_parquet(tmp_path / "summary.parquet")):
        assert list(table.columns) == list(summary.COLUMNS)
        assert list(table["status"]) == ["ok", "oom"]
        assert table["reason"][1] == "rank 1 in phase timing: out of memory, 3 GiB asked"
        assert table["total_ms"][0] == 14 and pd.isna(table["total_ms"][1])
    text = (tmp_path / "summary.md").read_text()
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert len(table) == 4  # the heading, its rule, two runs
    assert "14.000" in table[2] and "1,024" in table[2] and "oom" in table[3]
    assert len({line.count("|") for line in table}) == 1
    assert "- `b`: oom: rank 1 in phase timing: out of memory, 3 GiB asked" in text.splitlines()
    assert files(tmp_path) == {"result.json", "summary.csv", "summary.parquet", "summary.md"}


@pytest.mark.parametrize(
    ("column", "title", "sets"),
    [
        ("window", "window", [{"window": (512, 0)}, {"window": (1024, 0)}]),
        ("kv_heads", "KV heads", [{"kv_heads": 2}, {"kv_heads": 4}]),
        ("batch", "batch", [{"batch": 1}, {"batch": 2}]),
        ("q_len", "queries", [{"q_len": 1}, {"q_len": 4}]),
        ("seqlens", "sequences", [{"seqlens": [512, 512]}, {"seqlens": [64] * 16}]),
    ],
)
def test_a_sweeps_table_shows_what_was_swept_and_only_that(capsys, column, title, sets):
    rows = []
    for number, values in enumerate(sets):
        value = measured(f"run{number}")
        value["experiment"]["workload"] |= values
        rows.append(summary.row(Result.of(value)))
    assert rows[0][column] != rows[1][column]
    headings = summary.markdown(rows).splitlines()[0].strip("| ").split(" | ")
    titles = {title for key, title, _ in summary.SHOWN if key in summary.WHERE_DIFFERENT}
    assert titles & set(headings) == {title}
    display.sweep_table(rows)
    assert title in capsys.readouterr().out


def test_a_summary_picks_up_new_runs_and_passes_over_unfinished_ones(tmp_path):
    assert summary.summarize_sweep(tmp_path) == []
    assert files(tmp_path) == set()
    results.write_result(tmp_path / "b", refused("b", "crash", "rank 0"))
    summary.summarize_sweep(tmp_path)
    (tmp_path / "c").mkdir()
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "result.json").write_text('{"status":')
    results.write_result(tmp_path / "a", measured("a"))
    results.write_result(tmp_path / "b", measured("b", 4096))
    summary.summarize_sweep(tmp_path)
    found = pd.read_parquet(tmp_path / "summary.parquet")
    assert list(found["name"]) == ["a", "b"]
    assert list(found["status"]) == ["ok", "ok"]
    assert list(found["seq_len"]) == [1024, 4096]
    assert "crash" not in (tmp_path / "summary.md").read_text()


def test_a_refused_runs_row_says_what_was_asked_as_far_as_it_is_of_the_right_type(tmp_path):
    config = {
        "attention": {"name": "tree", "reduce": "fused", "node_size": None}, "kernel": {"name": "auto"},
        "timing": {"method": "cudagraph"}, "config": "decode_128k", "world_size": "auto", "seq_len": 1024, "causal": False,
        "heads": True, "batch": "two", "seed": None, "dtype": "bf16",
    }  # fmt: skip
    value = results.result(status="unsupported", reason="no GPU", key="0", name="a", config=config)
    asked = {key: x for key, x in summary.row(Result.of(value)).items() if x is not None}
    assert asked == {
        "name": "a", "status": "unsupported", "reason": "no GPU", "attention": "tree", "options": "reduce=fused",
        "timing": "cudagraph", "config": "decode_128k", "seq_len": 1024, "causal": False,
    }  # fmt: skip
    for number, n in enumerate((512, 1024)):
        results.write_result(tmp_path / str(number), value | {"config": config | {"seq_len": n}})
    assert [row["seq_len"] for row in summary.summarize_sweep(tmp_path)] == [512, 1024]


def test_numbers_beyond_int64_leave_the_summary_whole(tmp_path):
    for name, asked in (("a", 10**20), ("b", -(10**20)), ("c", 2**63 - 1)):
        value = refused(name, "invalid", f"seq_len={asked}: too large")
        value["config"] |= {"seq_len": asked, "seed": asked}
        results.write_result(tmp_path / name, value)
    summary.summarize_sweep(tmp_path)
    table = pd.read_parquet(tmp_path / "summary.parquet", dtype_backend="pyarrow").set_index("name")
    assert table["seq_len"].isna().to_dict() == {"a": True, "b": True, "c": False}
    assert table["seq_len"]["c"] == 2**63 - 1 and "100000000000000000000" in table["reason"]["a"]
    pack.pack(tmp_path, tmp_path / "packed")


def test_a_summarys_rows_stand_in_the_order_of_the_runs(tmp_path):
    for name, started in (("b", 10.0), ("c", 30.0), ("a", 20.0)):
        value = refused(name, "crash", "rank 0") if name == "a" else measured(name)
        value["environment"] = (value["environment"] or {}) | {"started_at": started}
        results.write_result(tmp_path / name, value)
    assert [row["name"] for row in summary.summarize_sweep(tmp_path)] == ["b", "a", "c"]


def test_a_summary_of_failures_only_can_be_written(tmp_path):
    value = results.result(status="invalid", reason="seq_len=x", key="0", name="a", config={"overrides": ["seq_len=x"]})
    results.write_result(tmp_path / "a", value)
    summary.summarize_sweep(tmp_path)
    assert list(pd.read_parquet(tmp_path / "summary.parquet")["status"]) == ["invalid"]


def test_what_was_counted_stands_in_the_summary_beside_the_models_bytes():
    value = measured("grouped")
    value["metrics"]["kv_bytes_read_by_rank"] = [10, 12]
    assert summary.row(Result.of(value))["kv_read_bytes"] is None
    value["timing"]["counters"] = {"passes": {"forward": {"memory_read_bytes": 5, "l2_read_bytes": 7}}}
    found = summary.row(Result.of(value))
    assert [found[key] for key in ("kv_read_bytes", "forward_memory_read_bytes", "forward_l2_read_bytes")] == [12, 5, 7]


def test_every_column_and_every_key_of_a_result_is_named_in_the_readme_of_the_outputs():
    assert set(summary.COLUMNS) <= NAMED
    assert set(results.FIELDS) <= NAMED
    experiments = sorted(path for path in ROOT.glob("results/*/*") if path.is_dir())
    for folder in experiments:
        recorded, _ = read_results(folder)
        for result in recorded[:: max(1, len(recorded) // 4)]:
            assert not set(unnamed(result.plain)), result.folder


def test_a_runs_table_says_what_stood_in_for_another(capsys):
    value = measured("run") | {
        "status": "incorrect",
        "timing": None,
        "chosen": {
            "kernel": "sdpa_cudnn", "transport": "nccl", "note": "symm: no peer access [here]",
            "passed_over": {"flash4": "needs the package [flash-attn-4]"},
        },
    }  # fmt: skip
    value["correctness"] = None
    display.run_table(Result.of(value))
    said = capsys.readouterr().out
    assert "kernel sdpa_cudnn, not flash4: needs the package [flash-attn-4]" in said
    assert "note: symm: no peer access [here]" in said
    value["chosen"] = {"kernel": "flash4", "transport": "symm", "note": None, "passed_over": {}}
    display.run_table(Result.of(value))
    assert capsys.readouterr().out == ""


def test_a_runs_table_says_what_makes_its_times_doubtful(capsys):
    value = measured("run")
    value["timing"] |= {"overhead_ms": 0.1, "overhead_share": 0.025, "overhead_high": True}
    value["timing"]["passes"]["forward"]["trend"] = True
    value["metrics"]["passes"]["forward"]["no_sol"] = "283% of what the matrix product measured here allows"
    ran = {"device": "GPU-1", "samples": 9, "throttle_reasons": ["gpu_idle", "sw_power_cap"]}
    gpus = [ran | {"sm_mhz": {"min": low, "median": 1800, "max": 1980}} for low in (1755, 1620)]
    value["environment"] = {"during": {"by_device": gpus}, "git": None}
    value["chosen"] |= {"settings_ms": {"ulysses_size=4": 1.5, "ulysses_size=2": 2.0}}
    display.run_table(Result.of(value))
    said = capsys.readouterr().out
    for text in (
        "0.0%~", "~ means that samples rose or fell", "timing itself takes 100.0 us, 2.5% of the shortest pass",
        "no limit of forward: 283% of what", "clocks while timing: 1,620 to 1,980 MHz, held down by sw_power_cap",
        "commit unknown", "at its best: ulysses_size=4 (tried: ulysses_size=4 1.500 ms; ulysses_size=2 2.000 ms)",
    ):  # fmt: skip
        assert text in said
    value["timing"]["passes"]["forward"]["trend"] = value["timing"]["overhead_high"] = False
    value["environment"] = {}
    display.run_table(Result.of(value))
    said = capsys.readouterr().out
    assert not any(text in said for text in ("~", "timing itself", "clocks"))


def swept(folder, *overrides: list[str] | None) -> list[dict]:
    for number, given in enumerate(overrides):
        value = measured(f"run{number}")
        for key, text in (override.split("=", 1) for override in given or ()):
            if key.startswith("timing."):
                value["experiment"]["timing"][key.removeprefix("timing.")] = json.loads(text)
            if key == "attention":
                value["config"]["attention"] = {"name": text}
            elif key == "seq_len":
                value["experiment"]["workload"]["seq_len"] = int(text)
            elif key == "seqlens":
                value["experiment"]["workload"]["seqlens"] = json.loads(text)
            elif key == "world_size":
                value["experiment"]["world_size"] = int(text)
        value["environment"] = {"started_at": number} | ({"overrides": given} if given is not None else {})
        results.write_result(folder / f"run{number}", value)
    return summary.summarize_sweep(folder)


def test_what_has_no_column_of_its_own_is_told_apart_by_its_settings(tmp_path, capsys):
    rows = swept(
        tmp_path,
        ["attention=ring", "timing.timing_runs=6", "+experiment=peers", "check.enabled=true"],
        [
            "attention=ring",
            "timing.timing_runs=8",
            "+experiment=peers",
            "check.enabled=true",
            "launch.fault=1\\:timing\\:kill",
        ],
        ["attention=zigzag", "timing.timing_runs=8", "+experiment=peers", "check.enabled=true"],
    )
    assert [row["settings"] for row in rows] == [
        "timing.timing_runs=6", "timing.timing_runs=8 launch.fault=1:timing:kill", "timing.timing_runs=8",
    ]  # fmt: skip
    assert "| timing.timing_runs=6 |" in (tmp_path / "summary.md").read_text()
    display.sweep_table(rows)
    assert "timing.timing_runs=8 launch.fault=1:timing:kill" in capsys.readouterr().out


def test_runs_that_differ_only_in_columns_have_no_settings(tmp_path):
    rows = swept(tmp_path, ["attention=ring", "seq_len=8"], ["attention=usp", "seq_len=16", "world_size=4"])
    assert [row["settings"] for row in rows] == [None, None]
    assert "settings" not in (tmp_path / "summary.md").read_text()


def test_how_a_sample_was_made_is_told_by_the_columns_of_timing_and_sequences(tmp_path):
    pack = "seqlens=[64,64,128]"
    rows = swept(tmp_path, [pack, "timing.layers=1"], [pack, "timing.layers=4", "timing.autograd_thread=true"])
    assert [row["timing"] for row in rows] == ["warmup", "warmup over 4 layers with autograd's thread"]
    assert [row["settings"] for row in rows] == [None, None]
    rows = swept(tmp_path, [pack, "timing.new_packs=false"], [pack, "timing.new_packs=true"])
    assert [row["seqlens"] for row in rows] == ["64,64,128", "3 sequences, in a new order each time"]
    assert [row["settings"] for row in rows] == [None, None]


def test_what_auto_took_and_what_a_resumed_sweep_kept_do_not_hide_or_add_settings(tmp_path):
    same = ["kernel=auto", "baseline=none", "output=a"]
    rows = swept(tmp_path, None, same, ["kernel=sdpa_flash", "baseline=none", "output=b", "resume=true"])
    assert rows[1]["kernel"] == rows[2]["kernel"] == "sdpa_flash"
    assert [row["settings"] for row in rows] == [None, "kernel=auto", "kernel=sdpa_flash"]


def test_packs_beside_single_sequences_are_said_to_be_other_work(capsys):
    rows = [summary.row(Result.of(measured(name))) for name in "ab"]
    rows[1]["seqlens"] = "512,512"
    assert "of packed batches" in summary.markdown(rows) and "| sequences |" in summary.markdown(rows)
    display.sweep_table(rows)
    said = capsys.readouterr().out
    assert "512,512" in said and "of packed batches" in said
    rows[0]["seqlens"] = "512,512"
    assert "of packed batches" not in summary.markdown(rows)


@pytest.mark.parametrize("term", ["xterm", "dumb"])
@pytest.mark.parametrize("columns", [30, 60, 400])
def test_no_figure_is_cut_in_a_narrow_terminal(columns, term, capsys, monkeypatch):
    monkeypatch.setenv("TERM", term)
    rows = [summary.row(Result.of(measured(f"run{number}", 1024 * (number + 1)))) for number in range(2)]
    rows[1] |= {
        "total_ms": 123456.789,
        "forward_ms": 3.0,
        "backward_ms": 8.0,
        "attention": "zigzag_llama3",
        "dtype": "fp32",
    }
    monkeypatch.setattr(terminal, "out", Console(width=columns, height=25, highlight=False, force_terminal=True))
    display.sweep_table(rows)
    said = capsys.readouterr().out
    assert "123456.789" in said and "zigzag_llama3" in said and "…" not in said
    assert ("too narrow" in said) == (columns < 400)


def test_a_run_of_the_forward_alone_keeps_its_time_in_a_narrow_terminal(capsys, monkeypatch):
    rows = [summary.row(Result.of(measured(name))) for name in "ab"]
    rows[0] |= {"total_ms": None, "backward_ms": None, "forward_ms": 4.321, "mode": "forward"}
    monkeypatch.setattr(terminal, "out", Console(width=30, height=25, highlight=False, force_terminal=True))
    display.sweep_table(rows)
    assert "4.321" in capsys.readouterr().out


def test_a_run_whose_ranks_share_a_gpu_is_checked_and_says_why_it_is_not_timed(pool, tmp_path, monkeypatch):
    """On a CPU, where ranks always share what there is."""
    spec = resolved(
        "hardware=cpu", "world_size=2", "seq_len=64", "heads=2", "kv_heads=2", "head_dim=16", "batch=1", "seed=1"
    )
    plain = spec.plain() | {"launch": spec.launch | {"share_gpu": True}}
    outcome = pool.get(WorldSpec(2, "cpu")).call("runner.measure.job:run", {"experiment": plain, "folder": None})
    assert outcome.status == "ok", outcome.reason
    about = {
        "key": "0",
        "name": "shared",
        "config": {"attention": {"name": "zigzag"}},
        "experiment": plain,
        "environment": {},
    }
    value = app._record(outcome.result, tmp_path, about)
    assert value["status"] == "ok" and value["correctness"]["passed"]
    assert value["timing"] is None and value["metrics"] is None
    assert value["reason"] == "not timed: launch.share_gpu=true has all ranks on one GPU"
    assert display.run_line(Result.of(value, tmp_path)) == f"shared: ok: {value['reason']}"
    row = summary.row(Result.of(value, tmp_path))
    assert row["status"] == "ok" and row.get("forward_ms") is None
    assert f"- `shared`: ok: {value['reason']}" in summary.markdown([row])
    monkeypatch.setattr(terminal, "out", Console(width=200, record=True))
    display.run_table(Result.of(value, tmp_path))
    said = terminal.out.export_text()
    assert "Correctness passed" in said and value["reason"] in said


def printed(monkeypatch, capsys, width: int, show) -> list[str]:
    monkeypatch.setattr(terminal, "out", Console(width=width, height=25, highlight=False))
    capsys.readouterr()
    show()
    return capsys.readouterr().out.splitlines()


def test_a_table_fits_80_columns_whole_words_and_all_rates_and_a_wide_terminal_shows_all(monkeypatch, capsys):
    rows = [summary.row(Result.of(measured(f"run{number}", 1024 * 4**number))) for number in range(4)]
    for number, row in enumerate(rows):
        row |= {
            "seed": number,
            "seqlens": f"{60 + number} sequences of 256 to 2240, 1074.4 on average",
            "kernel": f"sdpa_{number}",
        }
        row |= {
            "attention": "zigzag_llama3",
            "options": f"heads_k_stride={number}",
            "exposed_backward_ms": number + 0.5,
            "total_ms": 14.0 + number,
        }
    narrow, wide = (printed(monkeypatch, capsys, width, lambda: display.sweep_table(rows)) for width in (80, 220))
    assert max(map(len, narrow)) <= 80
    for number in range(4):
        (line,) = [line for line in narrow if f"heads_k_stride={number}" in line]
        assert {f"{14 + number}.000", "zigzag_llama3", f"{1024 * 4**number:,}"} <= set(line.split())
    assert "TFLOP/s" in " ".join(narrow) and any("too narrow here for" in line and "seed" in line for line in narrow)
    assert not any("too narrow" in line for line in wide) and "on average" in " ".join(wide)


def test_what_is_the_same_of_all_rows_goes_first():
    table = terminal.new_table()
    for title in ("name", "first", "same"):
        table.add_column(title)
    for name, first in zip("abcd", ["x" * 30, "y" * 30, "z", "w"], strict=True):
        table.add_row(name, first, "one" * 10)
    assert terminal.fit(table, 40, drop=("first", "same"))[1] == ["same"]
    assert terminal.fit(table, 20, drop=("first", "same"))[1] == ["same", "first"]
    assert terminal.fit(table, 200, drop=("first", "same"))[1] == []
