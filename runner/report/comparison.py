"""Runs side by side: a row for each workload, a column for each way to do it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from attention.variants.registry import AUTO
from runner.config.values import Refusal
from runner.output.table import Table
from runner.peers import PEERS
from runner.record.fields import digits
from runner.report.fair import EVEN, MIXED, by_time, even, mixed, mixed_note, noisy, tied
from runner.report.labels import each_over_several_kernels, labels
from runner.report.runs import BACK_TO_BACK, FACTS, PASSES, WORKLOAD, Run, latest, sortable
from runner.report.table import BEST, NOISY, counted, fact, time

COMPARED = (*PASSES, BACK_TO_BACK)
LEFT = {FACTS[key] for key in ("features", "mask", "gpu", "mode", "dtype", "pack", "heads", "kernel")}
HEADLINE = "For each external package, the cell has its fastest variant among these runs, named in brackets."

Row = dict[str, Run]  # the runs of a workload, by column


def comparable(runs: Iterable[Run]) -> list[Run]:
    """The runs whose workload is known."""
    return [run for run in runs if run.attention and run.seq_len]


def by_workload(runs: Iterable[Run], key: Sequence[str] = WORKLOAD) -> list[list[Run]]:
    """The runs that agree in all facts of `key`, in its order."""
    groups: dict[tuple[Any, ...], list[Run]] = {}
    for run in runs:
        groups.setdefault(tuple(getattr(run, name) for name in key), []).append(run)
    return [groups[work] for work in sorted(groups, key=lambda work: [sortable(value) for value in work])]


def comparison_table(runs: Sequence[Run], which: str = "total") -> Table:
    """The times of `which`, a member of COMPARED, in ms. Where several variants ran over several local kernels each, a row
    is a workload and a kernel. Of runs of one label the latest counts."""
    runs = comparable(runs)
    by_kernel = each_over_several_kernels(runs)
    named = labels(runs, without={"asked_kernel"} if by_kernel else ())
    key = (*WORKLOAD, "asked_kernel") if by_kernel else WORKLOAD
    rows = [latest(group, named.__getitem__) for group in by_workload(runs, key)]
    repeated = len(runs) - sum(map(len, rows))
    notes = [f"Where a run was repeated, its latest: {counted(repeated, 'earlier run')} left out."] if repeated else []
    columns = dict.fromkeys(named[run] for run in sorted(runs, key=lambda run: run.external))
    return _side_by_side(rows, [*columns], which, lambda run: time(run, which), key, notes)


def headline_table(runs: Sequence[Run], which: str = "total") -> Table:
    """A row for each workload that `auto` did: its time, the time of each external package's fastest setting, which the
    cell names, and their ratio. Raises Refusal without runs of auto and of an external package."""
    runs = [run for run in comparable(runs) if run.external or run.attention == AUTO]
    if {run.external for run in runs} != {True, False}:
        raise Refusal("--table headline: needs runs of attention=auto and of an external package in these folders")
    named, rows = labels(runs), []
    for group in by_workload(runs):
        fastest_last = [run for run in group if run.ms(which) is None] + by_time(group, which)[::-1]
        rows.append({_package(run): run for run in fastest_last})

    def text(run: Run) -> str:
        how = named[run] if run.external else run.took
        return time(run, which) + (f" ({how})" if how else "")

    columns = [AUTO, *dict.fromkeys(_package(run) for run in runs if run.external)]
    return _side_by_side([row for row in rows if AUTO in row], columns, which, text, WORKLOAD, [HEADLINE])


def _package(run: Run) -> str:
    """The column of a run in the headline: auto, or its external package."""
    return (PEERS[str(run.attention)].needs or "PyTorch").replace("_", "-") if run.external else AUTO


def _side_by_side(
    rows: Sequence[Row],
    columns: Sequence[str],
    which: str,
    text: Callable[[Run], str],
    key: Sequence[str],
    notes: Sequence[str],
) -> Table:
    """The facts of `key` in which the rows differ, the `text` of each column's run, bold for one that is faster than all
    others of its row by more than their spreads, and beside external packages the ratio of the fastest of them to `auto` or,
    without it, to the fastest of ours. The last fact of a row that mixes commits or machines is marked."""
    first, timed = [next(iter(row.values())) for row in rows], [by_time(row.values(), which) for row in rows]
    shown = [name for name in key if len({getattr(run, name) for run in first}) > 1] or ["seq_len"]
    every = [run for row in rows for run in row.values()]
    ours = AUTO if any(run.attention == AUTO for run in every) else "fastest of ours"

    def cell(run: Run | None, best: Sequence[Run]) -> str:
        """Its text, or the status of a run without a time."""
        if run is None or run.ms(which) is None:
            return "" if run is None or run.ok else run.status
        return BEST.format(text(run)) if [run] == best else text(run)

    cells = []
    for row, run, runs in zip(rows, first, timed, strict=True):
        facts = [fact(run, name) for name in shown]
        facts[-1] += MIXED if mixed(runs) else ""
        cells.append([*facts, *(cell(row.get(column), tied(runs, which)) for column in columns)])
    titles = [*(FACTS[name.removeprefix("asked_")] for name in shown), *columns]
    notes = [*notes]
    if {run.external for run in every} == {True, False}:
        titles.append(f"fastest external / {ours}")
        ratios = [_ratio(row, runs, which, ours == AUTO) for row, runs in zip(rows, timed, strict=True)]
        cells = [[*texts, ratio] for texts, ratio in zip(cells, ratios, strict=True)]
        notes += [EVEN] if any(ratio.startswith("even") for ratio in ratios) else []
    batches = shown == ["pack"] and len({run.result.asked.seed for run in first}) == len(rows)  # each seed drew one
    if batches and len(rows) > 2 and not mixed(every):
        cells.append(_mean(rows, columns, which, len(titles)))
    notes += [NOISY] if any(noisy(run, which) for runs in timed for run in runs) else []
    return Table(titles, cells, LEFT, notes + mixed_note(timed))


def _mean(rows: Sequence[Row], columns: Sequence[str], which: str, width: int) -> list[str]:
    """The row of the means over all batches, of the columns that have a time for each."""
    found = [[row[column].ms(which) for row in rows if column in row] for column in columns]
    times = [[ms for ms in column if ms is not None] for column in found]
    means = [digits(sum(ms) / len(rows)) if len(ms) == len(rows) else "" for ms in times]
    return [f"mean of {len(rows)} batches", *means, *[""] * (width - 1 - len(means))]


def _ratio(row: Row, timed: Sequence[Run], which: str, with_auto: bool) -> str:
    """The fastest external package over ours, `even` where they are, with the names of both. External packages are launched:
    so are ours that count."""
    names = {run: column for column, run in row.items()}
    runs = [run for run in timed if run.replay not in ("graphs", "auto")]
    theirs = next((run for run in runs if run.external), None)
    ours = next((run for run in runs if (run.attention == AUTO if with_auto else not run.external)), None)
    if theirs is None or ours is None or mixed(timed):
        return ""
    ratio = (theirs.ms(which) or 0.0) / (ours.ms(which) or 1.0)
    return f"{'even' if even(theirs, ours, which) else f'{ratio:.2f}'} ({names[theirs]} / {names[ours]})"
