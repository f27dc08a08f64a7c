"""Errors of the tensors that a run checked, a row for each variant."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import altair as alt

from runner.report.charts import Panel, Row, short
from runner.report.drawing import COLORS, QUIET, STEP, panel, tips
from runner.report.labels import labels
from runner.report.runs import Run

MOST_LABELS = 30
ERRORS = (
    "Relative L2 error against the reference, of the run with the largest error; thin lines reach from the least to the "
    "largest of a variant's runs. The grey tick is one local call of the same kernel on the same inputs: a point far right of its "
    "tick loses accuracy by the way it is split. A red cross did not pass its check. Of many variants the {} with the largest errors."
)


def errors(runs: Sequence[Run], which: str) -> list[Panel]:
    """A panel for each tensor, where several labels were checked: of each label the run with the largest error."""
    checks = {run: run.result.correctness for run in runs if run.attention and run.result.correctness}
    named = labels(list(checks))
    groups: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for run, check in checks.items():
        for tensor in ("out", "dq", "dk", "dv"):
            if (error := check.tensors.get(tensor)) and error.rel_l2:
                groups[tensor, named[run]].append({
                    "label": named[run], "panel": tensor, "error": short(error.rel_l2, 3), "local": short(error.local_rel_l2, 3),
                    "passed": check.passed is not False, "seq_len": run.seq_len,
                    "ranks": run.world_size,
                })  # fmt: skip
    rows = [
        max(group, key=lambda row: (not row["passed"], row["error"])) | {"least": min(row["error"] for row in group)}
        for group in groups.values()
    ]
    worst = list(dict.fromkeys(row["label"] for row in sorted(rows, key=lambda row: -row["error"])))
    if len(worst) < 2:
        return []
    rows = [row for row in rows if row["label"] in worst[:MOST_LABELS]]
    scale, axis = alt.Scale(type="log", nice=False, padding=12), alt.Axis(format="~e")
    base = alt.Chart(alt.Data(values=rows)).encode(
        x=alt.X("error:Q", title="relative L2 error", scale=scale, axis=axis),
        y=alt.Y("label:N", title=None, sort=list(dict.fromkeys(row["label"] for row in rows))),
        tooltip=tips("label error local seq_len ranks"),
    )
    local = base.mark_tick(color=QUIET, thickness=2, size=16).encode(x=alt.X("local:Q", title="relative L2 error"))
    spread = base.mark_rule(strokeWidth=1.5, opacity=0.6, color=QUIET).encode(x2="least:Q")
    points = base.mark_point(filled=True, size=60, opacity=1).encode(
        shape=alt.condition("datum.passed", alt.value("circle"), alt.value("cross")),
        color=alt.condition("datum.passed", alt.value(COLORS[0]), alt.value(COLORS[3])),
    )
    size = {"width": 300, "height": alt.Step(STEP)}
    return [panel("errors", "Errors by tensor", [ERRORS.format(MOST_LABELS)], local + spread + points, rows, size)]
