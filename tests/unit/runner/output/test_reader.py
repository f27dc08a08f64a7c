"""Results are read back as written; a file that is no result is named, and the others are read."""

import json
import re

import pytest

from runner import compare, plan
from runner.config.values import InvalidConfig
from runner.output import results, summary
from runner.output.parsing import decoded
from runner.output.reader import UnreadableFile, read_result, read_results
from runner.output.record import Result
from runner.report import runs as report_runs
from runner.report.comparison import comparison_table
from runner.report.tables import runs_table
from tests.program.test_regular_files import IRREGULAR, irregular
from tests.support.recorded import files, measured, refused


def test_a_result_is_read_back_as_written(tmp_path):
    folder = tmp_path / "deep" / "run"
    value = measured("a")
    results.write_result(folder, value)
    found = read_result(folder)
    assert found.plain == json.loads(json.dumps(value))
    assert found.timing.passes["backward"].median == 10 and found.experiment.workload.seq_len == 1024
    assert files(folder) == {"result.json"}


GOOD = json.dumps(measured("odd"))


def changed(path: str, new) -> bytes:
    """A good result with one place changed; without it where `new` is ...; every key but the last one of the path is
    there."""
    value = json.loads(GOOD)
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
    "beyond a float": (b'{"config": 1e999}', "has the number 1e999, which is not finite"),
    "longer than a float": (b'{"config": 1%s}' % (b"0" * 400), "which is not finite"),
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
            ("failure", ["x"], r'failure must be an object, is \["x"\]'),
            ("failure", {"log_tail": 3}, "failure.log_tail must be a list, is 3"),
            ("artifacts", ["x"], "artifacts must be an object"),
            ("artifacts", {"log": "/etc/passwd"}, 'log must be the name of a file, is "/etc/passwd"'),
            ("artifacts", {"log": "x" * 5000}, 'log must be the name of a file, is "x'),
            ("name", "../x", 'name must be the name of a file, is "../x"'),
            ("environment", {"started_at": 1e20}, r"environment.started_at must be a Unix time, is 1e\+20"),
            ("timing.passes.total.median", -1, "timing.passes.total must have samples and a median above 0"),
            ("timing.passes.total.ci95", [2, 1], r"total.ci95 must be from less to more, is \[2, 1\]"),
            ("timing.passes.total.median", 1e308, r"timing.passes.total.median must be 0 or from .*, is 1e\+308"),
            ("timing.passes.total.median", 5e-324, "timing.passes.total.median must be 0 or from .*, is 5e-324"),
            ("memory.by_rank", [{"graphs": 10**70}], "memory.by_rank.graphs must be 0 or from"),
            ("experiment.workload.heads", 0, "experiment: heads must be a size, is 0"),
            ("environment", {"started_at": float("inf")}, "has the number Infinity, which is not finite"),
            ("config", {"a": float("nan")}, "has the number NaN, which is not finite"),
            ("config", {"a": "\0"}, "has a NUL within a text"),
            ("reason", "\ud800", "half of a surrogate pair"),
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
    assert isinstance(read_result(tmp_path / "odd"), UnreadableFile)
    found, problems = read_results(tmp_path)
    assert [result.name for result in found] == ["good"]
    assert re.search(f"^{re.escape(str(odd))}: left out: .*{said}", str(problems[0])) and len(problems) == 1
    assert [row["name"] for row in summary.summarize_sweep(tmp_path)] == ["good"]
    assert compare.main([str(tmp_path), str(tmp_path)]) == 0
    assert [run.result.name for run in report_runs.read([tmp_path])] == ["good"]
    assert capsys.readouterr().err == f"{problems[0]}\n"


@pytest.mark.parametrize("value", [None, 3, [], [-5, 0], ["x"], "x", {}, {"name": 3}, {"name": ["x"]}, True])
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
        "replay",
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
    [(ODD[name][0], "0", "left out") for name in ("empty", "object", "list", "no status")]
    + [(json.dumps(measured("a")).encode(), "abc", "its key is 0, this run's is abc")],
    ids=["empty", "object", "list", "no status", "foreign key"],
)
def test_resume_runs_again_what_is_no_result_of_this_run_and_names_it(tmp_path, capsys, content, key, said):
    path = tmp_path / "a" / "result.json"
    path.parent.mkdir()
    path.write_bytes(content)
    assert plan.earlier(path.parent, key) is None
    assert re.fullmatch(f"{re.escape(str(path))}: .*{said}.*\n", capsys.readouterr().err)
    results.write_result(path.parent, measured("a"))
    assert plan.earlier(path.parent, "0").status == "ok"
    assert plan.earlier(tmp_path / "b", "0") is None


def test_resume_refuses_to_overwrite_a_result_of_a_newer_version(tmp_path):
    (tmp_path / "result.json").write_bytes(ODD["schema_version=99"][0])
    with pytest.raises(
        InvalidConfig, match=r"schema_version 99 is newer than 2.* give another hydra\.sweep\.dir=FOLDER"
    ):
        plan.earlier(tmp_path, "0")


@pytest.mark.parametrize("text", [r"a\\u0000", r"\ud83d\ude00", "1e308", "\u2028"])
def test_odd_texts_and_numbers_that_json_has_are_read(text):
    assert decoded(f'["{text}"]') == json.loads(f'["{text}"]')


@pytest.mark.parametrize("name", ["result.json", "results.parquet"])
@pytest.mark.parametrize("kind", ["fifo", "device", "folder", "large"])
def test_only_regular_files_up_to_a_size_are_read_as_results(tmp_path, kind, name):
    results.write_result(tmp_path / "good", measured("good"))
    path = tmp_path / ("odd" if name == "result.json" else "") / name
    path.parent.mkdir(exist_ok=True)
    irregular(path, kind)
    found, problems = read_results(tmp_path)
    assert [result.name for result in found] == ["good"]
    assert [one.path for one in problems] == [path] and re.search(IRREGULAR, problems[0].why)


def test_a_result_in_memory_may_have_numbers_that_are_null_in_its_file():
    value = measured("a") | {"comm": {"drift": float("nan")}}
    assert Result.of(value).status == "ok"


def test_an_older_result_is_read(tmp_path):
    older = measured("a") | {"schema_version": 1}
    older["timing"] = {"passes": older["timing"]["passes"]}
    results.write_result(tmp_path, older)
    assert read_result(tmp_path).schema_version == 1
