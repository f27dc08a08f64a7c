"""Time and rate of a step."""

from __future__ import annotations

from collections.abc import Sequence

from runner.report.charts import KINDS, OVER, Axes, Row, Shown, dense_points, few_points, one_panel, points, shown
from runner.report.comparison import comparable
from runner.report.drawing import Height, bars, doubling, lines, tips
from runner.report.panels.panel import Panel
from runner.report.runs import Run
from runner.report.tables import rate_title

MOST_BARS = 200
NOTES = {
    "time": "Median of the slowest rank; thin lines reach from p10 to p90. Lower is better.",
    "tflops": "FLOPs of the pairs that the mask allows, over the median time; thin lines: by p90 and p10. Higher is better.",
}


def draw(runs: Sequence[Run], which: str = "total") -> list[Panel]:
    """Time and rate over the length or the world size or, where neither varies much, as bars."""
    timed = [run for run in comparable(runs) if run.ok]
    rows = points(timed, axes := Axes.of(timed), which) if timed else []
    if not rows:
        return []
    rate, step = rate_title(timed), step_title(rows)
    heights = {
        "time": Height("time", f"{step}, ms", "p10", "p90", log=True),
        "tflops": Height("tflops", f"{step}, {rate}", "tflops_p90", "tflops_p10"),
    }
    tooltip = tips(
        ("label:N", "attention"), ("panel:N", "workload"), ("kernel:N", "kernel"), ("time:Q", "ms"), ("p10:Q", "p10 ms"),
        ("p90:Q", "p90 ms"), ("tflops:Q", rate),
    )  # fmt: skip
    made = []
    for kind, height in heights.items():
        drawn = rows + dense_points(timed, axes, which) if kind == "time" else rows
        kept: Shown[Row] = shown(drawn) if axes.over else few_points(one_panel(drawn) or drawn, MOST_BARS)
        if axes.over:
            chart = lines(
                kept.rows, doubling(kept.rows, "over", over_title(axes), axes.over == "seq_len"), height, tooltip
            )
        else:
            chart = bars(kept.rows, height, tooltip, best_is_low=kind == "time")
        made.append(
            Panel(kind, KINDS[kind], " ".join(filter(None, [NOTES[kind], kept.note])), chart.to_dict(validate=False))
        )
    return made


def step_title(rows: Sequence[Row]) -> str:
    passes = {row["pass"] for row in rows}
    return passes.pop().replace("total", "forward and backward") if len(passes) == 1 else "a step"


def over_title(axes: Axes) -> str:
    assert axes.over is not None
    return OVER[axes.over] + (f" ({axes.weak:,} tokens each)" if axes.weak else "")
