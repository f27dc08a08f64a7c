"""Charts of lines over the length, the number of ranks, the density of a mask, or the steps of a training."""

from __future__ import annotations

from collections.abc import Sequence

from runner.report.charts import (
    KINDS,
    OVER,
    Axes,
    Panel,
    Row,
    joined,
    place,
    plotted,
    point,
    points,
    several,
    short,
    varying,
)
from runner.report.drawing import Axis, bars, lines
from runner.report.labels import labels
from runner.report.runs import Run
from runner.report.scaling import scaling
from runner.report.tables import rate_title

MOST_STEPS = 200  # of one line; longer curves keep every n-th step and the last
NOTES = {
    "time": "Median of the slowest rank; thin lines reach from p10 to p90. Lower is better.",
    "tflops": "FLOPs of the pairs that the mask allows, over the median time; thin lines: by p90 and p10. Higher is better.",
    "efficiency": (
        "Speedup over one device, over the number of ranks; thin lines by p90 and p10. The dashed line is ideal: where a line "
        "falls below it, further ranks add less than their share."
    ),
    "density": (
        "Density is the share of all pairs of a query and a key that the mask keeps. The dashed line is the time of the densest "
        "mask, scaled by density: where a line stays above it, time does not fall with the work. Thin lines: p10 to p90."
    ),
    "memory": "Peak of the rank with the most memory; lower is better.",
    "loss": "Loss of every training step; variants compute the same function, so their curves should lie on each other.",
}


def times(runs: Sequence[Run], which: str) -> list[Panel]:
    """Time and rate over the length or the world size or, where neither varies much, as bars."""
    if not runs:
        return []
    axes = Axes.of(runs)
    rows, panels = points(runs, axes, which), []
    step, fields = step_title(rows), "label panel kernel time p10 p90 tflops"
    for y in (Axis("time", f"{step}, ms", log=3), Axis("tflops", f"{step}, {rate_title(runs)}")):
        about = (y.field, KINDS[y.field], NOTES[y.field], rows)
        panels += lines(*about, over_axis(axes), y, fields) if axes.over else bars(*about, y, fields)
    return panels


def step_title(rows: Sequence[Row]) -> str:
    passes = {row["pass"] for row in rows}
    return passes.pop().replace("total", "forward and backward") if len(passes) == 1 else "a step"


def over_axis(axes: Axes) -> Axis:
    weak = f" ({axes.weak:,} tokens each)" if axes.weak else ""
    return Axis("over", OVER[axes.over or ""] + weak, doubling=True)


def efficiency(runs: Sequence[Run], which: str) -> list[Panel]:
    """A line over two world sizes or more for each label, a panel for each other workload; none of a single pass, whose
    baseline is not known."""
    against = scaling(runs)
    if which != "total" or not against:
        return []
    axes, runs = Axes.of(runs, "world_size"), list(against)
    efficiencies = {
        run: {"over": run.world_size, "efficiency": short(against[run].efficiency), "ideal": 1} for run in runs
    }
    rows = plotted(runs, axes.panel, which, efficiencies.__getitem__)
    about = ("efficiency", KINDS["efficiency"], NOTES["efficiency"], several(rows, "over"))
    y = Axis("efficiency", "efficiency", format="%")
    return lines(*about, over_axis(axes), y, "label panel over efficiency time")


def density(runs: Sequence[Run], which: str) -> list[Panel]:
    """A line for each label over the densities of masks of one workload, where there are several; runs differ in the mask
    only."""
    metrics = {run: run.result.metrics for run in runs if run.mask and not run.model and run.result.metrics}
    densities = {run: short(value.density, 4) for run, value in metrics.items() if value.density}
    runs = list(densities)
    rows = plotted(runs, varying(runs, "mask"), which, lambda run: {"mask": run.mask, "density": densities[run]})
    rows = several(rows, "density")
    for row in rows:
        own = (other for other in rows if other["panel"] == row["panel"])
        densest = min(own, key=lambda row: (-row["density"], row["time"]))
        row["ideal"] = short(densest["time"] * row["density"] / densest["density"])
    x, y = Axis("density", "density of the mask", ".2~%", log=3), Axis("time", f"{step_title(rows)}, ms", log=3)
    about = ("density", "Time against density", NOTES["density"], rows)
    return lines(*about, x, y, "mask label density time tflops")


def memory(runs: Sequence[Run], which: str) -> list[Panel]:
    """Peak memory of the rank with most, over the sequence length, where a variant has two lengths."""
    peaks = {run: short(run.result.peak_bytes / 2**30) for run in runs if run.result.peak_bytes}
    keys = varying(peaks, "seq_len")
    rows = plotted(list(peaks), keys, which, lambda run: {"over": run.seq_len, "peak": peaks[run]})
    rows = rows if several(rows, "over") else []
    about = ("memory", "Peak memory", NOTES["memory"], rows)
    y = Axis("peak", "peak memory, GiB", log=3)
    return lines(*about, over_axis(Axes("seq_len", ())), y, "label panel over peak")


def loss(runs: Sequence[Run], which: str) -> list[Panel]:
    """The loss of every training step, a line for each label and workload, a panel for each model; none where no model
    was trained for two steps."""
    curves = {run: run.result.model.loss_curve for run in runs if run.result.model}
    curves = {run: curve for run, curve in curves.items() if len(curve) > 1}
    named, keys = labels(list(curves)), varying(curves, "model")
    models = varying(curves) != keys
    rows = [
        point(
            run, joined(named[run], place(run, keys)), place(run, ["model"] * models), which,
            step=step + 1, loss=short(value, 7),
        )
        for run, curve in curves.items()
        for step, value in enumerate(curve)
        if step % -(-len(curve) // MOST_STEPS) == 0 or step == len(curve) - 1
    ]  # fmt: skip
    about = ("loss", "Loss", NOTES["loss"], rows)
    return lines(*about, Axis("step", "training step"), Axis("loss", "loss", log=1), "label panel step loss")
