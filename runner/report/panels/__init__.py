"""The panels of a report's page: charts that the runs' data call for."""

from __future__ import annotations

from collections.abc import Sequence

from runner.report.charts import Panel
from runner.report.runs import BACK_TO_BACK, Run

__all__ = ["Panel", "panels"]


def panels(runs: Sequence[Run], which: str = "total") -> list[Panel]:
    """The panels of these runs; empty where nothing was measured that a panel shows, and of times back to back, which
    have no samples. A panel is a function of the runs and the pass, whose result is empty where the runs do not call for
    it."""
    from runner.report.panels import cells, curves, limits, timeline

    if which == BACK_TO_BACK:
        return []
    drawn = (
        curves.times, curves.efficiency, cells.kernels, curves.density, limits.roofline, limits.predicted, curves.memory,
        cells.errors, curves.loss, timeline.phases, timeline.one_iteration,
    )  # fmt: skip
    return [panel for draw in drawn for panel in draw(runs, which)]
