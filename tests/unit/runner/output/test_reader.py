"""A file that is no result is named in a line, and the others are read."""

import json
import re

import pytest

from runner import compare, plan
from runner.config.values import InvalidConfig
from runner.output import summary
from runner.output.reader import UnreadableFile, read_result, read_results
from runner.record.parsing import decoded
from runner.report import entries, pairs
from runner.report import runs as report_runs
from runner.report.comparison import comparison_table
from runner.report.tables import runs_table
from tests.program.test_regular_files import IRREGULAR, irregular
from tests.support.recorded import measured, refused, write

GOOD = json.dumps(measured("odd"))


def changed(path, new):
    """A good result with one place changed; without it where `new` is ..."""
    at = value = json.loads(GOOD)
    *way, last = path.split(".")
    for key in way:
        at = at[key]
    at[last] = new
    if new is ...:
        del at[last]
    return json.dumps(value).encode()


PLACES = (
    ("name", ..., "name is missing"),
    ("schema_version", 99, "schema_version 99 is newer than 3"),
    ("schema_version", "2", 'schema_version must be a whole number, is "2"'),
    ("status", "fine", 'status must be one of ok, invalid, .*, is "fine"'),
    ("experiment.workload.window", None, "experiment: window is missing"),
    ("experiment.workload.window", [1], r"experiment.window must have 2 values, is \[1\]"),
    ("experiment.workload.heads", 0, "experiment: heads must be a size, is 0"),
    ("chosen", {}, "chosen.kernel is missing"),
    ("timing", None, "status is ok and timing is null"),
    ("timing.passes", {}, "metrics.passes must have forward"),
    ("timing.passes.total.median", -1, "timing.passes.total must have samples and a median above 0"),
    ("timing.passes.total.median", 1e308, r"timing: a number must be 0 or from .*, is 1e\+308"),
    ("timing.passes.total.ci95", [2, 1], r"total.ci95 must be from less to more, is \[2, 1\]"),
    ("metrics.passes", {}, "metrics.passes must have backward, forward, total"),
    ("memory", {"by_rank": []}, "memory.by_rank has no rank"),
    ("baseline", {"speedup": {"total": 2}}, "of the same passes"),
    ("baseline.speedup.total", -1, "must not be below 0"),
    ("artifacts", {"log": "/etc/passwd"}, 'log must be the name of a file, is "/etc/passwd"'),
    ("environment", {"started_at": 1e20}, r"environment.started_at must be a Unix time, is 1e\+20"),
    ("config", {"a": float("nan")}, "has the number NaN, which is not finite"),
    ("config", {"a": "\0"}, "has a NUL within a text"),
    ("reason", "\ud800", "half of a surrogate pair"),
)
ODD = {
    "empty": (b"", "is no JSON"),
    "binary": (b"\x80\x02\xff\x00", "can't decode byte"),
    "deep": (b"[" * 100_000, "recursion"),
    "longer than a float": (b'{"config": 1%s}' % (b"0" * 400), "which is not finite"),
    **{f"{path}={str(new)[:20]}": (changed(path, new), said) for path, new, said in PLACES},
}


@pytest.mark.parametrize("name", ODD)
def test_a_file_that_is_no_result_is_named_in_a_line_and_the_others_are_kept(tmp_path, capsys, name):
    content, said = ODD[name]
    write(tmp_path / "good", measured("good"))
    odd = tmp_path / "odd" / "result.json"
    odd.parent.mkdir()
    odd.write_bytes(content)
    assert isinstance(read_result(tmp_path / "odd"), UnreadableFile)
    runs, (problem,) = read_results(tmp_path)
    assert [result.name for result in runs] == ["good"]
    assert re.search(f"^{re.escape(str(odd))}: left out: .*{said}", str(problem))
    assert [row["name"] for row in summary.summarize_sweep(tmp_path)] == ["good"]
    assert compare.main([str(tmp_path), str(tmp_path)]) == 0
    assert capsys.readouterr().err == f"{problem}\n"


@pytest.mark.parametrize("value", [None, 3, [-5, 0], ["x"], "²", {"name": ["x"]}])
def test_a_refused_runs_configuration_may_hold_anything(tmp_path, value):
    keys = [
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
        "mask",
        "kv_lengths",
        "model",
        "hardware",
    ]
    for key in keys:
        refusal = refused(key, "invalid", "why not")
        refusal["config"] |= {"causal": True, "window": [-1, -1], key: value}
        write(tmp_path / key, refusal)
    write(tmp_path / "good", measured("good"))
    runs = report_runs.read([tmp_path])
    assert len(runs) == len(keys) + 1 == len(summary.sweep_rows(tmp_path))
    for run in runs:
        assert "batch" not in entries.changed(run.result.config)
    assert runs_table(runs).rows and comparison_table(runs).rows
    assert pairs.paired(runs, runs, "total", 0.02)


@pytest.mark.parametrize(
    ("name", "key", "said"), [("empty", "0", "left out"), ("", "abc", "its key is 0, this run's is abc")]
)
def test_resume_runs_again_what_is_no_result_of_this_run_and_names_it(tmp_path, capsys, name, key, said):
    path = tmp_path / "a" / "result.json"
    write(path.parent, measured("a"))
    path.write_bytes(ODD[name][0] if name else path.read_bytes())
    assert plan.earlier(path.parent, key) is None
    assert re.fullmatch(f"{re.escape(str(path))}: .*{said}.*\n", capsys.readouterr().err)
    write(path.parent, measured("a"))
    assert plan.earlier(path.parent, "0").status == "ok" and plan.earlier(tmp_path / "b", "0") is None


def test_resume_refuses_to_overwrite_a_result_of_a_newer_version(tmp_path):
    (tmp_path / "result.json").write_bytes(ODD["schema_version=99"][0])
    with pytest.raises(InvalidConfig, match=r"schema_version 99 is newer .* give another hydra\.sweep\.dir=FOLDER"):
        plan.earlier(tmp_path, "0")


@pytest.mark.parametrize("text", [r"a\\u0000", r"\ud83d\ude00", "1e308", "\u2028"])
def test_odd_texts_and_numbers_that_json_has_are_read(text):
    assert decoded(f'["{text}"]') == json.loads(f'["{text}"]')


@pytest.mark.parametrize("path", ["odd/result.json", "results.parquet"])
@pytest.mark.parametrize("kind", ["fifo", "large"])
def test_only_regular_files_up_to_a_size_are_read_as_results(tmp_path, kind, path):
    write(tmp_path / "good", measured("good"))
    (tmp_path / path).parent.mkdir(exist_ok=True)
    irregular(tmp_path / path, kind)
    runs, (problem,) = read_results(tmp_path)
    assert [result.name for result in runs] == ["good"]
    assert problem.path == tmp_path / path and re.search(IRREGULAR, problem.why)
