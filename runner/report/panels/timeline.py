"""What the ranks spend their time on, and when: the phases of each rank, and one iteration on one clock."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import altair as alt

from runner.report.charts import Panel, Row
from runner.report.drawing import QUIET, panel, tips
from runner.report.panels.recorded import (
    BESIDE,
    COLORS,
    WAITS,
    Recorded,
    chosen,
    coarser,
    spent,
    timeline,
)
from runner.report.runs import Run

FINEST = 1000  # bars shorter than this part of the longest iteration are drawn with their neighbours
OF_RANKS = (
    "{} Of each run the iteration whose time is the median, all passes. A rank that ends a pass before the slowest waits for "
    "other ranks; other is CPU launch overhead and gaps."
)
ONE_CLOCK = (
    "{} Of each run the iteration whose time is the median, all ranks on one clock{}; the pause before a pass, in which the ranks are "
    "aligned, is cut out. Where a lane is empty: CPU launch overhead and gaps."
)
CLOCKS = " (aligned before each pass, to some {:.2g} µs)"


def colored(rows: Sequence[Row]) -> Any:
    """The colours of the groups that the rows have."""
    used = {row.get("group") for row in rows}
    colors = {group: color for group, color in COLORS.items() if group in used}
    scale = alt.Scale(domain=[*colors], range=[*colors.values()])
    return alt.Color("group:N", title=None, sort=None, scale=scale)


def phases(runs: Sequence[Run], which: str) -> list[Panel]:
    """A bar for each rank, of the time of each group of phases, a facet for each run; none without phases of several
    ranks."""
    recorded, rule = chosen(runs, which)
    rows = [row for run in recorded for row in spent(run)]
    if not rows:
        return []
    chart = alt.Chart(alt.Data(values=rows)).mark_bar()
    chart = chart.transform_calculate(order=f"indexof({list(COLORS)}, datum.group)").encode(
        x=alt.X("ms:Q", title="ms per iteration", stack="zero"),
        y=alt.Y("rank:O", title="rank"),
        color=colored(rows),
        order="order:Q",
        tooltip=tips("run rank pass group ms"),
    )
    size, notes = {"width": 300, "height": alt.Step(22)}, [OF_RANKS.format(rule)]
    return [panel("phases", "Phases of each rank", notes, chart, rows, size, by="run")]


def one_iteration(runs: Sequence[Run], which: str) -> list[Panel]:
    """One iteration of some runs, a facet for each, in a row of the page; none where no phase has a begin and an end."""
    recorded, rule = chosen(runs, which)
    recorded = [run for run in recorded if run.placed]
    if not recorded:
        return []
    rows: list[Row] = []
    for run in recorded:
        bars, passes = timeline(run)
        least = max(bar["stop"] for bar in bars) / FINEST
        # what computes is drawn upon the waits
        ordered = sorted(coarser(bars, least), key=lambda bar: bar["group"] not in WAITS)
        rows += [{"run": run.label, **bar} for bar in ordered]
        rows += [{"run": run.label, "pass": name, "start": round(begin, 5)} for name, begin in passes.items()]
    lanes = sorted({row["lane"] for row in rows if "lane" in row}, key=lambda name: (int(name.split()[1]), name))
    x = alt.X("start:Q", title="ms since the iteration began", scale=alt.Scale(nice=False))
    base = alt.Chart(alt.Data(values=rows)).encode(x=x)
    drawn = base.transform_filter("datum.stop").transform_calculate(ms="format(datum.stop - datum.start, '.4~g')")
    drawn = drawn.encode(
        x2="stop:Q",
        y=alt.Y("lane:N", title=None, scale=alt.Scale(domain=lanes)),
        color=colored(rows),
        tooltip=tips("lane pass group phase step ms start"),
    )
    beside, begins = f"indexof({list(BESIDE)}, datum.group) >= 0", base.transform_filter("!datum.stop")
    chart: Any = alt.layer(
        drawn.transform_filter(f"!({beside})").mark_bar(),
        drawn.transform_filter(beside).mark_bar(height={"band": 0.5}),
        begins.mark_rule(strokeDash=[3, 3], color=QUIET),
        begins.mark_text(align="left", dx=3, dy=-7, color=QUIET).encode(text="pass:N", y=alt.value(0)),
    )
    size, notes = {"width": 620, "height": alt.Step(16)}, [ONE_CLOCK.format(rule, _clocks(recorded))]
    return [panel("timeline", "Timeline of one iteration", notes, chart, rows, size, by="run", columns=1)]


def _clocks(recorded: Sequence[Recorded]) -> str:
    """How far the clocks of the ranks may be apart."""
    comms = (run.run.result.comm for run in recorded)
    error = max((comm.clocks.error_ms for comm in comms if comm and comm.clocks), default=0.0)
    return CLOCKS.format(error * 1e3) if error else ""
