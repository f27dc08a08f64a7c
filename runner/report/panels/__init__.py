"""The panels of a report's page: charts that the runs' data call for."""

from __future__ import annotations

from collections.abc import Sequence

from runner.report.charts import Panel, timed
from runner.report.runs import BACK_TO_BACK, Run


def panels(runs: Sequence[Run], which: str = "total") -> list[Panel]:
    """The panels of these runs; empty where nothing was measured that a panel shows, and of times back to back, which
    have no samples. A panel is a function of the timed runs and the pass, whose result is empty where the runs do not call for it."""
    from runner.report.panels import curves, limits, timeline

    if which == BACK_TO_BACK:
        return []
    drawn = (
        curves.times, curves.efficiency, curves.density, limits.roofline, limits.predicted, curves.memory, curves.loss,
        timeline.phases, timeline.one_iteration,
    )  # fmt: skip
    measured = timed(runs)
    return [panel for draw in drawn for panel in draw(measured, which)]
