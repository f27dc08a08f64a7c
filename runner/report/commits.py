"""Results over commits: which runs belong together, in which order, and what changed from one commit to the next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from runner import environment
from runner.measure.statistics import Rounds
from runner.report import pair_formats
from runner.report.charts import EXTERNAL, OURS
from runner.report.labels import labels
from runner.report.pairs import Pair, keys, pair_of
from runner.report.runs import FACTS, WORKLOAD, Run
from runner.report.table import Table, fact
from runner.report.verdicts import MeasuredPass

DIRTY = "-dirty"  # as `git describe` says it
UNKNOWN = "unknown"
SHORT = 10  # characters of a commit that are shown
BARE = ("mask", "mode", "dtype", "features", "pack")  # facts whose text says what they are


@dataclass(frozen=True, eq=False)
class Stored:
    """A run, and its samples by pass and round."""

    run: Run
    samples: dict[str, Rounds]

    def measured(self, which: str) -> MeasuredPass | None:
        return MeasuredPass.of(self.run, which, self.samples)


def commit_of(run: Run) -> str:
    git = run.environment.git
    if git is None or not git.commit:
        return UNKNOWN
    return git.commit + DIRTY * bool(git.dirty)


def machine_of(run: Run) -> str:
    """The kind of machine whose times are compared: its GPU, or its CPU and number of cores."""
    about = run.environment
    return run.gpu or f"{about.cpu or 'an unknown CPU'}, {about.cores or '?'} cores"


def short(commit: str) -> str:
    return commit if commit == UNKNOWN else commit[:SHORT] + DIRTY * commit.endswith(DIRTY)


def in_order(found: Sequence[Stored]) -> list[str]:
    """The commits of these runs, the oldest first: by their first run's date, and those that the repository has among
    themselves by its history."""
    first: dict[str, float] = {}
    for run in sorted((each.run for each in found), key=lambda run: run.environment.started_at):
        first.setdefault(commit_of(run), run.environment.started_at)
    hashes = [commit.removesuffix(DIRTY) for commit in first]
    place = {commit: number for number, commit in enumerate(environment.by_history(hashes))}
    known = [commit for commit in first if commit.removesuffix(DIRTY) in place]
    slots = iter(sorted(known, key=lambda commit: (place[commit.removesuffix(DIRTY)], commit.endswith(DIRTY))))
    return [next(slots) if commit in known else commit for commit in first]


Series = dict[str, Stored]  # by commit, in order: the latest run of each


def series(found: Sequence[Stored], order: Sequence[str]) -> list[Series]:
    """The runs of which the same was asked on one kind of machine, each list by commit."""
    key = keys([each.run for each in found])
    groups: dict[tuple[object, ...], Series] = {}
    for each in sorted(found, key=lambda each: each.run.environment.started_at):
        groups.setdefault((*key[each.run], machine_of(each.run)), {})[commit_of(each.run)] = each
    return [{commit: group[commit] for commit in order if commit in group} for group in groups.values()]


@dataclass(frozen=True)
class Change:
    """From one commit of a series to the next."""

    before: str
    after: str
    pair: Pair


def changes(of: Series, which: str, tolerance: float, memory_tolerance: float) -> list[Change]:
    samples = {each.run: each for each in of.values()}

    def measured(run: Run, which: str) -> MeasuredPass | None:
        return samples[run].measured(which)

    return [
        Change(a, b, pair_of(of[a].run, of[b].run, which, tolerance, memory_tolerance, measured))
        for a, b in pairwise(of)
    ]


def table(found: Sequence[Change]) -> Table:
    """A row for each change: the commits, the machine where there are several, the verdict, and the row of `compare`."""
    made = pair_formats.table([each.pair for each in found])
    machines = [machine_of(each.pair.either) for each in found]
    first = {"commits": [f"{short(each.before)} → {short(each.after)}" for each in found]}
    first |= {"machine": machines} if len(set(machines)) > 1 else {}
    first |= {"verdict": [row[-1] for row in made.rows]}
    rows = [[*(texts[i] for texts in first.values()), *row[:-1]] for i, row in enumerate(made.rows)]
    return Table([*first, *made.titles[:-1]], rows, made.left | set(first))


def rows(of: Sequence[Series], which: str) -> list[dict[str, Any]]:
    """The points of a chart: a row for each run that is ok, of series with two or more."""
    kept = [ok for one in of if len(ok := {commit: each for commit, each in one.items() if each.run.ok}) > 1]
    runs = [each.run for one in kept for each in one.values()]
    if not runs:
        return []
    named = labels(runs)
    varying = [key for key in reversed(WORKLOAD) if key != "gpu" and len({getattr(run, key) for run in runs}) > 1]
    several = len({machine_of(run) for run in runs}) > 1
    found = []
    for one in kept:
        last = list(one.values())[-1].run
        where = [text if key in BARE else f"{FACTS[key]} {text}" for key in varying if (text := fact(last, key))]
        for commit, each in one.items():
            times = each.run.times(which)
            if times is None:
                continue
            found.append({
                "label": named[last], "variant": str(last.attention), "whose": EXTERNAL if last.external else OURS,
                "panel": ", ".join([*where, *([machine_of(last)] if several else [])]), "commit": short(commit),
                "ms": times.median, "p10": times.p10, "p90": times.p90,
            })  # fmt: skip
    return found
