"""The parts of a report: one for each sweep, or one for all runs."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from runner.output.table import Table, escaped
from runner.report import charts, tables
from runner.report.comparison import comparable, comparison_table
from runner.report.conclusions import conclusions
from runner.report.labels import labels
from runner.report.panels import Panel, panels
from runner.report.runs import PASSES, Run
from runner.report.table import in_common


@dataclass(frozen=True)
class Part:
    """The report of some runs. `name` is short, for the page; `compared` has the tables of runs side by side, by heading. The PNG of a panel is
    `prefix` and the panel's name."""

    title: str
    name: str
    summary: str
    runs: Sequence[Run]
    conclusions: Mapping[str, Sequence[str]]
    compared: Mapping[str, Table]
    environment: Table
    prefix: str = ""
    panels: Sequence[Panel] = field(default_factory=list)

    def markdown(self) -> str:
        lines = [f"## {escaped(self.title)}", "", *(f"{escaped(line)}  " for line in self.summary.splitlines()), ""]
        lines += [*(f"- {escaped(text)}" for texts in self.conclusions.values() for text in texts), ""]
        for heading, table in {"Each run": tables.runs_table(self.runs), **self.compared}.items():
            lines += [f"### {heading}", "", table.markdown()]
        for panel in self.panels:
            lines += [f"![{escaped(panel.title)}]({self.prefix}{panel.name}.png)", ""]
        return "\n".join([*lines, "### Environment", "", self.environment.markdown()])


def parts(runs: Sequence[Run], out: Path, which: str = "total", together: bool = False) -> list[Part]:
    """A part for each sweep, or one for all runs `together`; without panels where their packages are missing. which: the
    times that are compared."""
    sweeps: dict[Path, list[Run]] = {}
    for run in runs:
        sweeps.setdefault(out if together else run.result.folder.parent, []).append(run)
    found = []
    for folder, of in sorted(sweeps.items()):
        title, below, prefix = "Runs", "Runs", ""
        if len(sweeps) > 1:
            title, below = str(folder), os.path.relpath(folder, os.path.commonpath(sweeps))
            prefix = re.sub(r"[^A-Za-z0-9.-]+", "_", below).strip("._") + "_"
        found.append(_part(title, below, prefix, of, which))
    return found


def _part(title: str, name: str, prefix: str, runs: list[Run], which: str) -> Part:
    compared = {}
    if len(set(labels(runs).values())) > 1 and comparable(runs):
        compared[f"Side by side, ms ({which.replace('_', ' ')})"] = comparison_table(runs, which)
    if groupings := tables.groupings_table(runs):
        compared["Groupings, beside separate calls"] = groupings
    drawn = [] if charts.missing() else panels(runs, which if which in PASSES else "total")
    summary = f"{tables.machine(runs)}\n{in_common(runs)}"
    said = conclusions(runs, which)
    return Part(title, name, summary, runs, said, compared, tables.environment_table(runs), prefix, drawn)
