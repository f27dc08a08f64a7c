"""Rate against arithmetic intensity, below this machine's ceilings."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import altair as alt

from runner.report.charts import Row, few_points, short
from runner.report.comparison import comparable
from runner.report.drawing import LARGE, QUIET, SMALL, colored_by, facets, logarithmic, tips
from runner.report.labels import labels
from runner.report.modelled import kernel_bytes
from runner.report.panels.panel import Panel
from runner.report.runs import Run
from runner.report.table import fact
from runner.report.tables import rate_title

NOTE = (
    "Grey: the highest rate that this machine's measured ceilings allow, sloped where bytes bind and flat where compute "
    "does. The nearer a point is to it, the less there is to gain; under the slope, move fewer bytes. Bytes are the fewest "
    "that a rank's kernels and transfers can move."
)
LEAST = 2  # points
MOST_RUNS = 400


def draw(runs: Sequence[Run], which: str = "total") -> list[Panel]:
    """A point for each run with counted bytes and measured ceilings; a panel for the bytes of device memory and one for
    those that a rank receives, for each dtype and world size."""
    timed = [run for run in comparable(runs) if run.ok and run.result.ceilings and not run.model]
    kept = few_points(timed, MOST_RUNS)
    rows, roofs = _rows(kept.rows, which)
    if len(rows) < LEAST:
        return []
    lines = [line for panel, of in roofs.items() for line in _roof(panel, of, rows)]
    values = rows + lines
    x_scale, x_axis = logarithmic(*_ends(values, "intensity"), format="~s")
    y_scale, y_axis = logarithmic(*_ends(values, "tflops"))
    title = "FLOPs a byte" + (f" of {next(iter(roofs))}" if len(roofs) == 1 else "")
    base = alt.Chart(alt.Data(values=values)).encode(
        x=alt.X("intensity:Q", title=title, scale=x_scale, axis=x_axis),
        y=alt.Y("tflops:Q", title=rate_title(timed), scale=y_scale, axis=y_axis),
    )
    tooltip = tips(
        ("label:N", "attention"), ("workload:N", "workload"), ("intensity:Q", "FLOPs a byte"), ("tflops:Q", "TFLOP/s"),
        ("share:Q", "of the ceiling"),
    )  # fmt: skip
    colors, names = colored_by(rows)
    points = base.transform_filter("!datum.roof").mark_circle(size=55, opacity=0.8)
    points = points.encode(tooltip=tooltip, **colors)
    roof = base.transform_filter("datum.roof").mark_line(color=QUIET, strokeWidth=2)
    chart = facets(alt.layer(roof, points), rows, LARGE, SMALL, legend=names)
    return [Panel("roofline", "Roofline", " ".join(filter(None, [NOTE, kept.note])), chart.to_dict(validate=False))]


def _rows(runs: Sequence[Run], which: str) -> tuple[list[Row], dict[str, dict[str, float]]]:
    """The points, and the ceilings of each panel: the highest of its runs, since disturbances make one too low."""
    named = labels(runs)
    rows: list[Row] = []
    roofs: dict[str, dict[str, float]] = defaultdict(dict)
    for run in runs:
        metrics, found = run.result.metrics, run.result.ceilings
        measured = which if which in run.passes else "forward"
        if metrics is None or not run.world_size or not metrics.flops.get(measured) or "matmul_tflops" not in found:
            continue
        of = metrics.passes[measured]
        flops = metrics.flops[measured] / run.world_size
        moved = {
            ("device memory", "copy_gb_s"): kernel_bytes(run, measured),
            (f"links, {run.world_size} ranks", "link_gb_s"): of.received,
        }
        for (what, ceiling), size in moved.items():
            if not size or ceiling not in found:
                continue
            panel = f"{what}, {run.dtype}"
            roof = roofs[panel]
            roof["compute"] = max(found["matmul_tflops"], roof.get("compute", 0))
            roof["bytes"] = max(found[ceiling], roof.get("bytes", 0))
            rows.append({
                "label": named[run], "variant": str(run.attention), "kernel": str(run.kernel), "panel": panel,
                "workload": f"S = {fact(run, 'seq_len')}, {measured}", "intensity": short(flops / size),
                "tflops": short(of.tflops_per_device),
            })  # fmt: skip
    for row in rows:
        row["share"] = short(row["tflops"] / _limit(roofs[row["panel"]], row["intensity"]), 3)
    return rows, roofs


def _limit(roof: dict[str, float], intensity: float) -> float:
    """TFLOP/s."""
    return min(roof["compute"], roof["bytes"] * intensity / 1e3)


def _roof(panel: str, roof: dict[str, float], rows: Sequence[Row]) -> list[Row]:
    """The line of a panel's ceilings: over its points, and with its ridge."""
    own = [row["intensity"] for row in rows if row["panel"] == panel]
    ridge = roof["compute"] / roof["bytes"] * 1e3
    places = sorted({min(*own, ridge) / 2, ridge, max(*own, ridge) * 2})
    return [{"panel": panel, "roof": True, "intensity": short(x), "tflops": short(_limit(roof, x))} for x in places]


def _ends(rows: Sequence[dict[str, Any]], key: str) -> tuple[float, float]:
    values = [row[key] for row in rows if row[key]]
    return min(values) / 1.3, max(values) * 1.3
