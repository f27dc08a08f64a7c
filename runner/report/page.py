"""A report as one HTML page: conclusions, charts, a table of all runs, failures, environment."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from runner.output.results import write_text
from runner.report import charts, document, tables
from runner.report.entries import columns
from runner.report.parts import Part, parts
from runner.report.runs import read

NAME = "report.html"


def write(out: Path, title: str, of: Sequence[Part]) -> Path:
    """Write the page into the folder `out`. Raises OSError."""
    write_text(out / NAME, page(title, of, out))
    return out / NAME


def page(title: str, of: Sequence[Part], out: Path) -> str:
    """The page. out: its folder, from which files of runs are linked."""
    from markupsafe import Markup

    runs = [run for part in of for run in part.runs]
    sweeps = [part.name for part in of for _ in part.runs]
    specs = [panel.spec for part in of for panel in part.panels]
    firsts = [sum(len(part.panels) for part in of[:i]) for i in range(len(of))]
    data = {"count": len(runs), "columns": [column.plain() for column in columns(runs, sweeps, out)]}
    return document.render(
        "page.html",
        title=title,
        summary=_summary(of),
        specs=specs,
        scripts=("page.js", "runs.js"),
        parts=[_View(part, first) for part, first in zip(of, firsts, strict=True)],
        charted=bool(specs) or any(part.compared for part in of),
        failures=tables.failure_groups(runs),
        data=Markup(document.in_script(data)),
    )


def at_end_of_sweep(folder: Path) -> str:
    """Write the page of a sweep that has just ended. Returns a line that says where it is, or why there is none; raises
    nothing, for the sweep's results are worth more than its page."""
    if why := charts.missing():
        return why
    try:
        return f"Page: {write(folder, folder.name, parts(read([folder]), folder))}"
    except Exception as error:
        return f"no {NAME}: {type(error).__name__}: {' '.join(str(error).split())[:200]}"


class _View:
    """A part, and the number of its first panel among those of the page."""

    def __init__(self, part: Part, first: int):
        self._part, self.first = part, first

    def __getattr__(self, name: str) -> Any:
        return getattr(self._part, name)


def _summary(of: Sequence[Part]) -> str:
    runs = [run for part in of for run in part.runs]
    machines = list(dict.fromkeys(part.summary.splitlines()[0] for part in of))
    ok = sum(run.status == "ok" for run in runs)
    where = machines[0] if len(machines) == 1 else f"{len(of)} sweeps"
    return f"{len(runs):,} runs, {ok:,} ok · {where}"
