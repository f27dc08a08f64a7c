"""Draw charts with altair. One definition of a chart gives both the picture and the page. This module is imported only
when a chart is made, since altair is optional."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import altair as alt

from runner.environment import cache_folder
from runner.output.results import replacing, write_text
from runner.report.charts import EXTERNAL, MOST_LINES, OURS, Panel, Row, few, one_panel, short, shown

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
    "axis": {**WORDS, "gridOpacity": 0.5, "labelSeparation": 6},
    "legend": {**WORDS, "symbolSize": 120, "symbolStrokeWidth": 2},
    "header": {"labelFontSize": 13, "labelFontWeight": "bold", "labelLimit": 0},
    "view": {"stroke": None},
    "range": {"category": COLORS},
}
LARGE, SMALL = {"width": 560, "height": 340}, {"width": 380, "height": 250}  # a single panel, one of several
STEP = 24  # of a bar
WIDE = 260  # labels that take a chart of the whole page
MOST_TICKS = 12  # of an x axis that has one for each length
MOST_BARS = 200
SPREAD = ("time", "tflops", "efficiency")
MOST_MARKED = 400  # points; more are lines alone
# titles of fields under the mouse, where they are not the field's name
FIELDS = {
    "label": "attention", "panel": "workload", "time": "ms", "p10": "p10 ms", "p90": "p90 ms", "tflops": "TFLOP/s",
    "intensity": "FLOPs a byte", "local": "of one local call",
}  # fmt: skip


@dataclass(frozen=True)
class Axis:
    """An axis of a field of the rows. log: logarithmic where the values differ by more than this factor. doubling: each doubling is
    as wide, with a tick for each value or, of many, powers of two."""

    field: str
    title: str
    format: str = "~r"
    log: float = math.inf
    doubling: bool = False

    def of(self, channel: Any, rows: Sequence[Row], field: str = "") -> Any:
        """The channel alt.X or alt.Y of these rows, or of another field on the same axis."""
        values = sorted({row[self.field] for row in rows})
        axis, scale = alt.Axis(format=self.format), alt.Scale(zero=True)
        if self.doubling:
            scale = alt.Scale(type="log", base=2, nice=False, padding=16)
            if len(values) > MOST_TICKS:
                values = [2**i for i in range(64) if values[0] <= 2**i <= values[-1]]
            label = TOKENS if self.field == "over" and values[-1] >= 1024 else "format(datum.value, '~r')"
            axis = alt.Axis(
                values=values,
                labelExpr=label,
                grid=False,
                labelOverlap=True,
            )
        elif 0 < values[0] * self.log <= values[-1]:
            scale = alt.Scale(type="log", nice=False, padding=12)
        return channel(f"{field or self.field}:Q", title=self.title, scale=scale, axis=axis)


def tips(fields: str) -> list[Any]:
    """What a point shows under the mouse: the fields, which are words or short numbers."""
    return [alt.Tooltip(f"{field}:N", title=FIELDS.get(field, field)) for field in fields.split()]


def colored(rows: Sequence[Row]) -> Any:
    """A colour for each label, ours first, each in the order of the runs."""
    whose = {row["label"]: row["whose"] for row in rows}
    names = sorted(whose, key=lambda name: whose[name] == EXTERNAL)
    scale = alt.Scale(domain=names) if len(names) <= len(COLORS) else alt.Undefined
    return alt.Color("label:N", title=None, scale=scale, sort=None if scale is alt.Undefined else names)


def whose(rows: Sequence[Row], channel: Any, of_ours: Any, of_external: Any, **more: Any) -> Any:
    """A channel that tells ours and external packages apart, where there are both."""
    if len({row["whose"] for row in rows}) == 1:
        return alt.Undefined
    return channel(
        "whose:N", title=None, scale=alt.Scale(domain=[OURS, EXTERNAL], range=[of_ours, of_external]), **more
    )


def spread(rows: Sequence[Row], field: str) -> list[Row]:
    """The rows that have the field, with the ends `low` and `high` of its spread: p10 and p90 of a time, and what a rate would
    be at these. What has no spread has its ends where its value is."""
    kept = []
    for row in rows:
        if (value := row[field]) is not None:
            low = high = value
            if field in SPREAD and row["p10"]:
                fast, slow = row["time"] / row["p10"], row["time"] / row["p90"]
                low, high = (row["p10"], row["p90"]) if field == "time" else (value * slow, value * fast)
            kept.append(row | {"low": short(low), "high": short(high)})
    return kept


def lines(
    name: str,
    title: str,
    note: str,
    rows: Sequence[Row],
    x: Axis,
    y: Axis,
    fields: str,
    *,
    guides: Sequence[Row] = (),
    connected: bool = True,
) -> list[Panel]:
    """A line for each label over the rows that have the field of `y`, dashed for external packages, with points and thin lines over their
    spread; or the points alone, where these are not connected. A click on the legend shows one label. fields: under the
    mouse. guides: the places of a dashed line below, of panels as those of the rows."""
    kept = [row | {"guided": row["panel"]} for row in spread(rows, y.field)]
    kept, left_out = shown(one_panel(kept, MOST_LINES) if connected else kept, x.field)
    if not kept:
        return []
    panels = {(row["guided"], row["panel"]) for row in kept}
    guides = [row | {"panel": panel, "guide": True} for row in guides for of, panel in panels if of == row["panel"]]
    base = alt.Chart(alt.Data(values=[*kept, *guides])).encode(x=x.of(alt.X, kept), y=y.of(alt.Y, kept))
    picked = alt.selection_point(fields=["label"], bind="legend")
    runs = base.transform_filter("!datum.guide").encode(
        color=colored(kept), tooltip=tips(fields), opacity=alt.condition(picked, alt.value(1), alt.value(0.1))
    )
    layers = []
    if guides:
        dashed = base.transform_filter("datum.guide").mark_line(color=QUIET, strokeDash=[3, 3])
        layers.append(dashed.encode(detail="guided:N"))
    if connected:
        legend = alt.Legend(symbolType="stroke", symbolSize=400, symbolStrokeColor=QUIET)
        dash = whose(kept, alt.StrokeDash, [1, 0], [6, 4], legend=legend)
        layers.append(runs.mark_line(strokeWidth=2).encode(strokeDash=dash))
        layers.append(runs.mark_rule(strokeWidth=1.5).encode(y=y.of(alt.Y, kept, "low"), y2="high"))
    if not connected or len(kept) <= MOST_MARKED:
        layers.append(runs.mark_circle(size=45))
    layers[-1] = layers[-1].add_params(picked)
    labels = [row["label"] for row in kept]
    size = LARGE if len({row["panel"] for row in kept}) == 1 else SMALL
    return [panel(name, title, [note, left_out], alt.layer(*layers), kept, size, legend=labels)]


def bars(name: str, title: str, note: str, rows: list[Row], x: Axis, fields: str) -> list[Panel]:
    """A bar for each label, the best on top, with its number and a thin line over the spread; a panel for each `panel`,
    whose axes are its own."""
    kept, left_out = few(one_panel(rows, MOST_BARS), MOST_BARS, "runs")
    panels = list(dict.fromkeys(row["panel"] for row in kept))
    kept = sorted(spread(kept, x.field), key=lambda row: row[x.field] * (1 if x.field == "time" else -1))
    # each panel has an order of its own, so a bar's place is named by its panel, too
    kept = [row | {"bar": f"{row['panel']}\t{row['label']}"} for row in kept]
    axis = alt.Axis(labelExpr=r"split(datum.label, '\t')[1]")
    y = alt.Y("bar:N", title=None, sort=list(dict.fromkeys(row["bar"] for row in kept)), axis=axis)
    base = alt.Chart(alt.Data(values=kept)).encode(y=y, tooltip=tips(fields))
    room = 1.1 * max(row["high"] for row in kept)  # for the numbers
    scale = alt.Scale(domainMax=room, nice=False) if len(panels) == 1 else alt.Scale()

    def over(field: str) -> Any:
        return alt.X(f"{field}:Q", title=x.title, scale=scale, stack=None, axis=alt.Axis(tickCount=6))

    drawn = base.mark_bar(color=BLUE).encode(x=over(x.field), color=whose(kept, alt.Color, BLUE, GREY))
    ends = base.mark_rule(strokeWidth=2).encode(x=over("low"), x2="high", color=alt.value(QUIET))
    text = base.mark_text(align="left", dx=5).encode(x=over("high"), text=alt.Text(f"{x.field}:Q", format=".4r"))
    labels, own = {row["label"] for row in kept}, {"x": "independent", "y": "independent"}
    size = {"width": 380, "height": STEP * len(labels) if len(panels) == 1 else alt.Step(STEP)}
    return [
        panel(
            name, title, [note, left_out], alt.layer(drawn, ends, text), kept, size,
            order=panels, beside=width(labels), scales=own,
        )
    ]  # fmt: skip


def width(labels: Iterable[str]) -> int:
    """Of the longest label, about, in pixels."""
    return max((round(6.6 * len(label)) for label in labels), default=0) + 60


def panel(
    name: str,
    title: str,
    notes: Sequence[str],
    drawn: Any,
    rows: Sequence[Row],
    size: Row,
    *,
    by: str = "panel",
    order: Sequence[str] = (),
    beside: int = 95,
    legend: Iterable[str] = (),
    scales: Row | None = None,
) -> Panel:
    """A chart of these rows with a facet for each value of `by`, in this order. size: of a facet. beside: pixels of what stands left of a facet; legend: its labels. A page makes the facets as wide as
    these leave room for. Where there are more labels than colours, each facet has a legend of its own. scales: which of them
    the facets do not share."""
    facets = order or list(dict.fromkeys(row[by] for row in rows))
    names, scales = set(legend), scales or {}
    right = width(names) if names else 0
    if len(facets) == 1:
        chart = drawn.properties(**size, usermeta={"broad": max(beside, right) > WIDE})
    else:
        chart = drawn.properties(**size).facet(
            alt.Facet(f"{by}:N", title=None, sort=facets, header=alt.Header(labelExpr=TITLE)), columns=2
        )
        chart = chart.resolve_axis(x="independent", y="independent")
        if len(names) > len(COLORS):
            chart, scales = chart.resolve_legend(color="independent"), scales | {"color": "independent"}
            beside, right = beside + right, 0
        chart = chart.resolve_scale(**scales).properties(usermeta={"beside": beside, "legend": right})
    return Panel(name, title, " ".join(filter(None, notes)), chart.to_dict(validate=False))


def write_png(spec: dict[str, Any], path: Path) -> None:
    """Write a Vega-Lite chart as a PNG; the file appears whole or not at all."""
    import vl_convert

    png = vl_convert.vegalite_to_png(spec | {"config": CONFIG}, scale=SCALE)
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
