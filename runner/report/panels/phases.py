"""What each rank spends its time on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import altair as alt

from runner.report.panels.panel import Panel
from runner.report.panels.recorded import COLORS, COMPUTE, EXPOSED, MERGE, OTHER, RANKS, alike, chosen, spent
from runner.report.runs import Run

MOST_RUNS = 6
GROUPS = (COMPUTE, MERGE, EXPOSED, RANKS, OTHER)


def draw(runs: Sequence[Run], which: str = "total") -> list[Panel]:
    """A bar for each rank, of the time of each group of phases, a facet for each run; none without phases of several
    ranks."""
    shown, rule = chosen(runs, which, MOST_RUNS, placed=False)
    if not shown:
        return []
    rows = [
        {**row, "run": each.label, "rank": f"rank {row['rank']}", "ms": round(row["ms"], 5)}
        for each in shown
        for row in spent(each)
        if row["ms"] > 0
    ]
    order = {group: i for i, group in enumerate(GROUPS)}
    rows.sort(key=lambda row: order[row["group"]])  # the pieces of a bar, from the left
    colors = alt.Scale(domain=list(GROUPS), range=[COLORS[group] for group in GROUPS])
    tooltip = [alt.Tooltip(f"{key}:N") for key in ("run", "rank", "pass", "group")]
    chart: Any = alt.Chart(alt.Data(values=rows)).encode(
        x=alt.X("ms:Q", title="ms per iteration", stack="zero"),
        y=alt.Y("rank:N", title=None, sort=[f"rank {rank}" for rank in shown[0].ranks]),
        color=alt.Color("group:N", title=None, scale=colors, sort=list(GROUPS)),
        order=alt.Order("order:Q"),
        tooltip=[*tooltip, alt.Tooltip("ms:Q", format=".4g")],
    )
    chart = chart.transform_calculate(order=f"indexof({list(GROUPS)}, datum.group)")
    chart = chart.mark_bar().properties(width=300, height=alt.Step(22))
    chart = chart.facet(alt.Facet("run:N", title=None, sort=[each.label for each in shown]), columns=2)
    if not alike(shown):
        chart = chart.resolve_scale(x="independent").resolve_axis(x="independent")
    note = (
        f"{rule}. Mean of the middle half of the recorded iterations, all passes. A rank that ends a pass before the "
        "slowest waits for other ranks; other is CPU launch overhead and gaps."
    )
    return [Panel("phases", "Phases of each rank", note, chart.to_dict())]
