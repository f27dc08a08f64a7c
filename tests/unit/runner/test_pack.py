"""A packed sweep: a few files in place of a folder a run, with every number, read as the folders are."""

import csv
import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from runner import compare, pack, plan
from runner.output import reader, results, summary
from runner.output.run_tables import TABLES, table_of
from runner.report import runs as report_runs
from runner.report.comparison import comparison_table
from runner.report.tables import runs_table
from tests.support.paths import ROOT
from tests.support.recorded import kernel_rows, result, written

PACKS = sorted(path.parent for path in ROOT.glob("results/*/*/results.parquet"))
KERNELS = ["rank", "kernel", "calls", "total_ms", "mean_us"]


def swept(folder: Path) -> Path:
    """Four runs, one refused; two have samples and phases, one a table of kernels."""
    written(folder, *(result(name, ms) for name, ms in (("zigzag", 2.0), ("ring", 3.1), ("ulysses", 1 / 3))))
    written(folder, result("usp", None, status="unsupported", reason="no <GPU> | here"))
    for number, path in enumerate(sorted(folder.glob("*/result.json"))[:2]):
        samples = [{"forward": [(i + number) / 7 for i in range(9)], "backward": [1e-7, 123456.789]}] * 2
        results.write_samples(path.parent / "samples.parquet", samples)
        rows = [
            {"iteration": i, "rank": 1, "pass": "forward", "phase": "comm_kv", "step": -1, "ms": (i + 1) / 3}
            | {"start_ms": i / 7, "stop_ms": i / 7 + 1}
            for i in range(5)
        ]
        results.write_csv(path.parent / "phases.csv", rows, results.PHASE_COLUMNS)
    kernels = [{"rank": 0, "kernel": 'a, "b" <c>', "calls": 3, "total_ms": 0.1, "mean_us": 1e3 / 3}]
    results.write_csv(path.parent / "kernels.csv", kernels, KERNELS)
    results.write_csv(path.parent / "kernel_times.csv", kernel_rows(world=2), results.KERNEL_TIME_COLUMNS)
    return folder


def read_back(text: str) -> object:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


def assert_same(run: Path, packed: Path) -> None:
    """Every value of the run's files stands in the packed sweep; the files are read here by other means than the program's."""
    frames = {
        kind: pq.read_table(packed / f"{kind}.parquet")
        for kind in ("results", *TABLES)
        if (packed / f"{kind}.parquet").exists()
    }
    stored = dict(zip(frames["results"]["name"].to_pylist(), frames["results"]["result"].to_pylist(), strict=True))
    assert json.loads(stored[run.name]) == json.loads((run / "result.json").read_text())
    for kind, name in TABLES.items():
        if not (run / name).exists():
            continue
        if name.endswith(".csv"):
            with (run / name).open(newline="") as file:
                expected = [{key: read_back(x) for key, x in row.items()} for row in csv.DictReader(file)]
        else:
            expected = pq.read_table(run / name).to_pylist()
        found = [row for row in frames[kind].to_pylist() if row.pop("run") == run.name]
        assert found == expected and [list(row) for row in found[:1]] == [list(row) for row in expected[:1]]


@pytest.fixture
def sweep(tmp_path) -> Path:
    return swept(tmp_path / "sweep")


def test_every_number_is_in_the_packed_sweep(sweep, tmp_path, capsys):
    assert pack.main([str(sweep), "--into", str(tmp_path / "packed")]) == 0
    assert "4 runs packed, read back and the same" in capsys.readouterr().out
    packed = tmp_path / "packed" / "sweep"
    for path in sweep.glob("*/result.json"):
        assert_same(path.parent, packed)
    assert {path.name for path in packed.iterdir()} == {
        "results.parquet", "samples.parquet", "phases.parquet", "kernels.parquet",
        "kernel_times.parquet", "summary.md",
    }  # fmt: skip
    assert pq.read_table(packed / "results.parquet").column("total_ms").to_pylist().count(None) == 1


def test_a_packed_sweep_is_reported_compared_and_resumed_as_its_folders_are(sweep, tmp_path, capsys):
    def tables() -> list[str]:
        runs = report_runs.read([sweep])
        return [
            runs_table(runs).markdown(),
            comparison_table(runs).markdown(),
        ]

    folders, before = sorted(path.parent for path in sweep.glob("*/result.json")), tables()
    rows = summary.sweep_rows(sweep)
    samples = {run.name: table_of(run, "samples") for run in reader.read_results(sweep)[0]}
    assert pack.main([str(sweep), "--remove"]) == 0
    assert not any(folder.exists() for folder in folders)
    assert tables() == before and summary.sweep_rows(sweep) == rows
    assert {run.name: table_of(run, "samples") for run in reader.read_results(sweep)[0]} == samples
    assert compare.main([str(sweep), str(sweep)]) == 0
    assert [plan.earlier(folder, "0").status for folder in folders].count("ok") == 3
    assert plan.earlier(folders[0], "another") is None and "this run's is another" in capsys.readouterr().err
    # a run that was done again goes before the packed one, and is packed in its place
    again = plan.earlier(folders[0], "0").plain | {"status": "crash", "reason": "again", "timing": None}
    results.write_result(folders[0], again)
    assert [run.status for run in reader.read_results(sweep)[0]].count("crash") == 1
    assert pack.main([str(sweep), "--remove"]) == 0
    found = {run.name: run.status for run in reader.read_results(sweep)[0]}
    assert len(found) == 4 and found[folders[0].name] == "crash"
    packed = pq.read_table(sweep / "samples.parquet")
    assert set(packed["run"].to_pylist()) == {folders[1].name}  # of the run that was done again there are none


def test_packed_samples_are_found_beside_a_folder_that_hydra_made_for_a_resumed_run(sweep):
    assert pack.main([str(sweep), "--remove"]) == 0
    run = next(run for run in reader.read_results(sweep)[0] if table_of(run, "samples"))
    before = table_of(run, "samples")
    (run.folder / ".hydra").mkdir(parents=True)
    assert table_of(run, "samples") == before


def without_round(path: Path) -> None:
    """A table of samples as an earlier version wrote it."""
    pq.write_table(pq.read_table(path).drop_columns(["round"]), path)


@pytest.mark.parametrize("older", ["pack", "folder"])
def test_samples_of_an_earlier_version_without_rounds_are_packed_beside_those_of_now(sweep, older):
    first, second = sorted(path.parent for path in sweep.glob("*/samples.parquet"))
    aside = sweep.parent / second.name
    if older == "folder":
        without_round(second / "samples.parquet")
    second.rename(aside)
    assert pack.main([str(sweep), "--remove"]) == 0
    if older == "pack":
        without_round(sweep / "samples.parquet")
    aside.rename(second)
    assert pack.main([str(sweep)]) == 0
    table = pq.read_table(sweep / "samples.parquet")
    assert set(table["run"].to_pylist()) == {first.name, second.name} and set(table["round"].to_pylist()) == {0}


def test_a_table_that_cannot_be_packed_leaves_the_packed_sweep_as_it_was(sweep, capsys):
    assert pack.main([str(sweep)]) == 0
    before = {path: path.read_bytes() for path in sweep.glob("*.parquet")}
    folder = min(sweep.glob("*/result.json")).parent
    value = json.loads((folder / "result.json").read_text())
    results.write_result(folder, value | {"environment": {"host": "another"}})
    (folder / "kernels.csv").write_text("rank,kernel\nzero,k\n")
    assert pack.main([str(sweep)]) == 2 and "error: " in capsys.readouterr().err
    assert {path: path.read_bytes() for path in sweep.glob("*.parquet")} == before


def test_a_packed_sweep_that_is_damaged_is_named_and_what_lies_beside_it_is_read(sweep, tmp_path, capsys):
    assert pack.main([str(sweep), "--into", str(tmp_path / "packs")]) == 0
    written(tmp_path / "packs" / "other", result("zigzag", 2.0))
    path = tmp_path / "packs" / "sweep" / "results.parquet"
    for content in (b"", b"PAR1 and no more", path.read_bytes()[:-9]):
        path.write_bytes(content)
        found, problems = reader.read_results(tmp_path / "packs")
        assert len(found) == 1
        assert str(problems[0]).startswith(f"{path}: left out: is no packed sweep") and len(problems) == 1
        assert len(report_runs.read([tmp_path / "packs"])) == 1
    assert f"{path}: left out: is no packed sweep" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda folder: folder.mkdir(), "no run's folder with a result.json in it"),
        (lambda folder: results.write_result(folder / "renamed", result("ring", 2)), "holds the run ring_w4_"),
        (
            lambda folder: written(folder, result("ring", 2) | {"status": "fine"}),
            'is "fine"; remove it, or run it again',
        ),
    ],
)
def test_what_cannot_be_packed_is_one_clear_line_and_nothing_is_removed(tmp_path, capsys, made, said):
    folder = tmp_path / "s"
    made(folder)
    before = sorted(folder.rglob("*"))
    assert pack.main([str(folder), "--remove"]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize("folder", PACKS, ids=lambda path: str(path.relative_to(ROOT / "results")))
def test_the_packed_sweeps_of_the_results_are_whole(folder):
    """Each run is a result, and the medians of the samples packed beside it are those that it states."""
    from runner.measure.statistics import quantile

    found, problems = reader.read_results(folder)
    assert found and not problems
    for run in [run for run in found if run.status == "ok"][:2]:
        slowest: dict[tuple[str, int], float] = {}
        for sample in table_of(run, "samples"):
            at = (sample["pass"], sample["iteration"])
            slowest[at] = max(slowest.get(at, 0.0), sample["ms"])
        for which, times in run.timing.passes.items():
            if which != "total":
                ms = sorted(x for (name, _), x in slowest.items() if name == which)
                assert (len(ms), quantile(ms, 0.5)) == (times.n, times.median)
