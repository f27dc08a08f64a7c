"""What the ranks spend their time on, and when: the phases of each rank, and one iteration on one clock."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import altair as alt

from runner.report.charts import Panel, Row
from runner.report.drawing import QUIET, panel, tips
from runner.report.panels.recorded import (
    BESIDE,
    COLORS,
    COMPUTE,
    KERNELS,
    OVERLAPPED,
    WHOLE,
    Bar,
    Recorded,
    chosen,
    coarser,
    spent,
    timeline,
)
from runner.report.runs import Run

PHASES, TIMELINE = 6, 4  # runs at most
MOST_BARS = 400  # of a run's phases, and of its kernels
MOST_NAME = 60  # letters of a kernel's name
FINEST = 1000  # bars shorter than this part of the longest iteration are drawn with their neighbours
LANE = r"replace(datum.label, /{}/, '')"
OF_RANKS = (
    "{} Of each run the iteration whose time is the median, all passes. A rank that ends a pass before the slowest waits for "
    "other ranks; other is CPU launch overhead and gaps."
)
ONE_CLOCK = (
    "Of each run the iteration whose time is the median, all ranks on one clock{}; the pause before a pass, in which the ranks are "
    "aligned, is cut out. Where a lane is empty: CPU launch overhead and gaps."
)
CLOCKS = " (those of the {} before each pass, to some {:.2g} µs)"
OF_KERNELS = (
    "Kernels (on a CPU, phases) are from the trace of one iteration, another one than that of phases; each pass begins with that of "
    "the phases. There all ranks begin a pass within {:.3g} ms. Communication is overlapped while compute runs, and drawn thin "
    "upon it; nothing is drawn where no kernel runs."
)


def colored(rows: Sequence[Row], field: str) -> Any:
    """The colours of the groups that the rows have in `field`."""
    used = {row.get(field) for row in rows}
    groups = [group for group in COLORS if group in used]
    return alt.Color(
        f"{field}:N", title=None, sort=None, scale=alt.Scale(domain=groups, range=[COLORS[g] for g in groups])
    )


def phases(runs: Sequence[Run], which: str) -> list[Panel]:
    """A bar for each rank, of the time of each group of phases, a facet for each run; none without phases of several
    ranks."""
    recorded, rule = chosen(runs, which, PHASES, placed=False)
    rows = [
        {**row, "run": run.label, "rank": f"rank {row['rank']}", "ms": round(row["ms"], 5)}
        for run in recorded
        for row in spent(run)
        if row["ms"] > 0
    ]
    if not rows:
        return []
    chart = alt.Chart(alt.Data(values=rows)).mark_bar()
    chart = chart.transform_calculate(order=f"indexof({list(COLORS)}, datum.group)").encode(
        x=alt.X("ms:Q", title="ms per iteration", stack="zero"),
        y=alt.Y("rank:N", title=None, sort=[f"rank {rank}" for rank in recorded[0].ranks]),
        color=colored(rows, "group"),
        order="order:Q",
        tooltip=tips("run rank pass group ms"),
    )
    size, notes = {"width": 300, "height": 22 * len(recorded[0].ranks)}, [OF_RANKS.format(rule)]
    groups = {row["group"] for row in rows}
    return [panel("phases", "Phases of each rank", notes, chart, rows, size, by="run", beside=70, legend=groups)]


def one_iteration(runs: Sequence[Run], which: str) -> list[Panel]:
    """One iteration of some runs, a facet for each; none where no phase or kernel has a begin and an end."""
    recorded, rule = chosen(runs, which, TIMELINE, placed=True)
    if not recorded:
        return []
    rows = [row for run in recorded for row in _rows(run)]
    lanes = sorted({row["l"] for row in rows if "l" in row}, key=lambda name: (int(name.split()[1]), name))
    with_phases = any(run.phases for run in recorded)  # then each rank has a lane by its number alone
    axis = alt.Axis(labelExpr=LANE.format(r"^rank \d+ " if with_phases else " kernels$"))
    x = alt.X("a:Q", title="ms since the iteration began", scale=alt.Scale(nice=False))
    fields = {"l": "lane", "q": "pass", "g": "time of", "p": "phase or kernel", "s": "step", "m": "ms", "a": "from ms"}
    base = alt.Chart(alt.Data(values=rows)).encode(x=x)
    bars = (
        base.transform_filter("datum.b")
        .transform_calculate(m="format(datum.b - datum.a, '.4~g')")
        .encode(
            x2="b:Q",
            y=alt.Y("l:N", title=None, scale=alt.Scale(domain=lanes), axis=axis),
            color=colored(rows, "g"),
            tooltip=[alt.Tooltip(f"{field}:N", title=title) for field, title in fields.items()],
        )
    )
    beside = f"indexof({list(BESIDE)}, datum.g) >= 0"
    passes = base.transform_filter("!datum.b")
    chart: Any = alt.layer(
        bars.transform_filter(f"!({beside})").mark_bar(),
        bars.transform_filter(beside).mark_bar(height={"band": 0.5}),
        passes.mark_rule(strokeDash=[3, 3], color=QUIET),
        passes.mark_text(align="left", dx=3, dy=-7, color=QUIET).encode(text="t:N", y=alt.value(0)),
    ).properties(width=620, height=alt.Step(16))
    header = alt.Header(labelOrient="top", labelAngle=0, labelAnchor="start", labelPadding=2)
    chart = chart.facet(row=alt.Row("u:N", title=None, sort=[run.label for run in recorded], header=header))
    notes = [rule, ONE_CLOCK.format(_clocks(recorded)) if with_phases else "", _about_kernels(recorded)]
    return [
        Panel("timeline", "Timeline of one iteration", " ".join(filter(None, notes)), chart.to_dict(validate=False))
    ]


def _about_kernels(recorded: Sequence[Recorded]) -> str:
    """What the lanes of kernels are; empty without any."""
    begins: dict[Any, list[float]] = defaultdict(list)
    left_out = 0
    for run in recorded:
        left_out += sum(profile.kernels_left_out for profile in run.run.result.profile if run.kernels)
        for row in run.kernels:
            if row["phase"] == WHOLE:
                begins[run.label, row["pass"]].append(row["start_ms"])
    if not begins:
        return ""
    note = OF_KERNELS.format(max(max(times) - min(times) for times in begins.values()))
    return f"{note} The {left_out:,} shortest kernels are left out." if left_out else note


def _rows(recorded: Recorded) -> list[Row]:
    """The bars, and the passes' beginnings, with short keys: they are most of the panel."""
    bars, passes = timeline(recorded)
    rows: list[Row] = [{"t": which, "a": round(begin, 5)} for which, begin in passes.items()]
    least = max(bar.stop for bar in bars) / FINEST
    for kernel in (False, True):
        for bar in coarser([bar for bar in bars if bar.kernel == kernel], MOST_BARS, least):
            name = bar.phase if len(bar.phase) <= MOST_NAME else f"{bar.phase[:MOST_NAME]}…"
            what = {"l": _lane(bar), "q": bar.which, "g": bar.group, "p": name, "s": bar.step if bar.step >= 0 else ""}
            rows.append({**what, "a": round(bar.start, 5), "b": round(bar.stop, 5)})
    return [{"u": recorded.label, **row} for row in rows]


def _lane(bar: Bar) -> str:
    """The name of a bar's lane: of a rank's first, the rank alone."""
    rank, kind = bar.lane
    return f"rank {rank} {'' if kind == COMPUTE else KERNELS if kind == OVERLAPPED else kind}".strip()


def _clocks(recorded: Sequence[Recorded]) -> str:
    """How far the clocks of the ranks may be apart."""
    clocks = [run.run.result.comm.clocks for run in recorded if run.run.result.comm and run.run.result.comm.clocks]
    if all(clock.count == 1 for clock in clocks):
        return ""
    by = "GPUs are aligned by the all-reduce" if recorded[0].run.gpu else "hosts are aligned by the barrier"
    return CLOCKS.format(by, max(clock.error_ms for clock in clocks) * 1e3)
