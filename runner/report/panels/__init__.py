"""The panels of a report's page: charts that the runs' data call for."""

from __future__ import annotations

from collections.abc import Sequence

from runner.report.panels.panel import Panel
from runner.report.runs import Run

__all__ = ["Panel", "panels"]

NOTES = {
    "time": "Median of the slowest rank, and p10 to p90; lower is better.",
    "tflops": "FLOPs of the pairs that the mask allows, over the median time; higher is better.",
    "efficiency": "Speedup over the number of ranks; the dashed line is ideal.",
}


def panels(runs: Sequence[Run], which: str = "total") -> list[Panel]:
    """The panels of these runs; empty where nothing was measured that a panel shows. A panel is a module with a function
    `draw(runs, which) -> list[Panel]`, empty where the runs do not call for it."""
    from runner.report.charts import KINDS
    from runner.report.drawing import draw
    from runner.report.panels import loss, memory, phases, timeline

    made = [Panel(kind, KINDS[kind], NOTES[kind], chart.to_dict()) for kind, chart in draw(runs, which).items()]
    return made + [panel for module in (memory, loss, phases, timeline) for panel in module.draw(runs, which)]
