"""A report as one HTML page that needs no network: tables, charts, environment."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from runner.output.summary import escaped
from runner.report.charts import KINDS
from runner.report.table import Table

STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.45 system-ui, sans-serif; color: #1f2328; margin: 2rem auto; max-width: 100rem; padding: 0 1.5rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.2rem; margin-top: 2.5rem; border-bottom: 1px solid #d1d9e0; }
h3 { font-size: 1rem; margin: 1.5rem 0 .5rem; }
p { max-width: 60rem; color: #59636e; white-space: pre-line; overflow-wrap: anywhere; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 12.5px; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .45rem; border-bottom: 1px solid #d1d9e0; text-align: right; white-space: nowrap; }
th { background: #f6f8fa; vertical-align: bottom; white-space: normal; min-width: 3rem; }
.words { text-align: left; }
tbody tr:hover { background: #f6f8fa; }
td.failed { color: #cf222e; }
details td { white-space: normal; overflow-wrap: anywhere; vertical-align: top; }
details td:first-child { white-space: nowrap; }
.chart { margin: .5rem 0 1.5rem; overflow-x: auto; }
"""


@dataclass(frozen=True)
class Part:
    """The report of some runs. `charts` has the vega-lite specification of each kind, whose PNG is `prefix` and the
    kind; `why` says why there are none."""

    title: str
    summary: str
    tables: Mapping[str, Table]
    environment: Table
    prefix: str = ""
    charts: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    why: str | None = None

    def markdown(self) -> str:
        lines = [f"## {escaped(self.title)}", "", *(f"{escaped(line)}  " for line in self.summary.splitlines()), ""]
        for heading, table in self.tables.items():
            lines += [f"### {heading}", "", table.markdown()]
        for kind in self.charts:
            lines += [f"![{KINDS[kind]}]({self.prefix}{kind}.png)", ""]
        return "\n".join([*lines, "### Environment", "", self.environment.markdown()])


def page(title: str, parts: Sequence[Part]) -> str:
    body = [f"<h1>{html.escape(title)}</h1>"]
    specs: list[dict[str, Any]] = []
    for part in parts:
        body += [f"<h2>{html.escape(part.title)}</h2>", f"<p>{html.escape(part.summary)}</p>"]
        for heading, table in part.tables.items():
            body += [f"<h3>{html.escape(heading)}</h3>", table.html()]
        for kind, spec in part.charts.items():
            body.append(f'<h3>{html.escape(KINDS[kind])}</h3><div class="chart" id="chart{len(specs)}"></div>')
            specs.append(spec)
        body += [f"<p>{html.escape(part.why)}</p>"] if part.why else []
        body.append(f"<details><summary>Environment</summary>{part.environment.html()}</details>")
    drawn = ""
    if specs:
        from runner.report.drawing import bundle

        safe = json.dumps(specs).replace("<", "\\u003c")  # neither </script> nor <!--<script> may stand in a script
        embed = f"{safe}.forEach((spec, i) => vegaEmbed('#chart' + i, spec, {{actions: false, renderer: 'svg'}}));"
        drawn = f"<script>{bundle()}</script>\n<script>{embed}</script>"
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>{STYLE}</style></head><body>\n" + "\n".join(body) + f"\n{drawn}</body></html>\n"
    )
