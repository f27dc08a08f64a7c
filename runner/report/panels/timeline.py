"""One iteration on one clock, a lane for each rank's phases and one for its kernels."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import altair as alt

from runner.report.panels.panel import Panel
from runner.report.panels.recorded import (
    BESIDE,
    BLOCK,
    COLORS,
    COMPUTE,
    EXPOSED,
    KERNELS,
    MERGE,
    OTHER,
    OVERLAPPED,
    RANKS,
    TRANSFER,
    WHOLE,
    Bar,
    Shown,
    alike,
    chosen,
    coarser,
    timeline,
)
from runner.report.runs import Run

MOST_RUNS = 4
MOST_BARS = 500  # of a run; where it has both, half of them for phases and half for kernels
MOST_NAME = 60  # letters of a kernel's name
FINEST = 1000  # bars shorter than this part of the longest iteration are drawn with their neighbours
GROUPS = (COMPUTE, MERGE, EXPOSED, OVERLAPPED, RANKS, TRANSFER, BLOCK, OTHER)
SHORT = {"forward": "fwd", "backward": "bwd"}


def draw(runs: Sequence[Run], which: str = "total") -> list[Panel]:
    """One iteration of some runs, a facet for each; none where no phase or kernel has a begin and an end."""
    shown, rule = chosen(runs, which, MOST_RUNS, placed=True)
    if not shown:
        return []
    rows = [row for each in shown for row in _rows(each)]
    used = {row["g"] for row in rows if "g" in row}
    groups = [group for group in GROUPS if group in used]
    colors = alt.Scale(domain=groups, range=[COLORS[group] + ("59" if group == OTHER else "") for group in groups])
    lanes = sorted({row["l"] for row in rows if "l" in row}, key=lambda name: (int(name.split()[1]), name))
    named = any(each.rows for each in shown)  # then each rank has a lane by its number alone
    axis = alt.Axis(
        labelExpr=r"replace(datum.label, /^rank \d+ /, '')" if named else "replace(datum.label, / kernels$/, '')"
    )
    x = alt.X(
        "a:Q",
        title="ms since the iteration began",
        scale=alt.Scale(nice=False),
        axis=alt.Axis(tickCount=10, labelOverlap=True),
    )
    y = alt.Y("l:N", title=None, scale=alt.Scale(domain=lanes), axis=axis)
    titles = {"l": "lane", "q": "pass", "g": "time of", "p": "phase or kernel", "s": "step"}
    tooltip: list[Any] = [alt.Tooltip(f"{key}:N", title=title) for key, title in titles.items()]
    tooltip += [alt.Tooltip(f"{key}:Q", title=title, format=".4g") for key, title in (("m", "ms"), ("a", "from ms"))]
    base = alt.Chart().encode(x=x)
    bars = base.transform_filter("datum.b > datum.a").transform_calculate(m="datum.b - datum.a")
    bars = bars.encode(x2="b:Q", y=y, color=alt.Color("g:N", title=None, sort=None, scale=colors), tooltip=tooltip)
    beside = f"indexof({list(BESIDE)}, datum.g) >= 0"
    main, thin = bars.transform_filter(f"!({beside})"), bars.transform_filter(beside)
    passes = base.transform_filter("!datum.b")
    begin = passes.mark_rule(strokeDash=[3, 3], color="#888")
    names = passes.mark_text(align="left", dx=3, dy=-7, color="#888").encode(text="t:N", y=alt.value(0))
    chart: Any = alt.layer(
        main.mark_bar(), thin.mark_bar(height={"band": 0.5}), begin, names, data=alt.Data(values=rows)
    )
    chart = chart.properties(width=620 if named else 590, height=alt.Step(16))
    header = alt.Header(labelOrient="top", labelAngle=0, labelAnchor="start", labelPadding=2)
    chart = chart.facet(row=alt.Row("u:N", title=None, sort=[each.label for each in shown], header=header))
    if not alike(shown):
        chart = chart.resolve_scale(x="independent").resolve_axis(x="independent")
    phases = (
        f"Of each run the iteration nearest to the median, all ranks on one clock{_clocks(shown)}; the pause "
        "before a pass, in which the ranks are aligned, is cut out. Grey is the rest of a pass: CPU launch overhead and gaps."
    )
    note = " ".join(filter(None, [f"{rule}.", phases if named else "", _about_kernels(shown, named)]))
    return [Panel("timeline", "Timeline of one iteration", note, chart.to_dict())]


def _about_kernels(shown: Sequence[Shown], beside_phases: bool) -> str:
    """What the lanes of kernels are; empty without any."""
    having = [each for each in shown if each.kernels]
    if not having:
        return ""
    starts: dict[Any, list[float]] = defaultdict(list)
    for each in having:
        for row in each.kernels:
            if row["phase"] == WHOLE:
                starts[each.label, row["pass"]].append(row["start_ms"])
    apart = max(max(of) - min(of) for of in starts.values())
    left_out = sum(profile.kernels_left_out for each in having for profile in each.run.result.profile)
    return (
        "Kernels (on a CPU, phases) are from the trace of one iteration"
        + (", another one than above; each pass begins with that of the phases. " if beside_phases else ". ")
        + f"There all ranks begin a pass within {apart:.3g} ms. Communication is overlapped while compute runs, "
        "and drawn thin upon it; nothing is drawn where no kernel runs."
        + (f" The {left_out:,} shortest kernels are left out." if left_out else "")
    )


def _rows(shown: Shown) -> list[dict[str, Any]]:
    """The bars, and the passes' beginnings, with short keys: they are most of the panel."""
    bars, passes = timeline(shown.usual, shown.ranks, shown.kernels)
    idle = [Bar(rank, which, OTHER, "", -1, *place) for which, place in passes.items() for rank in shown.ranks]
    least = max(bar.stop for bar in bars) / FINEST
    kinds = [kind for kind in ([b for b in bars if not b.kernel], [b for b in bars if b.kernel]) if kind]
    drawn = [bar for kind in kinds for bar in coarser(kind, MOST_BARS // len(kinds), least)]
    found: list[dict[str, Any]] = [
        {"u": shown.label, "t": SHORT.get(which, which), "a": round(begin, 5)} for which, (begin, _) in passes.items()
    ]
    for bar in [*(idle if shown.rows else ()), *drawn]:
        name = bar.phase if len(bar.phase) <= MOST_NAME else f"{bar.phase[:MOST_NAME]}…"
        what = {"u": shown.label, "l": _lane(bar), "q": bar.which, "g": bar.group, "p": name}
        step = bar.step if bar.step >= 0 else ""
        found.append({**what, "s": step, "a": round(bar.start, 5), "b": round(bar.stop, 5)})
    return found


def _lane(bar: Bar) -> str:
    """The name of a bar's lane: of a rank's first, the rank alone."""
    rank, kind, lane = bar.place
    kind = "" if kind == COMPUTE else KERNELS if kind == OVERLAPPED else kind
    name = f"rank {rank} {kind}".strip()
    return name if lane == 0 else f"{name} {lane + 1}"


def _clocks(shown: Sequence[Shown]) -> str:
    """How far the clocks of the ranks may be apart."""
    found = [each.run.result.comm.clocks for each in shown if each.run.result.comm and each.run.result.comm.clocks]
    error = max((clocks.error_ms for clocks in found), default=0.0)
    if all(clocks.count == 1 for clocks in found):
        return ""
    on_gpu = shown[0].run.result.asked.device == "cuda"
    by = (
        "those of the GPUs are aligned by the all-reduce" if on_gpu else "those of the hosts are aligned by the barrier"
    )
    return f" ({by} before each pass, to some {error * 1e3:.2g} µs)"
