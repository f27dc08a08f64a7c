"""A report as one HTML page, which needs no network: conclusions, charts, a table of all runs, failures, environment.

Its template, style and scripts are in `assets/`. What stands in a result reaches the page as escaped text or as JSON, and
the scripts never read it as HTML."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from runner.output.record import STATUSES
from runner.output.results import finite, write_text
from runner.report import charts, tables
from runner.report.entries import columns
from runner.report.parts import Part, parts
from runner.report.runs import WORKLOAD, read
from runner.report.table import swept

NAME = "report.html"


def write(out: Path, title: str, of: Sequence[Part]) -> Path:
    """Write the page into the folder `out`. Raises OSError."""
    write_text(out / NAME, page(title, of, out))
    return out / NAME


def page(title: str, of: Sequence[Part], out: Path) -> str:
    """The page. out: its folder, from which files of runs are linked."""
    import jinja2
    from markupsafe import Markup

    from runner.report.drawing import bundle

    runs = [run for part in of for run in part.runs]
    sweeps = [part.name for part in of for _ in part.runs]
    specs = {f"{part.prefix}{panel.name}": panel.spec for part in of for panel in part.panels}
    every = columns(runs, sweeps, out)
    data = {"count": len(runs), "workload": WORKLOAD, "columns": [column.plain() for column in every]}
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(charts.asset), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True
    )
    return environment.get_template("page.html").render(
        title=swept(runs),
        source=title,
        summary=_summary(of),
        style=Markup(charts.asset("page.css")),
        script=Markup("\n".join(map(charts.asset, ("page.js", "runs.js")))),
        theme=Markup(charts.asset("theme.json")),
        bundle=Markup(bundle() if specs else ""),
        specs=Markup(in_script(specs)),
        parts=of,
        charted=bool(specs) or any(part.compared for part in of),
        failures=tables.failure_groups(runs),
        failed=STATUSES[1:],
        data=Markup(in_script(data)),
    )


def in_script(value: Any) -> str:
    """JSON that may stand in a script element: neither </script> nor <!-- can be in it."""
    return json.dumps(finite(value), separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")


def at_end_of_sweep(folder: Path) -> str:
    """Write the page of a sweep that has just ended. Returns a line that says where it is, or why there is none; raises
    nothing, for the sweep's results are worth more than its page."""
    if why := charts.missing():
        return why
    try:
        return f"Page: {write(folder, folder.name, parts(read([folder]), folder))}"
    except Exception as error:
        return f"no {NAME}: {type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _summary(of: Sequence[Part]) -> str:
    runs = [run for part in of for run in part.runs]
    machines = list(dict.fromkeys(part.summary.splitlines()[0] for part in of))
    ok = sum(run.status == "ok" for run in runs)
    where = machines[0] if len(machines) == 1 else f"{len(of)} sweeps"
    return f"{len(runs):,} runs, {ok:,} ok · {where}"
