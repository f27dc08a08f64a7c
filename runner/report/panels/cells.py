"""Charts with a row for each shape or variant."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import altair as alt

from runner.report.charts import Panel, Row, few, place, point, several, short, timed, varying
from runner.report.drawing import COLORS, QUIET, STEP, panel, tips
from runner.report.labels import labels
from runner.report.runs import Run
from runner.report.tables import rate_title

MOST_SHAPES, MOST_LABELS = 40, 30
KERNELS = (
    "{} of each kernel; the darker, the nearer to the fastest kernel of that shape. An empty cell: not run, or refused by the "
    "kernel."
)
ERRORS = (
    "Relative L2 error against the reference, of the run with the largest error; thin lines reach from the least to the "
    "largest of a variant's runs. The grey tick is one local call of the same kernel on the same inputs: a point far right of its "
    "tick loses accuracy by the way it is split. A red cross did not pass its check."
)


def kernels(runs: Sequence[Run], which: str) -> list[Panel]:
    """A heat map of the rate of each kernel at each shape, where several kernels were asked for by name at several shapes; a
    panel for each variant and its options."""
    runs = [run for run in timed(runs) if run.asked_kernel == run.kernel]
    named = labels(runs, without={"asked_kernel"})
    keys = sorted(varying(runs), key=lambda key: key == "seq_len")  # lengths of a shape beneath each other
    rows = [point(run, named[run], named[run], which, shape=place(run, keys)) for run in runs]
    rows = several(several(rows, "kernel", "label", "shape"), "shape", "label")
    shapes, left_out = few([*dict.fromkeys(row["shape"] for row in rows)], MOST_SHAPES, "shapes")
    rows = [row for row in rows if row["shape"] in shapes]
    if not rows:
        return []
    names = sorted({row["kernel"] for row in rows})
    base = alt.Chart(alt.Data(values=rows)).encode(
        x=alt.X("kernel:N", title=None, axis=alt.Axis(orient="top", labelAngle=0)),
        y=alt.Y("shape:N", title=None, sort=shapes),
        tooltip=tips("shape kernel label tflops time share"),
    )
    base = base.transform_joinaggregate(fastest="min(time)", groupby=["label", "shape"])
    base = base.transform_calculate(share="datum.fastest / datum.time")
    scale = alt.Scale(domain=[0, 1], range=["#f4f7fb", "#9dc1ee", "#1d5fbf"])
    cells = base.mark_rect(stroke="#fff").encode(color=alt.Color("share:Q", scale=scale, legend=None))
    # cells have the same colours on light and dark pages
    ink = alt.condition("datum.share > 0.75", alt.value("#fff"), alt.value("#1f2328"))
    text = base.mark_text(fontSize=12).encode(text=alt.Text("tflops:Q", format=".3~r"), color=ink)
    size, notes = {"width": 92 * len(names), "height": alt.Step(22)}, [KERNELS.format(rate_title(runs)), left_out]
    return [panel("kernels", "Kernels by shape", notes, cells + text, rows, size)]


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
                    "ratio": short(error.ratio_to_local, 3), "passed": check.passed is not False, "seq_len": run.seq_len,
                    "ranks": run.world_size,
                })  # fmt: skip
    rows = [
        max(group, key=lambda row: (not row["passed"], row["error"])) | {"least": min(row["error"] for row in group)}
        for group in groups.values()
    ]
    worst = list(dict.fromkeys(row["label"] for row in sorted(rows, key=lambda row: -row["error"])))
    if len(worst) < 2:
        return []
    note = f"The {MOST_LABELS} of {len(worst)} variants with the largest errors." if len(worst) > MOST_LABELS else ""
    rows = [row for row in rows if row["label"] in worst[:MOST_LABELS]]
    scale, axis = alt.Scale(type="log", nice=False, padding=12), alt.Axis(format="~e")
    base = alt.Chart(alt.Data(values=rows)).encode(
        x=alt.X("error:Q", title="relative L2 error", scale=scale, axis=axis),
        y=alt.Y("label:N", title=None, sort=list(dict.fromkeys(row["label"] for row in rows))),
        tooltip=tips("label error local ratio seq_len ranks"),
    )
    local = base.mark_tick(color=QUIET, thickness=2, size=16).encode(x=alt.X("local:Q", title="relative L2 error"))
    spread = base.mark_rule(strokeWidth=1.5, opacity=0.6, color=QUIET).encode(x2="least:Q")
    points = base.mark_point(filled=True, size=60, opacity=1).encode(
        shape=alt.condition("datum.passed", alt.value("circle"), alt.value("cross")),
        color=alt.condition("datum.passed", alt.value(COLORS[0]), alt.value(COLORS[3])),
    )
    size = {"width": 300, "height": alt.Step(STEP)}
    return [panel("errors", "Errors by tensor", [ERRORS, note], local + spread + points, rows, size)]
