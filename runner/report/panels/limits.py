"""Charts of points against a limit: the machine's ceilings, and the model of time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import median

from runner.report.charts import Panel, few, point, short
from runner.report.drawing import Axis, lines
from runner.report.labels import labels
from runner.report.modelled import calibrated, kernel_bytes, points
from runner.report.runs import Run
from runner.report.table import fact
from runner.report.tables import rate_title

ROOFLINE = (
    "Dashed: the highest rate that this machine's measured ceilings allow, sloped where bytes bind and flat where compute "
    "does. The nearer a point is to it, the less there is to gain; under the slope, move fewer bytes. Bytes are the fewest "
    "that a rank's kernels and transfers can move. {}"
)
PREDICTED = (
    "Times by the model of time, uncalibrated. On the dashed line both agree; a point above it ran faster than predicted. "
    "Errors: median {:.0%}, largest {:.0%}. {}"
)
MOST_RUNS = 400


def roofline(runs: Sequence[Run], which: str) -> list[Panel]:
    """A point for each run with counted bytes and measured ceilings; a panel for the bytes of device memory and one for
    those that a rank receives, for each dtype and world size, below the highest ceilings of its runs, since disturbances
    make one too low."""
    runs, left_out = few([run for run in runs if run.result.ceilings and not run.model], MOST_RUNS, "runs")
    named, panels = labels(runs), defaultdict(list)
    roofs: dict[str, tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))  # TFLOP/s and GB/s
    for run in runs:
        metrics, ceilings = run.result.metrics, run.result.ceilings
        row = point(run, named[run], "", which, seq_len=fact(run, "seq_len"))
        measured = row["pass"]
        if metrics is None or not metrics.flops.get(measured):
            continue
        for name, ceiling, size in (
            ("device memory", "copy_gb_s", kernel_bytes(run, measured)),
            (f"links, {run.world_size} ranks", "link_gb_s", metrics.passes[measured].received),
        ):
            if size and {"matmul_tflops", ceiling} <= ceilings.keys():
                compute, bandwidth = roofs[panel := f"{name}, {run.dtype}"]
                roofs[panel] = max(compute, ceilings["matmul_tflops"]), max(bandwidth, ceilings[ceiling])
                intensity = short(metrics.flops[measured] / (run.world_size or 1) / size)
                panels[panel].append(row | {"panel": panel, "intensity": intensity})
    for panel, (compute, bandwidth) in roofs.items():
        ridge = compute / bandwidth * 1e3
        places = [ridge, *(row["intensity"] for row in panels[panel])]
        panels[panel] += [
            panels[panel][0] | {"intensity": short(x), "tflops": None}
            for x in (min(places) / 2, ridge, max(places) * 2)
        ]
        for row in panels[panel]:
            row["ideal"] = short(min(compute, bandwidth * row["intensity"] / 1e3))
            row["share"] = row["tflops"] and short(row["tflops"] / row["ideal"], 3)
    x, y = Axis("intensity", "FLOPs a byte", "~s", log=1), Axis("tflops", rate_title(runs), log=1)
    about = (
        "roofline",
        "Roofline",
        ROOFLINE.format(left_out),
        [row for rows in panels.values() for row in rows],
    )
    return lines(*about, x, y, "label kernel seq_len pass intensity tflops share", connected=False)


def predicted(runs: Sequence[Run], which: str) -> list[Panel]:
    """A point for each pass of a run that the model of time describes, on GPUs whose rates are measured."""
    runs, left_out = few([run for run in runs if calibrated(run)], MOST_RUNS, "runs")
    named = labels(runs)
    rows = [
        point(
            made.run, named[made.run], "", made.which, ideal=short(made.measured), predicted=short(made.model.ms),
            seq_len=fact(made.run, "seq_len"), ranks=made.run.world_size,
            error=short(made.model.ms / made.measured - 1, 3),
        )
        for made in points(runs)
    ]  # fmt: skip
    if not rows:
        return []
    errors = [abs(row["error"]) for row in rows]
    note = PREDICTED.format(median(errors), max(errors), left_out)
    about = ("predicted", "Predicted against measured", note, rows)
    x, y = Axis("time", "measured, ms", log=1), Axis("predicted", "predicted, ms", log=1)
    return lines(*about, x, y, "label kernel pass seq_len ranks predicted time error", connected=False)
