"""The table that a reader sees first: `auto` against each external package at its best, measured alike."""

from __future__ import annotations

from collections.abc import Sequence

from attention.autotune.choice import AUTO
from attention.variants.registry import EXTERNAL
from runner.report.comparison import EVEN, LEFT, RATIO, Row, by_workload, comparable, fact_columns, notes
from runner.report.fair import MIXED, noise, origins, ratio
from runner.report.labels import labels
from runner.report.runs import Run
from runner.report.table import Table, digits


def package(run: Run) -> str:
    """The column of a run: auto, or its external package."""
    if not run.external:
        return AUTO
    needs = EXTERNAL[str(run.attention)].needs
    return needs.replace("_", "-") if needs else "PyTorch"


def headline_table(runs: Sequence[Run], which: str = "total", allow_mixed: bool = False) -> Table:
    """A row for each workload that `auto` did: its time, the time of each external package's fastest setting, which the cell
    names, and their ratio. Raises ValueError without runs of auto and of an external package, and for rows of several commits or
    machines unless `allow_mixed`."""
    runs = [run for run in comparable(runs) if run.external or run.attention == AUTO]
    if {run.external for run in runs} != {True, False}:
        raise ValueError("--table headline: needs runs of attention=auto and of an external package in these folders")
    named = labels(runs)
    columns = [AUTO, *dict.fromkeys(package(run) for run in runs if run.external)]
    groups = [group for group in by_workload(runs) if any(not run.external for run in group)]
    rows = [Row(_fastest(group, columns, which), which) for group in groups]
    titles, facts = fact_columns(rows)
    if not allow_mixed:
        _refuse_mixed(rows, facts)

    def text(run: Run) -> str:
        how = named[run] if run.external else run.took
        return f"{digits(run.ms(which))}{noise(run, which)}" + (f" ({how})" if how else "")

    cells = [[*start, *row.cells(columns, text), _ratio(row)] for start, row in zip(facts, rows, strict=True)]
    title = RATIO.format(AUTO)
    note = "Each external package is shown at its fastest setting among these runs, which the cell names."
    even = any(texts[-1].startswith("even (") for texts in cells)
    return Table([*titles, *columns, title], cells, LEFT, notes(rows, [note, EVEN] if even else [note]))


def _fastest(group: Sequence[Run], columns: Sequence[str], which: str) -> dict[str, Run]:
    """By column the run of the smallest median; where none has one, any."""
    found = {}
    for column in columns:
        side = [run for run in group if package(run) == column]
        timed = [run for run in side if run.ms(which) is not None]
        if side:
            found[column] = min(timed, key=lambda run: run.ms(which) or 0.0) if timed else side[0]
    return found


def _refuse_mixed(rows: Sequence[Row], facts: Sequence[Sequence[str]]) -> None:
    for row, texts in zip(rows, facts, strict=True):
        if row.mixed:
            origin = ", ".join(origins(row.timed.values()))
            raise ValueError(
                f"--table headline: the row {' '.join(texts).rstrip(MIXED)} is of several commits or machines ({origin}); "
                "measure it in one sweep, choose with --where, or allow it with --mixed"
            )


def _ratio(row: Row) -> str:
    others = [run for column, run in row.timed.items() if column != AUTO]
    if AUTO not in row.timed or not others:
        return ""
    best = min(others, key=lambda run: run.ms(row.which) or 0.0)
    return ratio(best, row.timed[AUTO], row.which, (package(best), AUTO))
