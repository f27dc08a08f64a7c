"""The panels of a report's page: charts that the runs' data call for."""

from __future__ import annotations

from collections.abc import Sequence

from runner.report.panels.panel import Panel
from runner.report.runs import BACK_TO_BACK, Run

__all__ = ["Panel", "panels"]


def panels(runs: Sequence[Run], which: str = "total") -> list[Panel]:
    """The panels of these runs; empty where nothing was measured that a panel shows, and of times back to back, which
    have no samples. A panel is a module with a function `draw(runs, which) -> list[Panel]`, empty where the runs do not
    call for it."""
    from runner.report.panels import (
        density,
        errors,
        kernels,
        loss,
        memory,
        phases,
        predicted,
        roofline,
        scaling,
        timeline,
        times,
    )

    if which == BACK_TO_BACK:
        return []
    modules = (times, scaling, kernels, density, roofline, predicted, memory, errors, loss, phases, timeline)
    return [panel for module in modules for panel in module.draw(runs, which)]
