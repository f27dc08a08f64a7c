"""The charts of a report. One definition of each gives the picture and the page; altair and vl-convert are imported
when the first one is made."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runner.output.results import replacing
from runner.report.comparison import comparable
from runner.report.labels import labels
from runner.report.runs import BACK_TO_BACK, FACTS, WORKLOAD, Run
from runner.report.scaling import scaling
from runner.report.table import fact
from runner.report.tables import rate_title

KINDS = {
    "time": "Time of a step",
    "tflops": "Rate",
    "efficiency": "Efficiency against one device",
}
OVER = {"seq_len": "sequence length, tokens", "world_size": "world size, ranks"}
# 8192 is 8K: whole units only where they are
TOKENS = (
    "datum.value >= 1048576 ? format(datum.value / 1048576, '~g') + 'M' : "
    "datum.value >= 1024 ? format(datum.value / 1024, '~g') + 'K' : format(datum.value, '~g')"
)
OURS, EXTERNAL = "ours", "external"
SCALE = 2  # pixels a point


def missing() -> str | None:
    """Why there can be no charts here, and the way out, in a line; or None."""
    names = {"altair": "altair", "vl_convert": "vl-convert-python"}
    absent = [package for module, package in names.items() if importlib.util.find_spec(module) is None]
    return f"no charts without {' and '.join(absent)}: pip install -e '.[report]' in a checkout" if absent else None


@dataclass(frozen=True)
class Axes:
    """What a chart of these runs is over: one of OVER, or None where little is done at several of its values and bars
    do; and the rest of the workload that varies, a panel each."""

    over: str | None
    panel: tuple[str, ...]
    weak: int | None = None  # tokens a rank, where all have the same

    @staticmethod
    def of(runs: Sequence[Run]) -> Axes:
        varying = [key for key in WORKLOAD if len({getattr(run, key) for run in runs}) > 1]
        shares = {(run.seq_len or 0) / (run.world_size or 1) for run in runs}
        if set(OVER) <= set(varying) and len(shares) == 1:
            return Axes("world_size", tuple(key for key in varying if key not in OVER), int(shares.pop()))
        named = labels(runs)

        def lines(key: str) -> float:
            """How many of what is otherwise the same are at several values of it, as a share."""
            seen: dict[tuple[Any, ...], set[Any]] = {}
            for run in runs:
                rest = tuple(getattr(run, other) for other in varying if other != key)
                seen.setdefault((named[run], *rest), set()).add(getattr(run, key))
            return sum(len(values) > 1 for values in seen.values()) / len(seen)

        over = max((key for key in OVER if key in varying), key=lines, default=None)
        if over is not None and lines(over) < 0.5:
            over = None
        return Axes(over, tuple(key for key in varying if key != over))


def points(runs: Sequence[Run], axes: Axes, which: str = "total") -> list[dict[str, Any]]:
    """A row a run that is ok, as the charts draw it; of a run that has a forward only, that."""
    named, against = labels(runs), scaling(runs)
    rows = []
    for run in runs:
        taken = which if which in run.passes else "forward"
        if not run.ok:
            continue
        panel = [f"{FACTS[key]} {fact(run, key) or 'none'}" for key in axes.panel]
        assert run.result.metrics is not None  # a result with times has them
        found, metrics = run.passes[taken], run.result.metrics.passes[taken]
        rows.append({
            "label": named[run], "whose": EXTERNAL if run.external else OURS, "panel": ", ".join(panel), "pass": taken,
            "over": getattr(run, axes.over) if axes.over else None, "time": found.median, "p10": found.p10,
            "p90": found.p90, "tflops": metrics.tflops_per_device,
            "efficiency": against[run].efficiency if run in against else None,
            "kernel": run.kernel,
        })  # fmt: skip
    return rows


def charts(runs: Sequence[Run], which: str = "total") -> dict[str, Any]:
    """The charts that these runs have something for, by their kind in KINDS. They are of samples."""
    runs = comparable(runs)
    timed = [run for run in runs if run.ok]
    if not timed or which == BACK_TO_BACK:
        return {}
    axes = Axes.of(timed)
    rows = points(runs, axes, which)
    made = {kind: _chart(rows, kind, axes, rate_title(timed)) for kind in ("time", "tflops")}
    scaled = [row for row in rows if row["efficiency"] is not None]
    if axes.over == "world_size" and which == "total" and len({row["over"] for row in scaled}) > 1:
        made["efficiency"] = _chart(scaled, "efficiency", axes, rate_title(timed))
    return made


def _chart(rows: list[dict[str, Any]], kind: str, axes: Axes, rate_of: str) -> Any:
    import altair as alt

    passes = {row["pass"] for row in rows}
    step = passes.pop().replace("total", "forward and backward") if len(passes) == 1 else "a step"
    title = {"time": f"{step}, ms", "tflops": f"{step}, {rate_of}", "efficiency": "efficiency"}[kind]
    base = alt.Chart(alt.Data(values=rows)).encode(
        tooltip=[
            alt.Tooltip("label:N", title="attention"), alt.Tooltip("kernel:N"),
            alt.Tooltip("time:Q", title="ms", format=".4g"), alt.Tooltip("p10:Q", title="p10 ms", format=".4g"),
            alt.Tooltip("p90:Q", title="p90 ms", format=".4g"),
            alt.Tooltip("tflops:Q", title=rate_of, format=".4g"),
        ]
    )  # fmt: skip
    drawn = _bars(base, rows, kind, title) if axes.over is None else _lines(base, rows, kind, title, axes)
    panels = list(dict.fromkeys(row["panel"] for row in rows))
    if len(panels) > 1:
        size = {"width": 380, "height": 250} if axes.over else {"width": 380}
        drawn = drawn.properties(**size).facet(alt.Facet("panel:N", title=None, sort=panels), columns=2)
        drawn = drawn.resolve_axis(x="independent", y="independent")
        drawn = drawn.resolve_scale(y="shared" if axes.over else "independent")
    return (
        drawn.configure_legend(labelLimit=0, symbolStrokeWidth=2, symbolSize=120)
        .configure_axis(labelLimit=0, labelFontSize=12, titleFontSize=12, titleFontWeight="normal", gridOpacity=0.5)
        .configure_view(stroke=None)
        .configure_header(labelFontSize=13, labelFontWeight="bold", labelLimit=0)
    )


def _color(rows: list[dict[str, Any]]) -> Any:
    import altair as alt

    whose = {row["label"]: row["whose"] for row in rows}
    names = sorted(whose, key=lambda name: whose[name] == EXTERNAL)  # ours first, each in the order of the runs
    scale = alt.Scale(domain=names, scheme="tableau10" if len(names) <= 10 else "tableau20")
    return alt.Color("label:N", title=None, scale=scale, sort=names)


def _lines(base: Any, rows: list[dict[str, Any]], kind: str, title: str, axes: Axes) -> Any:
    import altair as alt

    assert axes.over is not None
    over = OVER[axes.over] + (f" ({axes.weak:,} tokens each)" if axes.weak else "")
    label = TOKENS if axes.over == "seq_len" else "format(datum.value, '~r')"
    axis = alt.Axis(values=sorted({row["over"] for row in rows}), labelExpr=label, grid=False)
    x = alt.X("over:Q", title=over, scale=alt.Scale(type="log", base=2, nice=False, padding=16), axis=axis)
    at = base.encode(x=x, y=_height(rows, kind, title), color=_color(rows))
    line = at.mark_line(strokeWidth=2)
    if len({row["whose"] for row in rows}) > 1:
        dash = alt.Scale(domain=[OURS, EXTERNAL], range=[[1, 0], [6, 4]])
        legend = alt.Legend(symbolType="stroke", symbolSize=400, symbolStrokeColor="#555")
        line = line.encode(strokeDash=alt.StrokeDash("whose:N", title=None, scale=dash, legend=legend))
    return alt.layer(line, at.mark_circle(size=45, opacity=1)).properties(width=560, height=340)


def _height(rows: list[dict[str, Any]], kind: str, title: str) -> Any:
    """From zero, but times of different magnitude by their logarithm, marked at 1, 2, 5, 10 and so on."""
    import altair as alt

    low, high = (pick(row[kind] for row in rows) for pick in (min, max))
    if kind == "time" and high > 3 * low:
        low, high = low / 1.15, high * 1.15
        decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)))
        ticks = [t for d in decades for t in (10.0**d, 2 * 10.0**d, 5 * 10.0**d) if low <= t <= high]
        scale = alt.Scale(type="log", domain=[low, high], nice=False)
        return alt.Y(f"{kind}:Q", title=title, scale=scale, axis=alt.Axis(values=ticks, format="~r"))
    axis = alt.Axis(format="%") if kind == "efficiency" else alt.Axis()
    return alt.Y(f"{kind}:Q", title=title, scale=alt.Scale(zero=True), axis=axis)


def _bars(base: Any, rows: list[dict[str, Any]], kind: str, title: str) -> Any:
    """The best on top."""
    import altair as alt

    order = alt.EncodingSortField(kind, order="ascending" if kind == "time" else "descending")
    x = alt.X(f"{kind}:Q", title=title, scale=alt.Scale(zero=True))
    y = alt.Y("label:N", title=None, sort=order)
    whose = alt.Color("whose:N", title=None, scale=alt.Scale(domain=[OURS, EXTERNAL], range=["#4c78a8", "#bab0ac"]))
    both = len({row["whose"] for row in rows}) > 1
    bars = base.mark_bar(color="#4c78a8").encode(x=x, y=y, **({"color": whose} if both else {}))
    text = base.mark_text(align="left", dx=4).encode(x=x, y=y, text=alt.Text(f"{kind}:Q", format=".4r"))
    return alt.layer(bars, text).properties(width=480, height=alt.Step(24))


def write_png(chart: Any, path: Path) -> None:
    """Write a chart as a PNG; the file appears whole or not at all."""
    with replacing(path) as scratch:
        chart.save(str(scratch), format="png", scale_factor=SCALE)


def bundle() -> str:
    """The JavaScript that draws the charts, all of it, so that a page needs no network."""
    import vl_convert

    return vl_convert.javascript_bundle(snippet=None)  # type: ignore[arg-type]
