"""Loss curves of trained models."""

from __future__ import annotations

from collections.abc import Sequence

import altair as alt

from runner.report.charts import Axes, Row, joined, line, place, short, shown
from runner.report.drawing import Height, lines, tips
from runner.report.labels import labels
from runner.report.panels.panel import Panel
from runner.report.runs import Run

MOST_STEPS = 200  # of one line; longer curves keep every n-th step and the last


def draw(runs: Sequence[Run], which: str = "total") -> list[Panel]:
    """The loss of every training step, a line for each label and workload, a panel for each model; none where no model
    was trained for two steps."""
    trained = [run for run in runs if run.ok and run.result.model and len(run.result.model.loss_curve) > 1]
    if not trained:
        return []
    kept = shown(_rows(trained), "step")
    x = alt.X("step:Q", title="training step", axis=alt.Axis(tickMinStep=1, grid=False))
    tooltip = tips(("label:N", "run"), ("panel:N", "model"), ("step:Q", "step"), ("loss:Q", "loss"))
    height = Height("loss", "loss", zero=False)
    chart = lines(kept.rows, x, height, tooltip, dash=True, marks=len(kept.rows) <= 400, alike=False)
    note = "Loss of every training step; variants compute the same function, so their curves should lie on each other."
    return [Panel("loss", "Loss", " ".join(filter(None, [note, kept.note])), chart.to_dict(validate=False))]


def _rows(runs: Sequence[Run]) -> list[Row]:
    """A row for each step that is kept of each label and workload; of several runs of one, the first."""
    named, varying = labels(runs), Axes.of(runs)
    keys = [key for key in (*varying.panel, varying.over) if key is not None and key != "model"]
    found: dict[tuple[str, str], tuple[Row, list[float]]] = {}
    for run in runs:
        assert run.result.model is not None
        about = line(run, joined(named[run], place(run, keys)), ["model"])
        found.setdefault((about["label"], about["panel"]), (about, run.result.model.loss_curve))
    one = len({panel for _, panel in found}) == 1
    return [
        about | {"panel": "" if one else about["panel"], "step": step + 1, "loss": short(loss, 7)}
        for about, curve in found.values()
        for step, loss in enumerate(curve)
        if step % -(-len(curve) // MOST_STEPS) == 0 or step == len(curve) - 1
    ]
