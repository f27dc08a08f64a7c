"""The page: what stands in its table, and what can be in its scripts."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from runner.report import charts, page
from runner.report.entries import changed, columns, command, packed
from runner.report.parts import parts
from runner.report.runs import Run, read
from runner.report.table import swept
from tests.support.paths import RESULTS
from tests.support.recorded import result, written


def unpacked(data, count):
    if "all" in data:
        return [data["all"]] * count
    return [data["of"][i] for i in data["at"]] if "of" in data else data["each"]


@pytest.mark.parametrize("values", [[1, 1, 1], [None, "b", None, None, "b"], [[1.5], None, 2]])
def test_a_column_is_small_and_loses_nothing(values):
    assert unpacked(json.loads(json.dumps(packed(values))), len(values)) == values


def test_the_command_that_repeats_a_run_has_its_seed_and_not_its_folder(tmp_path):
    value = result("ring", 2)
    value["environment"]["overrides"] = ["attention=ring", "seqlens=[1, 2]", "output=/tmp/x", "resume=true"]
    value["experiment"]["seed"] = 7
    (run,) = read([written(tmp_path, value)])
    assert command(run) == "python -m runner attention=ring 'seqlens=[1, 2]' seed=7"


def table(runs, out):
    return {one["key"]: unpacked(one["data"], len(runs)) for one in columns(runs, ["s"] * len(runs), out)}


def test_a_failed_run_shows_the_end_of_its_log_and_links_to_its_files(tmp_path):
    crashed = result("usp", None, status="crash", reason="rank 1 ended")
    crashed["artifacts"] = {"log": "run.log", "trace_0": "gone"}
    written(tmp_path, result("ring", 2), crashed)
    name = crashed["name"]
    (tmp_path / name / "run.log").write_text("\n".join(f"line {i}" for i in range(99)))
    shown = table(read([tmp_path]), tmp_path)
    assert shown["log"] == [None, "\n".join(f"line {i}" for i in range(84, 99))]
    assert shown["files"][1] == {"result": f"{name}/result.json", "log": f"{name}/run.log"}
    assert shown["reason"] == [None, "rank 1 ended"] and shown["status"] == ["ok", "crash"]


def test_the_table_has_the_results_numbers_the_title_what_was_swept_and_details_what_is_no_default():
    runs = read([RESULTS / "h200-x4" / "speed"])
    shown = table(runs, RESULTS)
    assert shown["total_low"] == [charts.short(run.passes["total"].ci95[0]) for run in runs]
    assert shown["peak_bytes"] == [run.result.peak_bytes for run in runs]
    assert swept(runs) == "7 variants; S = 8,192, 32,768, 131,072; kernel flash4, sdpa_cudnn"
    zigzag = next(run for run in runs if run.attention == "zigzag")
    assert changed(zigzag.result.config) == ["kernel.name", "seq_len", "baseline", "output"]


def test_json_in_a_script_can_not_end_it():
    text = page.in_script({"a": "<!--</script>", "b": float("nan")})
    assert "<" not in text and json.loads(text) == {"a": "<!--</script>", "b": None}


def test_the_page_of_a_sweep_never_fails_it(tmp_path, monkeypatch):
    assert page.at_end_of_sweep(tmp_path / "none").startswith("no report.html: Refusal: ")
    monkeypatch.setattr(charts, "missing", lambda: "no jinja2")
    assert page.at_end_of_sweep(tmp_path) == "no jinja2"


def many(number):
    """Runs that differ in name, length, time and seed, made from stored ones."""
    stored = read([RESULTS / "h200-x4" / "speed"])
    for i in range(number):
        one = stored[i % 21].result
        passes = {which: replace(x, median=x.median * (1 + i / number)) for which, x in one.passes.items()}
        timing, config = replace(one.timing, passes=passes), one.config | {"seed": i}
        folder = Path(f"/none/sweep/{one.name}_{i}")
        made = replace(one, name=folder.name, timing=timing, config=config, folder=folder)
        yield replace(Run.of(made), seq_len=1024 * (1 + i // 21))


@pytest.mark.skipif(charts.missing() is not None, reason=str(charts.missing()))
def test_a_page_of_many_runs_is_small(tmp_path):
    """A tenth of 10,000 runs in 10 MB, beside 1 MB that any page has."""
    path = page.write(tmp_path, parts([*many(1000)], tmp_path))
    assert path.stat().st_size < 1e6 + 0.9e6
