"""Peak memory against length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import altair as alt

from runner.report.charts import EXTERNAL, OURS, Axes, few_lines
from runner.report.drawing import TOKENS
from runner.report.labels import labels
from runner.report.panels.panel import Panel
from runner.report.runs import FACTS, Run
from runner.report.table import fact


def draw(runs: Sequence[Run], which: str = "total") -> list[Panel]:
    """Peak memory (GiB) of the rank with most, over the sequence length, where a variant has two lengths."""
    rows = _rows([run for run in runs if run.ok and run.result.peak_bytes])
    places = {(row["label"], row["panel"], row["tokens"]) for row in rows}
    if len(places) == len({place[:2] for place in places}):
        return []
    rows = few_lines(rows)
    facets = list(dict.fromkeys(row["panel"] for row in rows))
    ticks = sorted({row["tokens"] for row in rows})
    axis = alt.Axis(values=ticks, labelExpr=TOKENS, grid=False, labelOverlap=True)
    x = alt.X("tokens:Q", title="sequence length, tokens", scale=alt.Scale(type="log", base=2, nice=False), axis=axis)
    whose = {row["label"]: row["whose"] for row in rows}
    order = sorted(whose, key=lambda label: whose[label] == EXTERNAL)  # as in the charts of times
    color = alt.Color("label:N", title=None, scale=alt.Scale(domain=order), sort=order)
    y = alt.Y("gib:Q", title="peak memory, GiB", scale=alt.Scale(zero=True))
    tooltip = [alt.Tooltip("label:N", title="attention"), alt.Tooltip("panel:N", title="workload")]
    tooltip += [alt.Tooltip("tokens:Q", format=","), alt.Tooltip("gib:Q", title="GiB", format=".4g")]
    chart: Any = alt.Chart(alt.Data(values=rows)).encode(x=x, y=y, color=color, tooltip=tooltip)
    chart = chart.mark_line(point=True)
    if len(facets) > 1:
        by = alt.Facet("panel:N", title=None, sort=facets)
        chart = chart.properties(width=300, height=180).facet(by, columns=2)
    else:
        chart = chart.properties(width=560, height=300)
    note = "Peak of the rank with the most memory; lower is better."
    return [Panel("memory", "Peak memory", note, chart.to_dict())]


def _rows(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """A row for each label, workload and length: the highest peak of its runs."""
    if not runs:
        return []
    named = labels(runs)
    varying = [key for key in (*Axes.of(runs).panel, "world_size") if key != "seq_len"]
    varying = [key for key in dict.fromkeys(varying) if len({getattr(run, key) for run in runs}) > 1]
    found: dict[tuple[str, str, int], dict[str, Any]] = {}
    for run in runs:
        where = ", ".join(f"{FACTS[key]} {fact(run, key) or 'none'}" for key in varying)
        row = {
            "label": named[run],
            "variant": str(run.attention),
            "whose": EXTERNAL if run.external else OURS,
            "panel": where,
            "tokens": run.seq_len or 0,
            "gib": round((run.result.peak_bytes or 0) / 2**30, 4),
        }
        place = (named[run], where, run.seq_len or 0)
        if place not in found or found[place]["gib"] < row["gib"]:
            found[place] = row
    return list(found.values())
