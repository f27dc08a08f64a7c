"""Predicted against measured times."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import altair as alt

from runner.report.charts import Row, few_points, short
from runner.report.drawing import LARGE, QUIET, SMALL, colored_by, facets, logarithmic, tips
from runner.report.modelled import known, measured_rates, points
from runner.report.panels.panel import Panel
from runner.report.runs import Run

MOST_RUNS = 100  # whose times are predicted here
LEAST = 4  # points


def draw(runs: Sequence[Run], which: str = "total") -> list[Panel]:
    """A point for each pass of a run that the model of time describes, on machines whose rates are measured."""
    described = [run for run in runs if known(run) and measured_rates(run)]
    kept = few_points(described, MOST_RUNS)
    rows = [
        _row(point.run, str(point.run.attention), point.which, point.model.ms, point.measured)
        for point in points(kept.rows)
    ]
    rows = [row for row in rows if row["predicted"] and row["measured"]]
    if len(rows) < LEAST:
        return []
    ends = [row[key] for row in rows for key in ("predicted", "measured")]
    scale, axis = logarithmic(min(ends) / 1.3, max(ends) * 1.3)
    base = alt.Chart(alt.Data(values=rows)).encode(x=alt.X("measured:Q", title="measured, ms", scale=scale, axis=axis))
    y = alt.Y("predicted:Q", title="predicted, ms", scale=scale, axis=axis)
    diagonal = base.mark_line(color=QUIET, strokeDash=[3, 3]).encode(
        y=alt.Y("measured:Q", title="predicted, ms", scale=scale, axis=axis)
    )
    tooltip = tips(
        ("label:N", "attention"), ("workload:N", "workload"), ("predicted:Q", "predicted ms"), ("measured:Q", "measured ms"),
        ("error:Q", "error"),
    )  # fmt: skip
    colors, names = colored_by(rows)
    marks = base.mark_circle(size=55, opacity=0.8).encode(y=y, tooltip=tooltip, **colors)
    chart = facets(alt.layer(diagonal, marks), rows, LARGE, SMALL, legend=names)
    off = sorted(abs(row["error"]) for row in rows)
    note = (
        "Times by the model of time, uncalibrated. On the dashed line both agree; a point above it ran faster than "
        f"predicted. Errors: median {median(off):.0%}, largest {off[-1]:.0%}."
    )
    return [
        Panel(
            "predicted",
            "Predicted against measured",
            " ".join(filter(None, [note, kept.note])),
            chart.to_dict(validate=False),
        )
    ]


def _row(run: Run, label: str, panel: str, predicted: float, measured: float) -> Row:
    return {
        "label": label, "variant": label.split()[0].rstrip(","), "kernel": str(run.kernel), "panel": panel,
        "workload": f"S = {run.seq_len or 0:,}, {run.world_size} ranks", "predicted": short(predicted), "measured": short(measured),
        "error": short(predicted / measured - 1, 3),
    }  # fmt: skip
