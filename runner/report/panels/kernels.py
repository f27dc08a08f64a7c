"""Which kernel is the fastest for which shape: a heat map."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

import altair as alt

from runner.report.charts import Row, line, place, short
from runner.report.comparison import comparable
from runner.report.drawing import facets, tips, width
from runner.report.labels import labels
from runner.report.panels.panel import Panel
from runner.report.runs import WORKLOAD, Run
from runner.report.tables import rate_title

MOST_SHAPES = 40
LEAST = 2  # kernels of one shape, and such shapes
CELL = {"width": 92, "height": 22}  # points


def draw(runs: Sequence[Run], which: str = "total") -> list[Panel]:
    """The rate of each kernel at each shape, where several kernels were asked for by name at several shapes; a panel for
    each variant and its options."""
    rows = _rows([run for run in comparable(runs) if run.ok], which)
    if not rows:
        return []
    shapes = list(dict.fromkeys(row["shape"] for row in rows))
    note = ""
    if len(shapes) > MOST_SHAPES:
        kept = {shapes[i * len(shapes) // MOST_SHAPES] for i in range(MOST_SHAPES)}
        note = f"{MOST_SHAPES} of {len(shapes)} shapes, evenly picked; the table below has all runs."
        rows, shapes = [row for row in rows if row["shape"] in kept], [shape for shape in shapes if shape in kept]
    names = sorted({row["kernel"] for row in rows})
    rate = rows[0]["unit"]
    tooltip = tips(
        ("shape:N", "shape"), ("kernel:N", "kernel"), ("label:N", "attention"), ("tflops:Q", rate), ("time:Q", "ms"),
        ("share:Q", "of the fastest"),
    )  # fmt: skip
    base = alt.Chart(alt.Data(values=rows)).encode(
        x=alt.X("kernel:N", title=None, sort=names, axis=alt.Axis(orient="top", labelAngle=0)),
        y=alt.Y("shape:N", title=None, sort=shapes),
        tooltip=tooltip,
    )
    scale = alt.Scale(domain=[0, 1], range=["#f4f7fb", "#9dc1ee", "#1d5fbf"])
    cells = base.mark_rect(stroke="#fff").encode(color=alt.Color("share:Q", scale=scale, legend=None))
    # cells have the same colours on light and dark pages
    ink = alt.condition("datum.share > 0.75", alt.value("#fff"), alt.value("#1f2328"))
    text = base.mark_text(fontSize=12).encode(text=alt.Text("tflops:Q", format=".3~r"), color=ink)
    labelled = list(dict.fromkeys(row["label"] for row in rows))
    size = {"width": CELL["width"] * len(names), "height": CELL["height"] * len(shapes)}
    chart = facets(
        alt.layer(cells, text),
        rows,
        size,
        size,
        beside=width(shapes),
        by="label",
        order=labelled,
    )
    said = (
        f"{rate[:1].upper()}{rate[1:]} of each kernel; the darker, the nearer to the fastest kernel of that shape. "
        "An empty cell: not run, or refused by the kernel."
    )
    return [Panel("kernels", "Kernels by shape", " ".join(filter(None, [said, note])), chart.to_dict(validate=False))]


def _rows(runs: Sequence[Run], which: str) -> list[Row]:
    """A row for each label, shape and kernel: the fastest of its runs."""
    runs = [run for run in runs if run.asked_kernel == run.kernel]
    if not runs:
        return []
    named = labels(runs, without={"asked_kernel"})
    keys = [key for key in WORKLOAD if len({getattr(run, key) for run in runs}) > 1]
    keys = sorted(keys, key=lambda key: key == "seq_len")  # lengths of a shape beneath each other
    found: dict[tuple[str, str, str], Row] = {}
    for run in runs:
        measured = which if which in run.passes else "forward"
        metrics = run.result.metrics
        if metrics is None:
            continue
        row = line(run, named[run], ())
        row |= {"kernel": str(run.kernel), "shape": place(run, keys), "time": short(run.passes[measured].median)}
        row |= {"tflops": short(metrics.passes[measured].tflops_per_device), "unit": rate_title(runs)}
        key = (row["label"], row["shape"], row["kernel"])
        if key not in found or row["time"] < found[key]["time"]:
            found[key] = row
    kernels = Counter((label, shape) for label, shape, _ in found)
    shapes = Counter(label for (label, _), n in kernels.items() if n >= LEAST)
    rows = [
        row for (label, shape, _), row in found.items() if shapes[label] >= LEAST and kernels[label, shape] >= LEAST
    ]
    fastest: dict[tuple[str, str], float] = defaultdict(lambda: float("inf"))
    for row in rows:
        key_of = (row["label"], row["shape"])
        fastest[key_of] = min(fastest[key_of], row["time"])
    return [row | {"share": short(fastest[row["label"], row["shape"]] / row["time"], 4)} for row in rows]
