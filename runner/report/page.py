"""A report as one HTML page, which needs no network: conclusions, charts, a table of all runs, failures, environment.

Its template, style and scripts are in `assets/`. What stands in a result reaches the page as escaped text or as JSON, and
the scripts never read it as HTML."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from runner.output.results import finite, write_text
from runner.record.result import STATUSES
from runner.report import charts, tables
from runner.report.entries import columns
from runner.report.parts import Part, parts
from runner.report.runs import WORKLOAD, read
from runner.report.table import swept

NAME = "report.html"


def write(out: Path, sections: Sequence[Part]) -> Path:
    """Write the page into the folder `out`, from which files of runs are linked. Raises OSError."""
    import jinja2
    from markupsafe import Markup

    from runner.report.drawing import bundle

    runs = [run for part in sections for run in part.runs]
    sweeps = [part.name for part in sections for _ in part.runs]
    specs = {f"{part.prefix}{panel.name}": panel.spec for part in sections for panel in part.panels}
    environment = jinja2.Environment(loader=jinja2.FunctionLoader(charts.asset), autoescape=True, trim_blocks=True)
    text = environment.get_template("page.html").render(
        title=swept(runs),
        source=out.resolve().name,
        runs=runs,
        parts=sections,
        failures=tables.failure_groups(runs),
        failed=STATUSES[1:],
        asset=lambda name: Markup(charts.asset(name)),
        bundle=Markup(bundle() if specs else ""),
        specs=Markup(in_script(specs)),
        data=Markup(in_script({"count": len(runs), "workload": WORKLOAD, "columns": columns(runs, sweeps, out)})),
    )
    write_text(out / NAME, text)
    return out / NAME


def in_script(value: Any) -> str:
    """JSON that may stand in a script element: neither </script> nor <!-- can be in it."""
    return json.dumps(finite(value), separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")


def at_end_of_sweep(folder: Path) -> str:
    """Write the page of a sweep that has just ended. Returns a line that says where it is, or why there is none; raises
    nothing, for the sweep's results are worth more than its page."""
    if why := charts.missing():
        return why
    try:
        return f"Page: {write(folder, parts(read([folder]), folder))}"
    except Exception as error:
        return f"no {NAME}: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
