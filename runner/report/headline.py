"""The README's table: `auto` beside the fastest setting of each external package, of one commit and machine."""

from __future__ import annotations

from collections.abc import Sequence

from attention.variants.registry import AUTO
from runner.peers import PEERS
from runner.report.comparison import RATIO, Row, by_workload, comparable, side_by_side
from runner.report.fair import MIXED, noise, origins
from runner.report.labels import labels
from runner.report.runs import Run
from runner.report.table import Table, digits

NOTE = "For each external package, the cell has its fastest variant among these runs, named in brackets."


def package(run: Run) -> str:
    """The column of a run: auto, or its external package."""
    if not run.external:
        return AUTO
    return (PEERS[str(run.attention)].needs or "PyTorch").replace("_", "-")


def headline_table(runs: Sequence[Run], which: str = "total", allow_mixed: bool = False) -> Table:
    """A row for each workload that `auto` did: its time, the time of each external package's fastest setting, which the
    cell names, and their ratio. Raises ValueError without runs of auto and of an external package, and for rows of
    several commits or machines unless `allow_mixed`."""
    runs = [run for run in comparable(runs) if run.external or run.attention == AUTO]
    if {run.external for run in runs} != {True, False}:
        raise ValueError("--table headline: needs runs of attention=auto and of an external package in these folders")
    named = labels(runs)
    columns = [AUTO, *dict.fromkeys(package(run) for run in runs if run.external)]
    groups = [group for group in by_workload(runs) if any(not run.external for run in group)]
    rows = [Row(_fastest(group, columns, which), which) for group in groups]

    def text(run: Run) -> str:
        how = named[run] if run.external else run.took
        return f"{digits(run.ms(which))}{noise(run, which)}" + (f" ({how})" if how else "")

    def ratio(row: Row) -> str:
        return row.ratio([c for c in row.timed if c != AUTO], [c for c in row.timed if c == AUTO])

    table = side_by_side(rows, columns, text, {RATIO.format(AUTO): ratio}, [NOTE])
    for row, texts in zip(rows, table.rows, strict=True):
        if row.mixed and not allow_mixed:
            facts = " ".join(texts[: -len(columns) - 1]).rstrip(MIXED)
            raise ValueError(
                f"--table headline: the row {facts} is of several commits or machines "
                f"({', '.join(origins(row.timed.values()))}); measure it in one sweep, choose with --where, or allow it with --mixed"
            )
    return table


def _fastest(group: Sequence[Run], columns: Sequence[str], which: str) -> dict[str, Run]:
    """By column the run of the smallest median; where none has one, the first."""
    found = {}
    for column in columns:
        side = [run for run in group if package(run) == column]
        timed = [run for run in side if run.ms(which) is not None]
        if side:
            found[column] = min(timed or side, key=lambda run: run.ms(which) or 0.0)
    return found
