"""Draw charts with altair. One definition of a chart gives both the picture and the page. This module is imported only
when a chart is made, since altair is optional."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import altair as alt

from runner.environment import cache_folder
from runner.output.results import replacing, write_text
from runner.report.charts import EXTERNAL, OURS, OVER, Axes, few_lines, points
from runner.report.comparison import comparable
from runner.report.runs import BACK_TO_BACK, Run
from runner.report.tables import rate_title

# 8192 is labelled 8K
TOKENS = (
    "datum.value >= 1048576 ? format(datum.value / 1048576, '~g') + 'M' : "
    "datum.value >= 1024 ? format(datum.value / 1024, '~g') + 'K' : format(datum.value, '~g')"
)
BLUE, GREY = "#4c78a8", "#bab0ac"
SCALE = 2  # pixels a point
SPREAD = {"time": ("p10", "p90"), "tflops": ("tflops_p10", "tflops_p90")}
# of pictures, as the light page's in assets/page.js; a page brings its own
COLORS = ["#2f6fd0", "#d9730d", "#1a8a4a", "#cf3a3a", "#8250df", "#0f8a93", "#bf3989", "#8a6a00"]
WORDS = {"labelLimit": 0, "titleFontWeight": "normal", "labelFontSize": 12, "titleFontSize": 12}
CONFIG: dict[str, Any] = {
    "background": "white",
    "axis": {**WORDS, "gridOpacity": 0.5},
    "legend": {**WORDS, "symbolSize": 120, "symbolStrokeWidth": 2},
    "header": {"labelFontSize": 13, "labelFontWeight": "bold", "labelLimit": 0},
    "view": {"stroke": None},
    "range": {"category": COLORS},
}


@dataclass(frozen=True)
class Chart:
    """A chart of one kind: the field `kind` of the rows, over the axes. rate: the unit of TFLOP/s."""

    rows: list[dict[str, Any]]
    kind: str
    axes: Axes
    rate: str

    @property
    def title(self) -> str:
        passes = {row["pass"] for row in self.rows}
        step = passes.pop().replace("total", "forward and backward") if len(passes) == 1 else "a step"
        return {"time": f"{step}, ms", "tflops": f"{step}, {self.rate}", "efficiency": "efficiency"}[self.kind]

    @property
    def both(self) -> bool:
        """Whether there are our variants and external packages."""
        return len({row["whose"] for row in self.rows}) > 1

    def drawn(self) -> Any:
        drawn = self._lines() if self.axes.over else self._bars()
        panels = list(dict.fromkeys(row["panel"] for row in self.rows))
        if len(panels) > 1:
            size = {"width": 380, "height": 250} if self.axes.over else {"width": 380}
            drawn = drawn.properties(**size).facet(alt.Facet("panel:N", title=None, sort=panels), columns=2)
            drawn = drawn.resolve_axis(x="independent", y="independent")
            drawn = drawn.resolve_scale(y="shared" if self.axes.over else "independent")
        return drawn

    def _base(self) -> Any:
        numbers = {"time": "ms", "p10": "p10 ms", "p90": "p90 ms", "tflops": self.rate}
        tooltip = [alt.Tooltip("label:N", title="attention"), alt.Tooltip("kernel:N")]
        tooltip += [alt.Tooltip(f"{key}:Q", title=title, format=".4g") for key, title in numbers.items()]
        return alt.Chart(alt.Data(values=self.rows)).encode(tooltip=tooltip)

    def _lines(self) -> Any:
        """A line for each label, dashed for external packages."""
        assert self.axes.over is not None
        over = OVER[self.axes.over] + (f" ({self.axes.weak:,} tokens each)" if self.axes.weak else "")
        label = TOKENS if self.axes.over == "seq_len" else "format(datum.value, '~r')"
        axis = alt.Axis(values=sorted({row["over"] for row in self.rows}), labelExpr=label, grid=False)
        x = alt.X("over:Q", title=over, scale=alt.Scale(type="log", base=2, nice=False, padding=16), axis=axis)
        base = self._base()
        points = base.encode(x=x, y=self._height(), color=self._color())
        line = points.mark_line(strokeWidth=2)
        if self.both:
            dash = alt.Scale(domain=[OURS, EXTERNAL], range=[[1, 0], [6, 4]])
            legend = alt.Legend(symbolType="stroke", symbolSize=400, symbolStrokeColor="#555")
            line = line.encode(strokeDash=alt.StrokeDash("whose:N", title=None, scale=dash, legend=legend))
        layers = [line, points.mark_circle(size=45, opacity=1)]
        if self.kind in SPREAD:
            low, high = SPREAD[self.kind]
            layers.append(points.mark_rule(strokeWidth=1.5, opacity=0.6).encode(y=self._height(low), y2=high))
        else:
            ideal = alt.YDatum(1, title=self.title)
            layers.insert(0, base.mark_rule(color="#888", strokeDash=[3, 3]).encode(y=ideal))
        return alt.layer(*layers).properties(width=560, height=340)

    def _color(self) -> Any:
        whose = {row["label"]: row["whose"] for row in self.rows}
        names = sorted(whose, key=lambda name: whose[name] == EXTERNAL)  # ours first, each in the order of the runs
        scale = alt.Scale(domain=names) if len(names) <= len(COLORS) else alt.Scale(domain=names, scheme="tableau20")
        return alt.Color("label:N", title=None, scale=scale, sort=names)

    def _height(self, field: str | None = None) -> Any:
        """Of the field, which is the kind itself if None. From zero; times that differ by more than a factor of 3 on a logarithmic scale, with ticks at 1, 2, 5, 10 and
        so on."""
        ends = SPREAD.get(self.kind, (self.kind, self.kind))
        low, high = (
            pick(row[end] or row[self.kind] for row in self.rows) for pick, end in zip((min, max), ends, strict=True)
        )
        if self.kind == "time" and high > 3 * low:
            low, high = low / 1.15, high * 1.15
            decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)))
            ticks = [t for d in decades for t in (10.0**d, 2 * 10.0**d, 5 * 10.0**d) if low <= t <= high]
            scale = alt.Scale(type="log", domain=[low, high], nice=False)
            return alt.Y(
                f"{field or self.kind}:Q", title=self.title, scale=scale, axis=alt.Axis(values=ticks, format="~r")
            )
        axis = alt.Axis(format="%") if self.kind == "efficiency" else alt.Axis()
        return alt.Y(f"{field or self.kind}:Q", title=self.title, scale=alt.Scale(zero=True), axis=axis)

    def _bars(self) -> Any:
        """A bar for each label, the best on top."""
        order = alt.EncodingSortField(self.kind, order="ascending" if self.kind == "time" else "descending")
        x = alt.X(f"{self.kind}:Q", title=self.title, scale=alt.Scale(zero=True))
        base = self._base().encode(x=x, y=alt.Y("label:N", title=None, sort=order))
        bars, text = base.mark_bar(color=BLUE), base.mark_text(align="left", dx=4)
        if self.both:
            colors = alt.Scale(domain=[OURS, EXTERNAL], range=[BLUE, GREY])
            bars = bars.encode(color=alt.Color("whose:N", title=None, scale=colors))
        text = text.encode(text=alt.Text(f"{self.kind}:Q", format=".4r"))
        return alt.layer(bars, text).properties(width=480, height=alt.Step(24))


def draw(runs: Sequence[Run], which: str = "total") -> dict[str, Any]:
    """The charts of these runs, by their kind in KINDS; empty where nothing was timed. There are none of times back to
    back, which have no samples."""
    runs = comparable(runs)
    timed = [run for run in runs if run.ok]
    if not timed or which == BACK_TO_BACK:
        return {}
    axes, rate = Axes.of(timed), rate_title(timed)
    rows = points(runs, axes, which)
    rows = few_lines(rows) if axes.over else rows
    made = {kind: Chart(rows, kind, axes, rate).drawn() for kind in ("time", "tflops")}
    scaled = [row for row in rows if row["efficiency"] is not None]
    if axes.over == "world_size" and which == "total" and len({row["over"] for row in scaled}) > 1:
        made["efficiency"] = Chart(scaled, "efficiency", axes, rate).drawn()
    return made


def write_png(spec: dict[str, Any], path: Path) -> None:
    """Write a Vega-Lite chart as a PNG; the file appears whole or not at all."""
    import vl_convert

    config = CONFIG | spec.get("config", {})
    png = vl_convert.vegalite_to_png(spec | {"config": config}, scale=SCALE)
    with replacing(path) as scratch:
        scratch.write_bytes(png)


def bundle() -> str:
    """All of the JavaScript that draws the charts, so that a page needs no network. It takes a second to make, and is
    kept for later pages."""
    import vl_convert

    kept = cache_folder() / f"vega-{version('vl-convert-python')}.js"
    try:
        return kept.read_text(encoding="utf-8")
    except OSError:
        made: str = vl_convert.javascript_bundle(snippet=None)  # type: ignore[arg-type]
    with suppress(OSError):  # a folder that cannot be written to
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_text(kept, made)
    return made
