"""Time against the share of the pairs that a mask keeps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import median
from typing import Any

import altair as alt

from runner.report.charts import Row, line, short, shown
from runner.report.comparison import comparable
from runner.report.drawing import QUIET, Height, lines, logarithmic, tips
from runner.report.labels import labels
from runner.report.panels.panel import Panel
from runner.report.panels.times import step_title
from runner.report.runs import WORKLOAD, Run

NOTE = (
    "Density is the share of all pairs of a query and a key that the mask keeps. The dashed line is the time of the densest "
    "mask, scaled by density: where a line stays above it, time does not fall with the work. Thin lines: p10 to p90."
)


def draw(runs: Sequence[Run], which: str = "total") -> list[Panel]:
    """A line for each label over the densities of masks of one workload, where there are several; runs differ in the mask
    only."""
    rows = _rows([run for run in comparable(runs) if run.ok and run.mask and not run.model], which)
    if not rows:
        return []
    kept = shown(rows, "density")
    low, high = (pick(row["density"] for row in kept.rows) for pick in (min, max))
    scale, axis = (
        logarithmic(low / 1.2, high * 1.2, ".2~%")
        if high > 5 * low > 0
        else (alt.Scale(zero=True), alt.Axis(format=".2~%"))
    )
    axis.grid = False
    x = alt.X("density:Q", title="density of the mask", scale=scale, axis=axis)
    height = Height("time", f"{step_title(rows)}, ms", "p10", "p90", log=True, also="ideal")

    def ideal(base: Any) -> Any:
        return base.mark_line(color=QUIET, strokeDash=[3, 3]).encode(
            x=x, y=height.y(kept.rows, "ideal"), detail="workload:N"
        )

    tooltip = tips(
        ("mask:N", "mask"), ("label:N", "attention"), ("density:Q", "density"), ("time:Q", "ms"), ("tflops:Q", "TFLOP/s on kept pairs"),
    )  # fmt: skip
    chart = lines(kept.rows, x, height, tooltip, under=ideal)
    return [
        Panel(
            "density", "Time against density", " ".join(filter(None, [NOTE, kept.note])), chart.to_dict(validate=False)
        )
    ]


def _rows(runs: Sequence[Run], which: str) -> list[Row]:
    """A row for each label, workload and mask: the median of its runs. Only workloads with two densities of a label."""
    named = labels(runs)
    varying = [key for key in WORKLOAD if key != "mask" and len({getattr(run, key) for run in runs}) > 1]
    found: dict[tuple[str, str, str], list[Row]] = defaultdict(list)
    for run in runs:
        measured = which if which in run.passes else "forward"
        metrics, times = run.result.metrics, run.passes[measured]
        if metrics is None or not metrics.density:
            continue
        row = line(run, named[run], varying)
        row |= {
            "mask": str(run.mask),
            "density": short(metrics.density, 4),
            "pass": measured,
            "time": short(times.median),
        }
        row |= {
            "p10": short(times.p10),
            "p90": short(times.p90),
            "tflops": short(metrics.passes[measured].tflops_per_device),
        }
        found[row["label"], row["panel"], row["mask"]].append(row)
    rows = [_middle(each) for each in found.values()]
    densities: dict[tuple[str, str], set[float]] = defaultdict(set)
    for row in rows:
        densities[row["label"], row["panel"]].add(row["density"])
    rows = [row for row in rows if len(densities[row["label"], row["panel"]]) > 1]
    densest = {
        panel: min((row for row in rows if row["panel"] == panel), key=lambda row: (-row["density"], row["time"]))
        for panel in {row["panel"] for row in rows}
    }
    for row in rows:
        top = densest[row["panel"]]
        row["workload"] = row["panel"]
        row["ideal"] = short(top["time"] * row["density"] / top["density"])
    return rows


def _middle(rows: list[Row]) -> Row:
    middle = median(row["time"] for row in rows)
    return min(rows, key=lambda row: abs(row["time"] - middle))
