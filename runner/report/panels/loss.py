"""Loss curves of trained models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import altair as alt

from runner.report.charts import Axes
from runner.report.labels import labels
from runner.report.panels.panel import Panel
from runner.report.runs import FACTS, Run
from runner.report.table import fact

MOST_LINES = 6  # of one panel
MOST_STEPS = 200  # of one line; longer curves keep every n-th step and the last


def draw(runs: Sequence[Run], which: str = "total") -> list[Panel]:
    """The loss of every training step, a line for each label and workload, a facet for each model; none where no model
    was trained for two steps."""
    trained = [run for run in runs if run.ok and run.result.model and len(run.result.model.loss_curve) > 1]
    if not trained:
        return []
    rows = _rows(trained)
    many = len({row["line"] for row in rows}) > MOST_LINES
    facet = "line" if many else "model"
    facets = list(dict.fromkeys(row[facet] for row in rows))
    tooltip = [alt.Tooltip("line:N", title="run"), alt.Tooltip("model:N"), alt.Tooltip("step:Q")]
    tooltip += [alt.Tooltip("loss:Q", format=".5g")]
    color = alt.Color(
        "model:N" if many else "line:N", title=None, sort=list(dict.fromkeys(row["line"] for row in rows))
    )
    dash = alt.StrokeDash("model:N" if many else "line:N", legend=None)
    chart: Any = alt.Chart(alt.Data(values=rows)).encode(
        x=alt.X("step:Q", title="training step", axis=alt.Axis(tickMinStep=1, grid=False)),
        y=alt.Y("loss:Q", title="loss", scale=alt.Scale(zero=False)),
        color=color,
        strokeDash=dash,
        tooltip=tooltip,
    )
    chart = chart.mark_line(point=len(rows) <= 400)
    if len(facets) > 1:
        chart = chart.properties(width=300, height=180).facet(
            alt.Facet(f"{facet}:N", title=None, sort=facets), columns=2
        )
        chart = chart.resolve_scale(y="independent")
    else:
        chart = chart.properties(width=560, height=300)
    note = "Loss of every training step; variants compute the same function, so their curves should lie on each other."
    return [Panel("loss", "Loss", note, chart.to_dict())]


def _rows(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """A row for each step that is kept of each label and workload; of several runs of one, the first."""
    named, varying = labels(runs), Axes.of(runs)
    keys = [key for key in (*varying.panel, varying.over) if key is not None and key != "model"]
    found: dict[tuple[str, str], list[float]] = {}
    for run in runs:
        assert run.result.model is not None
        where = [f"{FACTS[key]} {fact(run, key) or 'none'}" for key in keys]
        line = ", ".join(filter(None, [named[run], *where]))
        found.setdefault((line, str(run.model)), run.result.model.loss_curve)
    return [
        {"line": line, "model": model, "step": step + 1, "loss": round(loss, 6)}
        for (line, model), curve in found.items()
        for step, loss in enumerate(curve)
        if step % -(-len(curve) // MOST_STEPS) == 0 or step == len(curve) - 1
    ]
