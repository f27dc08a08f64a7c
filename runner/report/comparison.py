"""Runs side by side: a row for each workload, a column for each way to do it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from attention.variants.registry import AUTO
from runner.report.fair import MIXED, mixed, mixed_note, noise, ratio
from runner.report.labels import each_over_several_kernels, labels
from runner.report.runs import BACK_TO_BACK, FACTS, PASSES, WORKLOAD, Run, sortable
from runner.report.table import BEST, NOISY, Table, counted, digits, fact

COMPARED = (*PASSES, BACK_TO_BACK)
RATIO = "fastest external / {}"
EVEN = "`even`: the 95% intervals of the two medians overlap (p10 to p90 with fewer than 6 samples)."
LEFT = {FACTS[key] for key in ("features", "mask", "gpu", "mode", "dtype", "pack", "heads", "kernel")}


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

    def cell(self, column: str, text: Callable[[Run], str]) -> str:
        """The text of the column's run, in bold for the fastest; the status of a run without a time."""
        run = self.runs.get(column)
        if run is None or column not in self.timed:
            return "" if run is None or run.ok else run.status
        best = min(other.ms(self.which) or 0.0 for other in self.timed.values())
        return BEST.format(text(run)) if digits(run.ms(self.which)) == digits(best) else text(run)

    def ratio(self, theirs: Iterable[str], ours: Iterable[str]) -> str:
        """The fastest of the timed columns `theirs` over the fastest of `ours`; empty where one of the two has none."""
        first, second = (
            min(columns, key=lambda column: self.timed[column].ms(self.which) or 0.0, default=None)
            for columns in (theirs, ours)
        )
        if first is None or second is None:
            return ""
        return ratio(self.timed[first], self.timed[second], self.which, (first, second))


def comparable(runs: Sequence[Run]) -> list[Run]:
    """The runs whose workload is known."""
    return [run for run in runs if run.attention and run.seq_len]


def by_workload(runs: Iterable[Run], key: Sequence[str] = WORKLOAD) -> list[list[Run]]:
    """The runs that agree in all facts of `key`, in its order."""
    found: dict[tuple[Any, ...], list[Run]] = {}
    for run in runs:
        found.setdefault(tuple(getattr(run, name) for name in key), []).append(run)
    return [found[work] for work in sorted(found, key=lambda work: [sortable(value) for value in work])]


def side_by_side(
    rows: Sequence[Row],
    columns: Sequence[str],
    text: Callable[[Run], str],
    ratios: dict[str, Callable[[Row], str]],
    own: Sequence[str] = (),
    key: Sequence[str] = WORKLOAD,
) -> Table:
    """The facts of `key` in which the rows differ, the `text` of each column's run, and `ratios` by title. The last
    fact of a row that mixes commits or machines is marked. `own` notes come first."""
    first = [next(iter(row.runs.values())) for row in rows]
    shown = [name for name in key if len({getattr(run, name) for run in first}) > 1] or ["seq_len"]
    titles = [*(FACTS[name.removeprefix("asked_")] for name in shown), *columns, *ratios]
    cells = []
    for row, run in zip(rows, first, strict=True):
        facts = [fact(run, name) for name in shown]
        facts[-1] += MIXED if row.mixed else ""
        cells.append([*facts, *(row.cell(column, text) for column in columns), *(of(row) for of in ratios.values())])
    notes = [*own, *([EVEN] if any(texts[-1].startswith("even (") for texts in cells) else [])]
    notes += [NOISY] if any(noise(run, row.which) for row in rows for run in row.timed.values()) else []
    return Table(titles, cells, LEFT, notes + mixed_note(list(row.timed.values()) for row in rows))


def comparison_table(runs: Sequence[Run], which: str = "total") -> Table:
    """The times of `which`, a member of COMPARED, in ms; the best of a row in bold. Where several variants ran over
    several local kernels each, a row is a workload and a kernel. Beside external packages, the last column is the ratio
    of the fastest of them to `auto` or, without it, to the fastest of ours; it is empty in a row of several commits or
    machines."""
    runs = comparable(runs)
    by_kernel = each_over_several_kernels(runs)
    named = labels(runs, without={"asked_kernel"} if by_kernel else ())
    key = (*WORKLOAD, "asked_kernel") if by_kernel else WORKLOAD
    columns = list(dict.fromkeys(named[run] for run in sorted(runs, key=lambda run: run.external)))
    rows = []
    for group in by_workload(runs, key):
        latest: dict[str, Run] = {}
        for run in sorted(group, key=lambda run: -run.environment.started_at):
            latest.setdefault(named[run], run)
        rows.append(Row({column: latest[column] for column in columns if column in latest}, which))
    repeated = len(runs) - sum(len(row.runs) for row in rows)
    own = [f"Where a run was repeated, its latest: {counted(repeated, 'earlier run')} left out."] if repeated else []
    ratios: dict[str, Callable[[Row], str]] = {}
    if {run.external for run in runs} == {True, False}:
        with_auto = any(run.attention == AUTO for run in runs)
        ratios[RATIO.format(AUTO if with_auto else "fastest of ours")] = lambda row: _ratio(row, with_auto)
    return side_by_side(rows, columns, lambda run: digits(run.ms(which)) + noise(run, which), ratios, own, key)


def _ratio(row: Row, with_auto: bool) -> str:
    """The fastest external package over ours, without CUDA graph replays: external packages are launched."""
    launched = {} if row.mixed else {column: run for column, run in row.timed.items() if run.graphs is False}
    ours = [c for c, run in launched.items() if (run.attention == AUTO if with_auto else not run.external)]
    return row.ratio([c for c, run in launched.items() if run.external], ours)
