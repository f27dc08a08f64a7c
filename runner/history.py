"""`python -m runner.history`: how results moved over commits. All runs are kept in one sqlite file.

    python -m runner.history add outputs/multirun/* results     # folders of results, packed or not; adding twice is the same
    python -m runner.history                                    # from each commit to the next: faster, slower, even, inconclusive
    python -m runner.history show --where attention=zigzag --pass forward
    python -m runner.history page --out history.html            # one page with charts

Runs belong together of which the same was asked, as in `runner.compare`, on the same GPU, or the same CPU with the same
number of cores. Of a run repeated at a commit the latest counts. The verdicts are those of `runner.compare`. Commits
come in the order of this repository's history; one that it lacks comes by the date of its first run."""

from __future__ import annotations

import argparse
import json
import sqlite3
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from runner.output import commands
from runner.output.record import Result
from runner.output.results import finite, write_text
from runner.report import commits
from runner.report.commits import Change, Stored
from runner.report.pairs import add_options, asked, check_options
from runner.report.runs import PASSES, Run, read, where
from runner.report.table import counted
from runner.report.verdicts import Verdict, samples_of

MARK, VERSION = 0x41747452, 1  # application_id and user_version of our files
WAIT_S = 60.0  # for another program that adds
TABLE = """
create table runs (
    asked text, machine text, "commit" text, date real, name text, status text, forward_ms real, backward_ms real,
    total_ms real, peak_bytes integer, result text, samples text,
    primary key (asked, machine, "commit", date)
) without rowid
"""


@contextmanager
def opened(path: Path, write: bool = False) -> Iterator[sqlite3.Connection]:
    """The database; `write` creates it, and keeps all or nothing of what is done. Raises ValueError for a file that is
    not ours."""
    if not path.is_file() and (path.exists() or not write):
        raise ValueError(f"{path}: no such file; `python -m runner.history add DIR` makes it")
    try:
        mode = "rwc" if write else "rw"  # a reader takes back what a killed writer left, which needs to write
        with closing(
            sqlite3.connect(f"{path.resolve().as_uri()}?mode={mode}", WAIT_S, uri=True, isolation_level=None)
        ) as db:
            db.execute("begin immediate" if write else "begin")
            (mark,), (version,) = (db.execute(f"pragma {key}").fetchone() for key in ("application_id", "user_version"))
            empty = not db.execute("select count(*) from sqlite_master").fetchone()[0]
            if empty and not mark and write:
                db.execute(TABLE)
                db.execute(f"pragma application_id = {MARK}")
                db.execute(f"pragma user_version = {VERSION}")
            elif mark != MARK:
                raise ValueError(f"{path}: was not made by runner.history; give another file with --db")
            elif version > VERSION:
                raise ValueError(f"{path}: version {version} is newer than {VERSION}, which this program reads")
            yield db
            db.execute("commit")
    except sqlite3.Error as error:
        raise ValueError(f"{path}: cannot be used as a history ({error}); give another file with --db") from None


def add(db: sqlite3.Connection, runs: Sequence[Run]) -> int:
    """Put the runs into the table; returns how many it did not have."""
    (before,) = db.execute("select count(*) from runs").fetchone()
    for run in runs:
        result = run.result
        key = json.dumps([*asked(run), run.replay])
        about = (key, commits.machine_of(run), commits.commit_of(run), run.environment.started_at)
        times = (run.ms(which) if which in run.passes else None for which in PASSES)
        stored = (json.dumps(finite(found)) for found in (result.plain, samples_of(result)))
        values = (*about, result.name, run.status, *times, result.peak_bytes, *stored)
        db.execute(f"insert or replace into runs values ({', '.join('?' * len(values))})", values)
    (after,) = db.execute("select count(*) from runs").fetchone()
    return int(after - before)


def stored(db: sqlite3.Connection) -> dict[Run, Stored]:
    """All runs. Raises ValueError for a row that is no result."""
    found = {}
    for name, result, samples in db.execute('select name, result, samples from runs order by date, "commit", asked'):
        try:
            run = Run.of(Result.of(json.loads(result)))
            found[run] = Stored(run, json.loads(samples))
        except (ValueError, TypeError, RecursionError) as error:
            raise ValueError(f"run {name} in the history: is no result ({error})") from None
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(sys.argv[1:] if arguments is None else arguments)
    return commands.exit_status(lambda: _main(options))


def _main(options: argparse.Namespace) -> int:
    if (options.action == "add") != bool(options.folders):
        raise ValueError(
            f"{' '.join([options.action, *map(str, options.folders)])}: folders are given to add, and only to it"
        )
    check_options(options)
    {"add": _add, "show": _show, "page": _page}[options.action](options)
    return 0


def _add(options: argparse.Namespace) -> None:
    runs = read(options.folders)
    with opened(options.db, write=True) as db:
        new = add(db, runs)
    print(f"{options.db}: {counted(len(runs), 'run')} read, {new} of them new")


class _Asked:
    """The series and changes that the options ask for."""

    def __init__(self, options: argparse.Namespace):
        with opened(options.db) as db:
            found = stored(db)
        kept = [found[run] for run in where(list(found), options.where)]
        self.order = commits.in_order(kept)
        self.series = commits.series(kept, self.order)
        self.changes: list[Change] = []
        for one in self.series:
            self.changes += commits.changes(one, options.which, options.tolerance, options.memory_tolerance)

    @property
    def notes(self) -> list[str]:
        counts = Counter(verdict for change in self.changes for verdict in change.pair.verdicts)
        said = ", ".join(f"{n} {verdict}" for verdict, n in counts.most_common()) or "no run of two commits"
        alone = sum(len(one) < 2 for one in self.series)
        of = f"{counted(len(self.series), 'setting')}, {counted(len(self.order), 'commit')}"
        return [f"{of}: {said}" + (f"; {alone} ran at one commit only" if alone else "")]


def _show(options: argparse.Namespace) -> None:
    found = _Asked(options)
    print("\n".join([*([commits.table(found.changes).markdown()] if found.changes else []), *found.notes]))


def _page(options: argparse.Namespace) -> None:
    from runner.report import document
    from runner.report.panels import commits as chart

    found = _Asked(options)
    order = [commits.short(commit) for commit in found.order]
    panels = chart.draw(commits.rows(found.series, options.which), order)
    told = [change for change in found.changes if change.pair.verdicts != (Verdict.EVEN,)]
    told.sort(key=lambda change: (not change.pair.worse, Verdict.INCONCLUSIVE in change.pair.verdicts))
    even = len(found.changes) - len(told)
    says = [f"{counted(even, 'step')} from a commit to the next {'is' if even == 1 else 'are'} even, and not listed."]
    sections = [
        *([document.Section("Medians", panels=panels)] if panels else []),
        document.Section("Changes", says if even else [], [commits.table(told)] if told else []),
    ]
    write_text(options.out, document.page("Results over commits", found.notes[0], sections))
    print(f"Page: {options.out}")


def _parser() -> argparse.ArgumentParser:
    parser = commands.parser("runner.history", __doc__)
    add = parser.add_argument
    add("action", nargs="?", choices=("add", "show", "page"), default="show")
    add("folders", nargs="*", type=Path, metavar="DIR", help="with add: folders of results")
    add("--db", type=Path, default=Path("history.sqlite"), metavar="FILE", help="default: %(default)s")
    add_options(parser)
    add("--out", type=Path, default=Path("history.html"), metavar="FILE", help="of the page (default: %(default)s)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
