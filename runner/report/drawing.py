"""Draw charts with altair. One definition of a chart gives both the picture and the page. This module is imported only
when a chart is made, since altair is optional."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import altair as alt

from runner.environment import cache_folder
from runner.output.results import replacing, write_text
from runner.report.charts import EXTERNAL, MOST_LINES, OURS, Row

# 8192 is labelled 8K
TOKENS = (
    "datum.value >= 1048576 ? format(datum.value / 1048576, '~g') + 'M' : "
    "datum.value >= 1024 ? format(datum.value / 1024, '~g') + 'K' : format(datum.value, '~g')"
)
TITLE = r"split(datum.label, '\n')"  # of a panel, in lines
BLUE, GREY = "#4c78a8", "#bab0ac"
QUIET = "#888"  # what runs are held against: seen on light and on dark
SCALE = 2  # pixels a point
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
# ticks of a logarithmic axis: the first of these in each decade that give enough
TICKS = ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 5, 7))
ENOUGH = 4
LARGE, SMALL = {"width": 560, "height": 340}, {"width": 380, "height": 250}  # a single panel, one of several
STEP = 24  # of a bar
WIDE = 260  # labels that take a chart of the whole page
UNLIKE = 3  # panels of bars whose values differ by more have their own axes
MOST_TICKS = 12  # of an x axis that has one for each length


@dataclass(frozen=True)
class Height:
    """The y axis of lines: a field of the rows and, where it has a spread, those of its ends."""

    field: str
    title: str
    low: str = ""
    high: str = ""
    log: bool = False  # where the values differ by more than a factor of 3
    zero: bool = True
    also: str = ""  # another field that the axis must show
    format: str = ""

    def filled(self, rows: Sequence[Row]) -> list[Row]:
        """The rows; one without a spread has ends where its value is."""
        ends = [end for end in (self.low, self.high) if end]
        return [row | {end: row[self.field] for end in ends if row[end] is None} for row in rows]

    def y(self, rows: Sequence[Row], field: str | None = None) -> Any:
        """Of another field on the same axis, where one is given."""
        values = [
            row[key]
            for row in rows
            for key in (self.field, self.low, self.high, self.also)
            if key and row[key] is not None
        ]
        low, high = min(values), max(values)
        if self.log and low > 0 and high > 3 * low:
            scale, axis = logarithmic(low / 1.15, high * 1.15)
        else:
            scale, axis = alt.Scale(zero=self.zero), alt.Axis(format=self.format or alt.Undefined)
        return alt.Y(f"{field or self.field}:Q", title=self.title, scale=scale, axis=axis)


def logarithmic(low: float, high: float, format: str = "~r") -> tuple[Any, Any]:
    """A scale from low to high, and an axis with few round ticks, but enough to read it."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    found: list[float] = []
    for steps in TICKS:
        found = [float(f"{tick:.2g}") for d in decades for tick in (10.0**d * step for step in steps)]
        found = [tick for tick in found if low <= tick <= high]
        if len(found) >= ENOUGH:
            break
    else:  # less than a decade: as on a linear axis
        step = 10.0 ** math.floor(math.log10((high - low) / ENOUGH))
        step *= next(by for by in (1, 2, 5, 10) if (high - low) / (step * by) <= 2 * ENOUGH)
        found = [float(f"{step * n:.4g}") for n in range(math.ceil(low / step), math.floor(high / step) + 1)]
    axis = alt.Axis(values=found, format=format, labelOverlap=True)
    return alt.Scale(type="log", domain=[low, high], nice=False), axis


def doubling(rows: Sequence[Row], field: str, title: str, tokens: bool) -> Any:
    """An x axis where each doubling is as wide, with a tick for each value or, of many, for powers of two. tokens: 8192 is
    labelled 8K."""
    values = sorted({row[field] for row in rows})
    if len(values) > MOST_TICKS:
        values = [2**i for i in range(math.ceil(math.log2(values[0])), math.floor(math.log2(values[-1])) + 1)]
    label = TOKENS if tokens else "format(datum.value, '~r')"
    axis = alt.Axis(values=values, labelExpr=label, grid=False, labelOverlap=True)
    return alt.X(f"{field}:Q", title=title, scale=alt.Scale(type="log", base=2, nice=False, padding=16), axis=axis)


def tips(*fields: tuple[str, str]) -> list[Any]:
    """What a point shows under the mouse: fields with their type, by title."""
    return [
        alt.Tooltip(field, title=title, format=".4g") if field.endswith(":Q") else alt.Tooltip(field, title=title)
        for field, title in fields
    ]


def colored(rows: Sequence[Row]) -> Any:
    """A colour for each label, ours first, each in the order of the runs."""
    whose = {row["label"]: row["whose"] for row in rows}
    names = sorted(whose, key=lambda name: whose[name] == EXTERNAL)
    scale = alt.Scale(domain=names) if len(names) <= len(COLORS) else alt.Undefined
    return alt.Color("label:N", title=None, scale=scale, sort=None if scale is alt.Undefined else names)


def lines(
    rows: Sequence[Row],
    x: Any,
    height: Height,
    tooltip: Sequence[Any],
    *,
    dash: bool = False,
    marks: bool = True,
    alike: bool = True,
    under: Callable[[Any], Any] | None = None,
) -> Any:
    """A line for each label, dashed for external packages, a panel for each `panel`, with points (`marks`) and thin lines
    over the spread. dash: each label has a dash of its own, since lines may lie on each other. alike: as in `facets`.
    under: makes a layer below, of a chart of these rows."""
    rows = height.filled(rows)
    base = alt.Chart(alt.Data(values=rows))
    points = base.encode(x=x, y=height.y(rows), color=colored(rows), tooltip=list(tooltip))
    line = points.mark_line(strokeWidth=2)
    if dash:
        line = line.encode(strokeDash=alt.StrokeDash("label:N", legend=None))
    elif len({row["whose"] for row in rows}) > 1:
        scale = alt.Scale(domain=[OURS, EXTERNAL], range=[[1, 0], [6, 4]])
        legend = alt.Legend(symbolType="stroke", symbolSize=400, symbolStrokeColor=QUIET)
        line = line.encode(strokeDash=alt.StrokeDash("whose:N", title=None, scale=scale, legend=legend))
    layers = [*([under(base)] if under else []), line, *([points.mark_circle(size=45, opacity=1)] if marks else [])]
    if height.low:
        ends = points.encode(y=height.y(rows, height.low), y2=height.high)
        layers.append(ends.mark_rule(strokeWidth=1.5, opacity=0.6))
    return facets(alt.layer(*layers), rows, LARGE, SMALL, alike=alike, legend=(row["label"] for row in rows))


def bars(rows: Sequence[Row], height: Height, tooltip: Sequence[Any], best_is_low: bool) -> Any:
    """A bar for each label, the best on top, with its number and a thin line over the spread; a panel for each `panel`."""
    panels = list(dict.fromkeys(row["panel"] for row in rows))
    rows = sorted(height.filled(rows), key=lambda row: row[height.field] * (1 if best_is_low else -1))
    # each panel has an order of its own, so a bar's place is named by its panel, too
    rows = [row | {"bar": f"{row['panel']}\t{row['label']}"} for row in rows]
    axis = alt.Axis(labelExpr=r"split(datum.label, '\t')[1]")
    y = alt.Y("bar:N", title=None, sort=list(dict.fromkeys(row["bar"] for row in rows)), axis=axis)
    base = alt.Chart(alt.Data(values=rows)).encode(y=y, tooltip=list(tooltip))

    one = len({row["panel"] for row in rows}) == 1
    room = 1.1 * max(row[height.high] for row in rows)  # for the numbers
    scale = alt.Scale(domain=[0, room], nice=False) if one else alt.Scale(zero=True)

    def x(field: str) -> Any:
        return alt.X(f"{field}:Q", title=height.title, scale=scale, stack=None, axis=alt.Axis(tickCount=6))

    drawn = base.mark_bar(color=BLUE).encode(x=x(height.field))
    if len({row["whose"] for row in rows}) > 1:
        colors = alt.Scale(domain=[OURS, EXTERNAL], range=[BLUE, GREY])
        drawn = drawn.encode(color=alt.Color("whose:N", title=None, scale=colors))
    ends = base.mark_rule(strokeWidth=2).encode(x=x(height.low), x2=height.high, color=alt.value(QUIET))
    text = base.mark_text(align="left", dx=5).encode(x=x(height.high), text=alt.Text(f"{height.field}:Q", format=".4r"))
    labels = {row["label"] for row in rows}
    drawn = alt.layer(drawn, ends, text)
    alone, each = {"width": 480, "height": STEP * len(labels)}, {"width": 380, "height": alt.Step(STEP)}
    drawn = facets(drawn, rows, alone, each, alike=False, beside=width(labels), order=panels)
    most = [max(row[height.field] for row in rows if row["panel"] == panel) for panel in {row["panel"] for row in rows}]
    return drawn.resolve_scale(x="independent", y="independent") if max(most) > UNLIKE * min(most) else drawn


def width(labels: Iterable[str]) -> int:
    """Of the longest label, about, in pixels."""
    return max((round(6.6 * len(label)) for label in labels), default=0) + 60


def facets(
    drawn: Any,
    rows: Sequence[Row],
    alone: Row,
    each: Row,
    *,
    alike: bool = True,
    beside: int = 95,
    legend: Iterable[str] = (),
    by: str = "panel",
    order: Sequence[str] = (),
) -> Any:
    """A chart of these rows with a panel for each value of `by`, in this order. alone, each: the size of a single panel, and
    of one of several. alike: the panels share their y axis. beside: pixels of what stands left of a panel; legend: its
    labels. A page makes the panels as wide as these leave room for. Where there are more labels than colours, each panel has
    a legend of its own."""
    panels = order or list(dict.fromkeys(row[by] for row in rows))
    names = set(legend)
    right = width(names) if names else 0
    if len(panels) == 1:
        return drawn.properties(**alone, usermeta={"broad": max(beside, right) > WIDE})
    drawn = drawn.properties(**each).facet(
        alt.Facet(f"{by}:N", title=None, sort=panels, header=alt.Header(labelExpr=TITLE)), columns=2
    )
    drawn = drawn.resolve_axis(x="independent", y="independent")
    scales = {"y": "shared" if alike else "independent"}
    if len(names) > len(COLORS):
        drawn = drawn.resolve_legend(color="independent")
        scales["color"] = "independent"
        beside, right = beside + right, 0
    drawn = drawn.resolve_scale(**scales)  # a second call would replace the first
    return drawn.properties(usermeta={"beside": beside, "legend": right})


def colored_by(
    rows: Sequence[Row], keys: Iterable[str] = ("label", "variant", "kernel")
) -> tuple[dict[str, Any], list[str]]:
    """The colour of points, and the legend's labels: by the first of these fields that has few values; one colour where all
    have too many."""
    for key in keys:
        names = list(dict.fromkeys(row[key] for row in rows))
        if 1 < len(names) <= MOST_LINES:
            return {"color": alt.Color(f"{key}:N", title=None, sort=names, scale=alt.Scale(domain=names))}, names
    return {"color": alt.value(BLUE)}, []


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
