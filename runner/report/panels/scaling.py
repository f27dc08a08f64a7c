"""Efficiency against one device, over the world size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import altair as alt

from runner.report.charts import KINDS, Axes, points, shown
from runner.report.comparison import comparable
from runner.report.drawing import QUIET, Height, doubling, lines, tips
from runner.report.panels.panel import Panel
from runner.report.panels.times import over_title
from runner.report.runs import Run

NOTE = (
    "Speedup over one device, over the number of ranks; thin lines by p90 and p10. The dashed line is ideal: where a line "
    "falls below it, further ranks add less than their share."
)


def draw(runs: Sequence[Run], which: str = "total") -> list[Panel]:
    """A line over two world sizes or more for each label, a panel for each other workload; none of a single pass, whose
    baseline is not known."""
    timed = [run for run in comparable(runs) if run.ok]
    if which != "total" or not timed:
        return []
    axes = Axes.over_ranks(timed)
    rows = [row for row in points(timed, axes) if row["efficiency"] is not None]
    places = {(row["label"], row["panel"], row["over"]) for row in rows}
    scaled = {place[:2] for place in places if sum(place[:2] == other[:2] for other in places) > 1}
    rows = [row for row in rows if (row["label"], row["panel"]) in scaled]
    if not rows:
        return []
    kept = shown(rows)
    height = Height("efficiency", "efficiency", "efficiency_p90", "efficiency_p10", format="%")

    def ideal(base: Any) -> Any:
        return base.mark_rule(color=QUIET, strokeDash=[3, 3]).encode(y=alt.YDatum(1, title=height.title))

    tooltip = tips(
        ("label:N", "attention"), ("panel:N", "workload"), ("over:Q", "ranks"), ("efficiency:Q", "efficiency"), ("time:Q", "ms")
    )  # fmt: skip
    chart = lines(kept.rows, doubling(kept.rows, "over", over_title(axes), False), height, tooltip, under=ideal)
    return [
        Panel(
            "efficiency", KINDS["efficiency"], " ".join(filter(None, [NOTE, kept.note])), chart.to_dict(validate=False)
        )
    ]
