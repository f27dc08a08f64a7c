"""Medians over commits."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

import altair as alt

from runner.report.charts import few_lines
from runner.report.drawing import COLORS
from runner.report.panels.panel import Panel

MOST_FACETS = 60
HEADER = 44  # characters of a line above a facet


def draw(rows: list[dict[str, Any]], order: Sequence[str]) -> list[Panel]:
    """A line for each label over the commits in their order, with p10 to p90; a facet for each workload, at most
    MOST_FACETS: those with the most commits. rows: of `commits.rows`."""
    if not rows:
        return []
    rows = few_lines(rows)
    commits: dict[str, set[str]] = {}
    for row in rows:
        commits.setdefault(row["panel"], set()).add(row["commit"])
    facets = sorted(commits, key=lambda panel: -len(commits[panel]))[:MOST_FACETS]
    broken = {panel: "\n".join(textwrap.wrap(panel, HEADER)) for panel in facets}
    rows = [row | {"panel": broken[row["panel"]]} for row in rows if row["panel"] in broken]
    present = {row["commit"] for row in rows}
    names = list(dict.fromkeys(row["label"] for row in rows))
    few: dict[str, Any] = {} if len(names) <= len(COLORS) else {"scale": alt.Scale(scheme="tableau20")}
    tooltip = [alt.Tooltip(f"{key}:N") for key in ("label", "commit")]
    tooltip += [alt.Tooltip(f"{key}:Q", format=".4g") for key in ("ms", "p10", "p90")]
    axis = alt.Axis(labelAngle=-45, grid=False)
    base: Any = alt.Chart(alt.Data(values=rows)).encode(
        x=alt.X("commit:O", title=None, sort=[commit for commit in order if commit in present], axis=axis),
        y=alt.Y("ms:Q", title="ms", scale=alt.Scale(zero=False)),
        color=alt.Color("label:N", title=None, sort=names, **few),
        tooltip=tooltip,
    )
    spread = base.mark_rule(strokeWidth=1.5, opacity=0.6).encode(y=alt.Y("p10:Q", title="ms"), y2="p90:Q")
    chart = alt.layer(base.mark_line(strokeWidth=2), base.mark_circle(size=45, opacity=1), spread)
    if len(facets) > 1:
        header = alt.Header(labelExpr="split(datum.label, '\\n')")
        by = alt.Facet("panel:N", title=None, sort=list(broken.values()), header=header)
        chart = (
            chart.properties(width=300, height=180).facet(by, columns=2).resolve_scale(x="independent", y="independent")
        )
        chart = chart.resolve_axis(x="independent", y="independent")
    else:
        chart = chart.properties(width=560, height=300)
    left = len(commits) - len(facets)
    note = "Median of the slowest rank, and p10 to p90; lower is better. The axis does not start at zero."
    note += f" {left} workloads with fewer commits are in the table only." if left else ""
    return [Panel("commits", "Medians over commits", note, chart.to_dict())]
