"""Runs side by side: a row for each workload, a column for each way to do it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from attention.autotune.choice import AUTO
from runner.report.fair import MIXED, mixed, mixed_note, noise, ratio
from runner.report.labels import each_over_several_kernels, labels
from runner.report.runs import BACK_TO_BACK, FACTS, PASSES, WORKLOAD, Run, sortable
from runner.report.table import BEST, NOISY, Table, counted, digits, fact

COMPARED = (*PASSES, BACK_TO_BACK)
RATIO = "fastest external / {}"
EVEN = "`even`: the 95% intervals of the two medians overlap (p10 to p90 with fewer than 6 samples)."
LEFT = {FACTS[key] for key in ("mask", "gpu", "mode", "dtype", "pack", "heads", "kernel")}


@dataclass(frozen=True)
class Row:
    """The runs of one workload, by column."""

    runs: dict[str, Run]
    which: str  # the pass that is compared

    @property
    def timed(self) -> dict[str, Run]:
        return {column: run for column, run in self.runs.items() if run.ms(self.which) is not None}

    @property
    def mixed(self) -> bool:
        return mixed(list(self.timed.values()))

    def cells(self, columns: Iterable[str], text: Callable[[Run], str]) -> list[str]:
        """The text of each column's run, in bold for the fastest, or the status of a run without a time."""
        timed = self.timed
        best = digits(min((run.ms(self.which) or 0.0 for run in timed.values()), default=None))
        found = []
        for column in columns:
            run = self.runs.get(column)
            if run is None or column not in timed:
                found.append("" if run is None or run.ok else run.status)
            else:
                found.append(BEST.format(text(run)) if digits(run.ms(self.which)) == best else text(run))
        return found


def comparable(runs: Sequence[Run]) -> list[Run]:
    """The runs whose workload is known."""
    return [run for run in runs if run.attention and run.seq_len]


def by_workload(runs: Iterable[Run], key: Sequence[str] = WORKLOAD) -> list[list[Run]]:
    """The runs that agree in all facts of `key`, in its order."""
    found: dict[tuple[Any, ...], list[Run]] = {}
    for run in runs:
        found.setdefault(tuple(getattr(run, name) for name in key), []).append(run)
    return [found[work] for work in sorted(found, key=lambda work: [sortable(value) for value in work])]


def fact_columns(rows: Sequence[Row], key: Sequence[str] = WORKLOAD) -> tuple[list[str], list[list[str]]]:
    """The titles and cells of the facts in which the rows differ. The last cell of a row that mixes commits or machines is
    marked."""
    first = [next(iter(row.runs.values())) for row in rows]
    shown = [name for name in key if len({getattr(run, name) for run in first}) > 1] or ["seq_len"]
    cells = [[fact(run, name) for name in shown] for run in first]
    for row, facts in zip(rows, cells, strict=True):
        facts[-1] += MIXED if row.mixed else ""
    return [FACTS[name.removeprefix("asked_")] for name in shown], cells


def notes(rows: Sequence[Row], own: Sequence[str]) -> list[str]:
    """The notes below a table of rows, with the table's own first."""
    noisy = any(noise(run, row.which) for row in rows for run in row.timed.values())
    return [*own, *([NOISY] if noisy else []), *mixed_note(list(row.timed.values()) for row in rows)]


def comparison_table(runs: Sequence[Run], which: str = "total") -> Table:
    """The times of `which`, a member of COMPARED, in ms; the best of a row in bold. Where several variants ran over several local
    kernels each, a row is a workload and a kernel. Beside external packages, the last column is the ratio of the fastest of them to
    `auto` or, without it, to the fastest of ours; it is empty in a row of several commits or machines."""
    runs = comparable(runs)
    by_kernel = each_over_several_kernels(runs)
    named = labels(runs, without={"asked_kernel"} if by_kernel else ())
    key = (*WORKLOAD, "asked_kernel") if by_kernel else WORKLOAD
    columns = list(dict.fromkeys(named[run] for run in sorted(runs, key=lambda run: run.external)))
    rows = []
    for group in by_workload(runs, key):
        latest: dict[str, Run] = {}
        for run in sorted(group, key=begun, reverse=True):
            latest.setdefault(named[run], run)
        rows.append(Row({column: latest[column] for column in columns if column in latest}, which))
    titles, facts = fact_columns(rows, key)
    cells = [
        [*start, *row.cells(columns, lambda run: digits(run.ms(which)) + noise(run, which))]
        for start, row in zip(facts, rows, strict=True)
    ]
    titles += columns
    if {run.external for run in runs} == {True, False}:
        ours = AUTO if any(run.attention == AUTO for run in runs) else "fastest of ours"
        titles.append(RATIO.format(ours))
        cells = [[*texts, _ratio(row, ours)] for texts, row in zip(cells, rows, strict=True)]
    repeated = len(runs) - sum(len(row.runs) for row in rows)
    own = [f"Where a run was repeated, its latest: {counted(repeated, 'earlier run')} left out."] if repeated else []
    own += [EVEN] if any(texts[-1].startswith("even (") for texts in cells) else []
    return Table(titles, cells, LEFT, notes(rows, own))


def begun(run: Run) -> float:
    """When the run started, in Unix time."""
    return run.environment.started_at


def _ratio(row: Row, ours: str) -> str:
    """The fastest external package over ours. CUDA graph replays are left out: external packages are launched."""
    launched = {column: run for column, run in row.timed.items() if run.graphs is False}

    def fastest(columns: list[str]) -> str | None:
        return min(columns, key=lambda column: launched[column].ms(row.which) or 0.0, default=None)

    theirs = fastest([column for column, run in launched.items() if run.external])
    mine = fastest(
        [column for column, run in launched.items() if not run.external and (ours != AUTO or run.attention == AUTO)]
    )
    if row.mixed or theirs is None or mine is None:
        return ""
    return ratio(launched[theirs], launched[mine], row.which, (theirs, mine))
