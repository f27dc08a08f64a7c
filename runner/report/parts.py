"""The parts of a report: one for each sweep, or one for all runs."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from runner.output.table import Table, escaped
from runner.report import charts, tables
from runner.report.comparison import comparable, comparison_table
from runner.report.conclusions import conclusions
from runner.report.labels import labels
from runner.report.panels import panels
from runner.report.runs import PASSES, Run
from runner.report.table import in_common


@dataclass(frozen=True)
class Part:
    """The report of some runs. The PNG of a panel is `prefix` and the panel's name. which: the times
    that are compared."""

    name: str
    prefix: str
    runs: Sequence[Run]
    which: str

    @cached_property
    def machine(self) -> str:
        return tables.machine(self.runs)

    @cached_property
    def common(self) -> str:
        """What the runs have in common."""
        return in_common(self.runs)

    @cached_property
    def conclusions(self) -> Mapping[str, Sequence[str]]:
        return conclusions(self.runs, self.which)

    @cached_property
    def compared(self) -> Mapping[str, Table]:
        """The table of runs side by side, by its heading, where several were compared."""
        if len({*labels(self.runs).values()}) < 2 or not comparable(self.runs):
            return {}
        return {f"Side by side, ms ({self.which.replace('_', ' ')})": comparison_table(self.runs, self.which)}

    @cached_property
    def panels(self) -> Sequence[charts.Panel]:
        """None where the packages that draw them are missing."""
        return [] if charts.missing() else panels(self.runs, self.which if self.which in PASSES else "total")

    @cached_property
    def environment(self) -> Table:
        return tables.environment_table(self.runs)

    def markdown(self) -> str:
        lines = [f"## {escaped(self.name)}", "", f"{escaped(self.machine)}  ", f"{escaped(self.common)}  ", ""]
        lines += [*(f"- {escaped(text)}" for texts in self.conclusions.values() for text in texts), ""]
        for heading, table in {"Each run": tables.runs_table(self.runs), **self.compared}.items():
            lines += [f"### {heading}", "", table.markdown()]
        for panel in self.panels:
            lines += [f"![{escaped(panel.title)}]({self.prefix}{panel.name}.png)", ""]
        return "\n".join([*lines, "### Environment", "", self.environment.markdown()])


def parts(runs: Sequence[Run], out: Path, which: str = "total", together: bool = False) -> list[Part]:
    """A part for each sweep, or one for all runs `together`."""
    sweeps: dict[Path, list[Run]] = defaultdict(list)
    for run in runs:
        sweeps[out if together else run.result.folder.parent].append(run)
    if len(sweeps) == 1:
        return [Part("Runs", "", runs, which)]
    names = {folder: os.path.relpath(folder, os.path.commonpath(sweeps)) for folder in sorted(sweeps)}
    return [
        Part(name, re.sub(r"[^A-Za-z0-9.-]+", "_", name).strip("._") + "_", sweeps[folder], which)
        for folder, name in names.items()
    ]
