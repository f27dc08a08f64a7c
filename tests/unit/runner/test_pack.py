"""A packed sweep: a few files in place of a folder a run, with every number, read as the folders are."""

import json

import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from runner import compare, pack, plan
from runner.output import reader, results, summary
from runner.output.run_tables import TABLES, table_of
from runner.report import runs as report_runs
from runner.report.comparison import comparison_table
from runner.report.tables import runs_table
from tests.support.recorded import phase_rows, result, write, written


@pytest.fixture
def sweep(tmp_path):
    """Four runs, one refused; two have samples and phases, one a table of kernels."""
    values = [result(name, ms) for name, ms in (("zigzag", 2.0), ("ring", 3.1), ("usp", 1 / 3))]
    refused = result("ulysses", None, status="unsupported", reason="no <GPU> | here")
    folder = written(tmp_path / "sweep", *values, refused)
    for number, run in enumerate(runs_of(folder)[:2]):
        samples = [{"forward": [(i + number) / 7 for i in range(9)], "backward": [1e-7, 123456.789]}] * 2
        results.write_samples(run / "samples.parquet", samples)
        results.write_csv(run / "phases.csv", phase_rows(), results.COLUMNS["phases"])
    kernels = [{"rank": 0, "kernel": 'a, "b" <c>', "calls": 3, "total_ms": 0.1, "mean_us": 1e3 / 3}]
    results.write_csv(run / "kernels.csv", kernels, [*kernels[0]])
    return folder


def runs_of(sweep):
    return sorted(path.parent for path in sweep.glob("*/result.json"))


def test_every_number_is_in_the_packed_sweep(sweep, tmp_path, capsys):
    """The files are read here by other means than the program's. A field that an earlier version wrote stays."""
    older = runs_of(sweep)[0]
    write(older, json.loads((older / "result.json").read_text()) | {"schema_version": 1, "gone": 3})
    assert pack.main([str(sweep), "--into", str(tmp_path / "packed")]) == 0
    assert "4 runs packed, read back and the same" in capsys.readouterr().out
    packed = tmp_path / "packed" / "sweep"
    kinds = {*TABLES, "results"}
    assert {path.name for path in packed.iterdir()} == {"summary.md", *(f"{kind}.parquet" for kind in kinds)}
    tables = {kind: pq.read_table(packed / f"{kind}.parquet") for kind in kinds}
    stored = dict(zip(*(tables["results"][key].to_pylist() for key in ("name", "result")), strict=True))
    for run in runs_of(sweep):
        assert json.loads(stored[run.name]) == json.loads((run / "result.json").read_text())
        for kind, name in TABLES.items():
            if (run / name).exists():
                table = pyarrow.csv.read_csv(run / name) if name.endswith(".csv") else pq.read_table(run / name)
                assert [row for row in tables[kind].to_pylist() if row.pop("run") == run.name] == table.to_pylist()
    assert tables["results"]["total_ms"].to_pylist().count(None) == 1


def test_a_packed_sweep_is_reported_compared_and_resumed_as_its_folders_are(sweep, capsys):
    def seen():
        runs = report_runs.read([sweep])
        samples = {run.name: table_of(run, "samples") for run in reader.read_results(sweep)[0]}
        return runs_table(runs).markdown(), comparison_table(runs).markdown(), summary.sweep_rows(sweep), samples

    first, second, *_ = folders = runs_of(sweep)
    before = seen()
    assert pack.main([str(sweep), "--remove"]) == 0
    assert not any(folder.exists() for folder in folders) and seen() == before
    (first / ".hydra").mkdir(parents=True)  # of a resumed run
    assert seen() == before and compare.main([str(sweep), str(sweep)]) == 0
    assert [plan.earlier(folder, "0").status for folder in folders].count("ok") == 3
    assert plan.earlier(first, "another") is None and "this run's is another" in capsys.readouterr().err
    # a run that was done again goes before the packed one, and is packed in its place
    write(first, plan.earlier(first, "0").plain() | {"status": "crash", "reason": "again", "timing": None})
    assert pack.main([str(sweep), "--remove"]) == 0
    statuses = {run.name: run.status for run in reader.read_results(sweep)[0]}
    assert len(statuses) == 4 and statuses[first.name] == "crash"
    samples = pq.read_table(sweep / "samples.parquet")
    assert set(samples["run"].to_pylist()) == {second.name}  # of the run that was done again there are none


def test_samples_of_an_earlier_version_without_rounds_are_packed_beside_those_of_now(sweep):
    path = runs_of(sweep)[1] / "samples.parquet"
    pq.write_table(pq.read_table(path).drop_columns(["round"]), path)
    assert pack.main([str(sweep)]) == 0
    assert {*pq.read_table(sweep / "samples.parquet")["round"].to_pylist()} == {0}


def test_a_table_that_cannot_be_packed_leaves_the_packed_sweep_as_it_was(sweep, capsys):
    assert pack.main([str(sweep)]) == 0
    before = {path: path.read_bytes() for path in sweep.glob("*.parquet")}
    (runs_of(sweep)[0] / "kernels.csv").write_text("rank,kernel\nzero,k\n")
    assert pack.main([str(sweep)]) == 2 and "error: " in capsys.readouterr().err
    assert {path: path.read_bytes() for path in sweep.glob("*.parquet")} == before


@pytest.mark.parametrize(
    ("name", "status", "said"),
    [
        (None, "", "no run's folder with a result.json in it"),
        ("renamed", "ok", "holds the run ring_w4_"),
        ("ring", "fine", 'is "fine"; remove it, or run it again'),
    ],
)
def test_what_cannot_be_packed_is_one_clear_line_and_nothing_is_removed(tmp_path, capsys, name, status, said):
    (tmp_path / "s").mkdir()
    if name:
        write(tmp_path / "s" / name, result("ring", 2) | {"status": status})
    before = sorted(tmp_path.rglob("*"))
    assert pack.main([str(tmp_path / "s"), "--remove"]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1 and sorted(tmp_path.rglob("*")) == before
