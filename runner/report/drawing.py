"""Draw charts with altair. One definition of a chart gives both the picture and the page. This module is imported only
when a chart is made, since altair is optional."""

from __future__ import annotations

import json
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
from runner.report.charts import MOST_LINES, Panel, Row, asset, faceted, few, thinned

# of pictures; a page merges its own into it (assets/page.js)
THEME: dict[str, Any] = json.loads(asset("theme.json"))
COLORS = THEME["range"]["category"]
BLUE, GREY = "#4c78a8", "#bab0ac"
QUIET = "#888"  # what runs are held against: seen on light and on dark
SCALE = 2  # pixels a point
LARGE, SMALL = {"width": 560, "height": 340}, {"width": 380, "height": 250}  # a single facet, one of several
STEP = 24  # of a bar
MOST_TICKS = 12  # of an x axis that has one for each length
MOST_BARS = 200
# 8192 is labelled 8K
TOKENS = (
    "datum.value >= 1048576 ? format(datum.value / 1048576, '~g') + 'M' : "
    "datum.value >= 1024 ? format(datum.value / 1024, '~g') + 'K' : format(datum.value, '~g')"
)
# the ends of a spread: p10 and p90 of a time, and what a rate would be at these
SPREAD = {"time": ("datum.p10", "datum.p90")} | {
    rate: (f"datum.{rate} * datum.time / datum.p90", f"datum.{rate} * datum.time / datum.p10")
    for rate in ("tflops", "efficiency")
}
# titles of fields under the mouse, where they are not the field's name
FIELDS = {
    "label": "attention", "panel": "workload", "time": "ms", "p10": "p10 ms", "p90": "p90 ms", "tflops": "TFLOP/s",
    "intensity": "FLOPs a byte",
}  # fmt: skip


@dataclass(frozen=True)
class Axis:
    """An axis of a field of the rows. log: logarithmic where the values differ by more than this factor. doubling: each doubling is
    as wide, with a tick for each of a few values, else for powers of two."""

    field: str
    title: str
    format: str = "~r"
    log: float = math.inf
    doubling: bool = False

    def channel(self, channel: Any, rows: Sequence[Row]) -> Any:
        """The channel alt.X or alt.Y of these rows."""
        values = sorted({row[self.field] for row in rows})
        axis, scale = alt.Axis(format=self.format), alt.Scale(zero=True)
        if self.doubling:
            scale = alt.Scale(type="log", base=2, nice=False, padding=16)
            ticks = values if len(values) <= MOST_TICKS else alt.Undefined
            axis = alt.Axis(values=ticks, labelExpr=TOKENS, grid=False, labelOverlap=True)
        elif 0 < values[0] * self.log <= values[-1]:
            scale = alt.Scale(type="log", nice=False, padding=12)
        return channel(self.field, type="quantitative", title=self.title, scale=scale, axis=axis)


def tips(fields: str) -> list[Any]:
    """What a point shows under the mouse: the fields, which are words or short numbers."""
    return [alt.Tooltip(f"{field}:N", title=FIELDS.get(field, field)) for field in fields.split()]


def external(rows: Sequence[Row], how: str) -> str:
    """The sentence that says how external packages are told from ours, where there are some."""
    return f"External packages are {how}." if any(row["external"] for row in rows) else ""


def lines(
    name: str, title: str, note: str, rows: Sequence[Row], x: Axis, y: Axis, fields: str, *, connected: bool = True
) -> list[Panel]:
    """A line for each label over the rows that have the field of `y`, dashed for external packages, with points and thin lines over their
    spread; or the points alone, where these are not connected. A click on the legend shows one label. fields: under the
    mouse. A dashed line below them leads through the `ideal` of the rows, which may have that alone."""
    kept, left_out = thinned(faceted(rows, MOST_LINES if connected else len(rows)), x.field)
    drawn = [row for row in kept if row.get(y.field) is not None]
    if not drawn:
        return []
    base = alt.Chart(alt.Data(values=kept)).encode(x=x.channel(alt.X, drawn), y=y.channel(alt.Y, drawn))
    names = list(dict.fromkeys(row["label"] for row in drawn))
    picked = alt.selection_point(fields=["label"], bind="legend")
    colors = alt.Scale(domain=names) if len(names) <= len(COLORS) else alt.Scale(domain=names, scheme="tableau20")
    runs = base.encode(
        color=alt.Color("label:N", title=None, scale=colors),
        tooltip=tips(fields),
        opacity=alt.condition(picked, alt.value(1), alt.value(0.1)),
    )
    layers = []
    if any("ideal" in row for row in kept):
        ideal = base.mark_line(color=QUIET, strokeDash=[3, 3])
        layers.append(ideal.encode(y=alt.Y("ideal:Q", title=y.title), detail="panel:N"))
    if connected:
        dash = alt.condition("datum.external", alt.value([6, 4]), alt.value([1, 0]))
        layers.append(runs.mark_line(strokeWidth=2).encode(strokeDash=dash))
        note = f"{note} {external(drawn, 'dashed')}"
        if y.field in SPREAD:
            low, high = SPREAD[y.field]
            ends = runs.mark_rule(strokeWidth=1.5).transform_calculate(low=low, high=high)
            layers.append(ends.encode(y=alt.Y("low:Q", title=y.title), y2="high:Q"))
    layers.append(runs.mark_circle(size=45).add_params(picked))
    size = SMALL if len({row["facet"] for row in drawn}) > 1 else LARGE
    return [panel(name, title, [note, left_out], alt.layer(*layers), kept, size, by="facet")]


def bars(name: str, title: str, note: str, rows: Sequence[Row], x: Axis, fields: str) -> list[Panel]:
    """A bar for each label, the best on top, with its number and a thin line over the spread; a facet for each panel, whose axes
    are its own."""
    kept, left_out = few(faceted((row for row in rows if row[x.field] is not None), MOST_BARS), MOST_BARS, "runs")
    best = alt.EncodingSortField(x.field, op="min", order="ascending" if x.field == "time" else "descending")
    base = alt.Chart(alt.Data(values=kept)).encode(y=alt.Y("label:N", title=None, sort=best), tooltip=tips(fields))
    low, high = SPREAD[x.field]
    high = f"({high} || datum.{x.field})"
    base = base.transform_calculate(low=low, high=high, room=f"1.1 * {high}")

    def over(field: str) -> Any:
        return alt.X(f"{field}:Q", title=x.title, stack=None, axis=alt.Axis(tickCount=6))

    color = alt.condition("datum.external", alt.value(GREY), alt.value(BLUE))
    drawn = base.mark_bar().encode(x=over(x.field), color=color)
    ends = base.mark_rule(strokeWidth=2).encode(x=over("low"), x2="high:Q", color=alt.value(QUIET))
    text = base.mark_text(align="left", dx=5).encode(x=over("high"), text=alt.Text(f"{x.field}:Q", format=".4r"))
    room = base.mark_point(opacity=0).encode(x=over("room"))  # for the numbers
    size, own = {"width": 380, "height": alt.Step(STEP)}, {"x": "independent", "y": "independent"}
    return [
        panel(
            name,
            title,
            [note, external(kept, "grey"), left_out],
            drawn + ends + text + room,
            kept,
            size,
            by="facet",
            scales=own,
        )
    ]


def panel(
    name: str,
    title: str,
    notes: Sequence[str],
    drawn: Any,
    rows: Sequence[Row],
    size: Row,
    *,
    by: str = "panel",
    columns: int = 2,
    scales: Row | None = None,
) -> Panel:
    """A chart of these rows with a facet for each value of `by`. size: of a facet; a page makes them as wide as there is room, and
    several columns as many as there is room for. scales: which of them the facets do not share."""
    facets = list(dict.fromkeys(row[by] for row in rows))
    chart = drawn.properties(**size)
    if len(facets) > 1:
        header = alt.Header(labelExpr=r"split(datum.label, '\n')")
        chart = chart.facet(alt.Facet(f"{by}:N", title=None, sort=facets, header=header), columns=columns)
        chart = chart.resolve_axis(x="independent", y="independent").resolve_scale(**scales or {})
    return Panel(name, title, " ".join(filter(None, notes)), chart.to_dict(validate=False))


def write_png(spec: dict[str, Any], path: Path) -> None:
    """Write a Vega-Lite chart as a PNG; the file appears whole or not at all."""
    import vl_convert

    png = vl_convert.vegalite_to_png(spec, config=THEME, scale=SCALE)
    with replacing(path) as scratch:
        scratch.write_bytes(png)


def bundle() -> str:
    """All of the JavaScript that draws the charts, so that a page needs no network. It takes seconds to make, and is
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
