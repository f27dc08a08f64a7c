"""Peak memory against length."""

from __future__ import annotations

from collections.abc import Sequence

from runner.report.charts import OVER, Row, line, short, shown
from runner.report.drawing import Height, doubling, lines, tips
from runner.report.labels import labels
from runner.report.panels.panel import Panel
from runner.report.runs import WORKLOAD, Run

UNITS = {"GiB": 2**30, "MiB": 2**20}  # the first that the largest peak reaches


def draw(runs: Sequence[Run], which: str = "total") -> list[Panel]:
    """Peak memory of the rank with most, over the sequence length, where a variant has two lengths."""
    measured = [run for run in runs if run.ok and run.result.peak_bytes and run.seq_len]
    highest = max((run.result.peak_bytes or 0 for run in measured), default=0)
    unit = next((unit for unit, size in UNITS.items() if highest >= size), "MiB")
    rows = _rows(measured, UNITS[unit])
    if len(rows) == len({(row["label"], row["panel"]) for row in rows}):
        return []
    kept = shown(rows)
    x = doubling(kept.rows, "over", OVER["seq_len"], True)
    tooltip = tips(("label:N", "attention"), ("panel:N", "workload"), ("over:Q", "tokens"), ("peak:Q", unit))
    chart = lines(kept.rows, x, Height("peak", f"peak memory, {unit}", log=True), tooltip)
    note = "Peak of the rank with the most memory; lower is better."
    return [Panel("memory", "Peak memory", " ".join(filter(None, [note, kept.note])), chart.to_dict(validate=False))]


def _rows(runs: Sequence[Run], unit: int) -> list[Row]:
    """A row for each label, workload and length: the highest peak of its runs."""
    named = labels(runs)
    varying = [key for key in WORKLOAD if key != "seq_len" and len({getattr(run, key) for run in runs}) > 1]
    found: dict[tuple[str, str, int], Row] = {}
    for run in runs:
        row = line(run, named[run], varying)
        row |= {"over": run.seq_len, "peak": short((run.result.peak_bytes or 0) / unit)}
        place = (row["label"], row["panel"], row["over"])
        if place not in found or found[place]["peak"] < row["peak"]:
            found[place] = row
    return list(found.values())
