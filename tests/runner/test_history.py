"""Results over commits: what is kept, in which order, and what is said to have changed."""

import json
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from runner import history
from runner.environment import by_history
from runner.output import results
from runner.output.record import Result
from runner.report import charts, commits
from runner.report.runs import Run, read
from tests.support.recorded import result, written

ROOT = Path(__file__).parents[2]
REAL = [str(ROOT / "results" / "h200-x2" / name) for name in ("short_training", "short_training_again")]


def at(commit: str | None, day: int, name: str = "zigzag", ms: float | None = 10.0, **changes) -> dict:
    """A run of a commit on a day."""
    value = result(name, ms, started_at=86400.0 * day, **changes)
    value["environment"]["git"] = {"commit": commit and commit.ljust(40, "0"), "dirty": False}
    value["name"] += f"_{day}"
    return value


def told(capsys, *arguments: str) -> tuple[int, str]:
    status = history.main(arguments)
    return status, capsys.readouterr().out


# writes more than SQLite keeps in memory, and ends within its commit
KILLED = """
import os, sqlite3, sys
db = sqlite3.connect(sys.argv[1], isolation_level=None)
db.execute("pragma cache_size=1")
db.execute("begin immediate")
db.execute("update runs set result = result || ?", ["x" * 10000])
os._exit(1)
"""


@pytest.fixture
def database(tmp_path, monkeypatch):
    """In an empty folder, with runs of three commits."""
    monkeypatch.chdir(tmp_path)
    runs = [at("b", 1), at("a", 2, ms=12.5), at("c", 3, ms=12.51), at("c", 4, "ring", 5.0)]
    assert history.main(["add", str(written(tmp_path / "runs", *runs))]) == 0
    return tmp_path / "history.sqlite"


def test_from_each_commit_to_the_next_there_is_a_verdict(database, capsys):
    capsys.readouterr()
    status, said = told(capsys)
    rows = [line for line in said.splitlines() if line.startswith("| ") and "→" in line]
    assert status == 0 and len(rows) == 2
    assert "| b000000000 → a000000000 | **slower (B/A 1.2" in rows[0] and "| 10.00 → 12.50 (+25.0%) |" in rows[0]
    assert "| a000000000 → c000000000 | even |" in rows[1]
    assert said.splitlines()[-1] == "2 settings, 3 commits: 1 slower, 1 even; 1 ran at one commit only"
    assert "1 setting, 1 commit: no run of two commits" in told(capsys, "--where", "attention=ring")[1]


def test_adding_twice_is_the_same_and_folders_need_not_stay(database, capsys):
    before = told(capsys)[1]
    assert ": 4 runs read, 0 of them new" in told(capsys, "add", "runs")[1]
    written(database.parent / "more", at("c", 5, ms=20.0))  # the latest of a commit counts
    told(capsys, "add", "more")
    for path in (*database.parent.rglob("result.json"),):
        path.unlink()
    after = told(capsys)[1]
    assert after != before and "**slower (B/A 1.59" in after


def test_what_a_killed_writer_left_is_taken_back_by_the_next_reader(database, capsys):
    capsys.readouterr()
    before = told(capsys)
    subprocess.run([sys.executable, "-c", KILLED, str(database)], check=False)
    assert database.with_name(f"{database.name}-journal").exists()
    assert told(capsys) == before and before[0] == 0


def test_samples_are_kept_and_decide_as_in_compare(tmp_path, monkeypatch, capsys):
    """Of six samples with a spread, where the summary alone would say slower."""
    monkeypatch.chdir(tmp_path)
    for day, ms in ((1, [10.0, 14.0] * 3), (2, [11.0, 15.0] * 3)):
        value = at("ab"[day - 1], day)
        value["timing"]["passes"] = {"forward": value["timing"]["passes"]["forward"] | {"median": sum(ms[:2]) / 2}}
        folder = written(tmp_path / "runs", value) / value["name"]
        results.write_samples(folder / "samples.parquet", [{"forward": ms}], [3, 3])
    told(capsys, "add", "runs")
    assert "| inconclusive (B/A 0." in told(capsys, "--pass", "forward")[1]
    (row,) = sqlite3.connect("history.sqlite").execute("select samples from runs where \"commit\" like 'a%'")
    assert row == ('{"forward": [[10.0, 14.0, 10.0], [14.0, 10.0, 14.0]]}',)


def test_what_broke_or_was_mended_is_a_change_and_machines_are_apart(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    other = at("d", 5)
    other["environment"]["gpus_before"] = [{"name": "NVIDIA A100"}]
    failed = at("b", 2, ms=None, status="oom", reason="rank 1")
    told(capsys, "add", str(written(tmp_path / "runs", at("a", 1), failed, at("c", 3), other)))
    said = told(capsys)[1]
    assert "| **broken: oom, rank 1** |" in said and "| mended: oom, rank 1 |" in said and "d00000" not in said


def test_commits_of_the_repository_come_in_its_order_and_others_by_date():
    asked = {run.environment.git.commit for run in read(map(Path, REAL))}
    log = by_history([*asked, "e" * 40, "no commit"])
    if len(log) < len(asked):
        pytest.skip("a copy without the commits of the results")
    runs = [at(log[-1], 1), at("e", 2), at(log[0], 3), at(None, 4)]
    found = [commits.Stored(Run.of(Result.of(run)), {}) for run in runs]
    assert commits.in_order(found) == [log[0], "e".ljust(40, "0"), log[-1], commits.UNKNOWN]


@pytest.mark.skipif(charts.missing() is not None, reason=str(charts.missing()))
def test_stored_results_give_a_page_with_their_medians_over_commits(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert told(capsys, "add", *REAL) == (0, "history.sqlite: 44 runs read, 44 of them new\n")
    assert told(capsys, "page", "--where", "attention=zigzag,ulysses") == (0, "Page: history.html\n")
    page = Path("history.html").read_text()
    assert 'data-spec="0"' in page and "097887c8ff" in page and "http://" not in page.split("<script>")[0]
    (spec,) = json.loads(page.split('id="specs">')[1].split("</script>")[0])
    points = next(iter(spec["datasets"].values())) if "datasets" in spec else spec["data"]["values"]
    assert len(points) == 16 and {point["label"].split()[0] for point in points} == {"zigzag", "ulysses"}
    assert all(point["p10"] <= point["ms"] <= point["p90"] for point in points)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"SQLite format 3\0" + b"x" * 200, "cannot be used as a history ("),
        (b"no database at all" * 100, "cannot be used as a history (file is not a database)"),
        (None, "no such file; `python -m runner.history add DIR` makes it"),
        ("create table runs (a)", "was not made by runner.history; give another file with --db"),
        ("pragma user_version = 99", "version 99 is newer than 1, which this program reads"),
        ("update runs set result = '[]'", "run zigzag"),
        ("drop table runs", "cannot be used as a history (no such table: runs)"),
    ],
)
def test_a_file_that_is_no_history_is_one_clear_line(database, capsys, content, said):
    if content is None or content == "create table runs (a)" or isinstance(content, bytes):
        database.unlink()
    if isinstance(content, bytes):
        database.write_bytes(content)
    elif content is not None:
        with closing(sqlite3.connect(database)) as db:
            db.execute(content)
            db.commit()
    before = database.read_bytes() if database.exists() else None
    capsys.readouterr()
    adds = content is not None and "update" not in str(content)
    for arguments in ([], ["add", "runs"]) if adds else ([],):
        assert history.main(arguments) == 2
        found = capsys.readouterr()
        assert found.out == "" and found.err.count("\n") == 1 and said in found.err
    assert (database.read_bytes() if database.exists() else None) == before  # and stays as it was


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["add"], "error: add: folders are given to add, and only to it"),
        (["page", "runs"], "error: page runs: folders are given to add, and only to it"),
        (["--tolerance", "-1"], "error: --tolerance -1.0: must be at least 0"),
        (["--where", "attention=usp"], "error: --where attention=usp: "),
        (["add", "nothing"], "error: nothing: no result.json"),
        (["--db", "no/where.sqlite", "add", "runs"], "error: no/where.sqlite: cannot be used as a history"),
    ],
)
def test_what_cannot_be_done_is_one_clear_line(database, capsys, arguments, said):
    capsys.readouterr()
    assert history.main(arguments) == 2
    found = capsys.readouterr()
    assert found.out == "" and found.err.startswith(said) and found.err.count("\n") == 1
