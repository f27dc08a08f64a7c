"""Errors against the reference, by tensor and variant."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import altair as alt

from runner.report.charts import short
from runner.report.drawing import QUIET, STEP, facets, logarithmic, tips, width
from runner.report.labels import labels
from runner.report.panels.panel import Panel
from runner.report.runs import Run

TENSORS = ("out", "dq", "dk", "dv")
MOST_LABELS = 30
NOTE = (
    "Relative L2 error against the reference, of the run with the largest error; thin lines reach from the least to the "
    "largest of a variant's runs. The grey tick is one local call of the same kernel on the same inputs: a point far right of its "
    "tick loses accuracy by the way it is split. A red cross did not pass its check."
)


def draw(runs: Sequence[Run], which: str = "total") -> list[Panel]:
    """A panel for each tensor, where several labels were checked."""
    rows = _rows(runs)
    order = list(dict.fromkeys(row["label"] for row in rows))
    if len(order) < 2:
        return []
    note = ""
    if len(order) > MOST_LABELS:
        worst = {label: max(row["error"] for row in rows if row["label"] == label) for label in order}
        kept = set(sorted(order, key=lambda label: -worst[label])[:MOST_LABELS])
        note = f"The {MOST_LABELS} of {len(order)} variants with the largest errors."
        rows, order = [row for row in rows if row["label"] in kept], [label for label in order if label in kept]
    tensors = [tensor for tensor in TENSORS if any(row["tensor"] == tensor for row in rows)]
    values = [x for row in rows for x in (row["least"], row["error"], row["local"]) if x]
    scale, axis = logarithmic(min(values) / 1.3, max(values) * 1.3, "~e")
    x = alt.X("error:Q", title="relative L2 error", scale=scale, axis=axis)
    tooltip = tips(
        ("label:N", "attention"), ("error:Q", "relative L2"), ("local:Q", "of one local call"), ("ratio:Q", "ratio"),
        ("workload:N", "worst at"),
    )  # fmt: skip
    base = alt.Chart(alt.Data(values=rows)).encode(y=alt.Y("label:N", title=None, sort=order), x=x, tooltip=tooltip)
    local = base.mark_tick(color=QUIET, thickness=2, size=16).encode(x=alt.X("local:Q", title="relative L2 error"))
    spread = base.mark_rule(strokeWidth=1.5, opacity=0.6).encode(x2="least:Q", color=alt.value(QUIET))
    points = base.mark_point(filled=True, size=60, opacity=1).encode(
        shape=alt.Shape("passed:N", legend=None, scale=alt.Scale(domain=[True, False], range=["circle", "cross"])),
        color=alt.Color("passed:N", legend=None, scale=alt.Scale(domain=[True, False], range=["#2f6fd0", "#cf3a3a"])),
    )
    size = {"width": 300, "height": STEP * len(order)}
    chart = facets(alt.layer(local, spread, points), rows, size, size, beside=width(order), by="tensor", order=tensors)
    return [Panel("errors", "Errors by tensor", " ".join(filter(None, [NOTE, note])), chart.to_dict(validate=False))]


def _rows(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """A row for each label and tensor: its run with the largest error, and the least error."""
    checked = [run for run in runs if run.attention and run.result.correctness and run.result.correctness.tensors]
    named = labels(checked)
    found: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for run in checked:
        assert run.result.correctness is not None
        for tensor in TENSORS:
            error = run.result.correctness.tensors.get(tensor)
            if error is None or not error.rel_l2:
                continue
            found[named[run], tensor].append({
                "label": named[run], "tensor": tensor, "error": short(error.rel_l2, 3), "local": short(error.local_rel_l2, 3),
                "ratio": short(error.ratio_to_local, 3), "passed": run.result.correctness.passed is not False,
                "workload": f"S = {run.seq_len or 0:,}, {run.world_size} ranks",
            })  # fmt: skip
    return [
        max(each, key=lambda row: (not row["passed"], row["error"])) | {"least": min(row["error"] for row in each)}
        for each in found.values()
    ]
