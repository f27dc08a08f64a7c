"""The panels of a report's page: charts that the runs' data call for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from runner.report.runs import Run


@dataclass(frozen=True)
class Panel:
    """A chart of the page. `name` is its anchor and its PNG's name, unique in a report; `note` says in a sentence how to
    read it. `spec` is a Vega-Lite specification with its data; colours, fonts and light or dark are the page's."""

    name: str
    title: str
    note: str
    spec: dict[str, Any]


NOTES = {
    "time": "Median of the slowest rank; lower is better.",
    "tflops": "FLOPs of the pairs that the mask allows, over the median time; higher is better.",
    "efficiency": "Speedup over the number of ranks; 100% is ideal.",
}


def panels(runs: Sequence[Run], which: str = "total") -> list[Panel]:
    """The panels of these runs, of which at least one has times of the pass `which`; empty where nothing was timed."""
    from runner.report.charts import KINDS
    from runner.report.drawing import draw

    return [Panel(kind, KINDS[kind], NOTES[kind], chart.to_dict()) for kind, chart in draw(runs, which).items()]
