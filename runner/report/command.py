"""`python -m runner.report FOLDER...`: tables, charts and one page of the results in these folders and below.

    python -m runner.report outputs/multirun/2026-01-31_12-00-00        # report.md, report.html and a PNG a chart in it
    python -m runner.report results/h200-x4 --where timing=warmup world_size=4 --out /tmp/report
    python -m runner.report FOLDER --page                               # report.html alone
    python -m runner.report FOLDER... --into README.md --section NAME   # replaces <!-- report:NAME -->..<!-- /report:NAME -->
    python -m runner.report --refresh README.md                         # every section again, by the command that made it

Without the extra `report`, there is report.md alone."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from runner.config import folders
from runner.config.values import Refusal
from runner.output import commands
from runner.output.results import write_text
from runner.output.table import escaped
from runner.reading import read_text
from runner.report import charts, page, parts, tables
from runner.report.comparison import COMPARED, comparison_table, headline_table
from runner.report.panels import panels
from runner.report.runs import Run, read, where
from runner.report.table import in_common

PROGRAM = "python -m runner.report"
MADE_BY = re.compile(r"^Made by `python -m runner\.report (?P<arguments>[^`]*)`", re.MULTILINE)


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    options = _parser().parse_args(arguments)
    return commands.exit_status(lambda: _main(options, arguments))


def _main(options: argparse.Namespace, arguments: list[str]) -> int:
    if options.refresh:
        if len(arguments) > 1 + len(options.refresh):
            raise Refusal("--refresh FILE: makes each section by the command in it; leave everything else out")
        return max(map(refresh, options.refresh))
    if not options.folders:
        raise Refusal(f"no FOLDER given; for instance {PROGRAM} outputs/multirun/*")
    if bool(options.into) != bool(options.section):
        raise Refusal("--into FILE and --section NAME belong together: give both or none")
    runs = where(read(options.folders), options.where)
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
    return _section(runs, options, arguments) if options.into else _report(runs, options)


def _parser() -> argparse.ArgumentParser:
    parser = commands.parser("runner.report", __doc__)
    add = parser.add_argument
    add("folders", nargs="*", type=Path, metavar="FOLDER", help="of a run, a sweep, or many")
    commands.add_where(parser)
    add("--pass", dest="which", choices=COMPARED, default="total", help="the times that are compared")
    add("--together", action="store_true", help="one part for all runs, instead of one for each sweep")
    add("--page", action="store_true", help="report.html alone, without report.md and the PNGs")
    add("--out", type=Path, help="the report's folder (default: FOLDER; of several folders outputs/report-<time>)")
    add("--into", type=Path, metavar="FILE", help="only put a table and a chart into this file")
    add("--section", metavar="NAME", help="between <!-- report:NAME --> and <!-- /report:NAME -->")
    add(
        "--table",
        choices=("runs", "comparison", "headline", "models"),
        default="runs",
        help="of the section; headline: auto against each external package; models: memory, parameters, loss",
    )
    add("--chart", choices=(*charts.KINDS, "none"), default="time", help="of the section")
    add("--refresh", type=Path, nargs="+", metavar="FILE", help="make every section of the files again")
    return parser


def _report(runs: list[Run], options: argparse.Namespace) -> int:
    """Write report.md, report.html and the charts, with a part for each sweep."""
    missing = charts.missing()
    if options.page and missing:
        raise Refusal(missing)
    out = options.out or (
        folders.create(Path("outputs"), f"report-{folders.now()}") if len(options.folders) > 1 else options.folders[0]
    )
    sweeps = parts.parts(runs, out, options.which, options.together)
    files = [] if options.page else [out / "report.md"]
    if files:
        for part in sweeps:
            for panel in part.panels:
                _write_png(panel, out / f"{part.prefix}{panel.name}.png")
        text = "\n".join([f"# {escaped(out.resolve().name)}", "", *(part.markdown() for part in sweeps)])
        write_text(files[0], text)
    if missing:
        print(missing, file=sys.stderr)
    else:
        files.append(page.write(out, sweeps))
    print(f"Report: {', '.join(map(str, files))}")
    return 0


def _write_png(panel: charts.Panel, path: Path) -> None:
    from runner.report.drawing import write_png

    write_png(panel.spec, path)


def _section(runs: list[Run], options: argparse.Namespace, arguments: list[str]) -> int:
    """Replace a section of a file by a table, a chart and the command that made them."""
    file: Path = options.into
    text = read_text(file)
    pattern = _between(options.section)
    if len(pattern.findall(text)) != 1:
        raise Refusal(
            f"--section {options.section}: {file} must have <!-- report:{options.section} --> and after it "
            f"<!-- /report:{options.section} --> once, each in a line of its own"
        )
    unit = f" Times in ms ({options.which.replace('_', ' ')})."
    if options.table == "comparison":
        table = comparison_table(runs, options.which)
        table.notes += tables.failures(runs)
    elif options.table == "headline":
        table = headline_table(runs, options.which)
    else:
        table, unit = (tables.models_table if options.table == "models" else tables.runs_table)(runs), ""
    picture = [] if options.chart == "none" else [_picture(runs, options), ""]
    heading = escaped(f"{tables.machine(runs)}; {in_common(runs)}.{unit}")
    body = "\n".join([heading, "", table.markdown(), *picture, f"Made by `{PROGRAM} {shlex.join(arguments)}`."])
    write_text(file, pattern.sub(lambda section: f"{section[1]}\n{body}\n{section[3]}", text))
    return 0


def _between(name: str) -> re.Pattern[str]:
    mark = re.escape(name)
    return re.compile(rf"^(<!-- report:{mark} -->)$\n(.*?)^(<!-- /report:{mark} -->)$", re.MULTILINE | re.DOTALL)


def _picture(runs: list[Run], options: argparse.Namespace) -> str:
    """Write the section's chart and return its link, relative to the file. Raises Refusal where it cannot be
    made."""
    if missing := charts.missing():
        raise Refusal(f"{missing}, or leave the picture out with --chart none")
    panel = next((panel for panel in panels(runs, options.which) if panel.name == options.chart), None)
    if panel is None:
        raise Refusal(f"--chart {options.chart}: these runs have nothing for it; another, or --chart none")
    path = (options.out or options.folders[0]) / f"{options.section}_{options.chart}.png"
    _write_png(panel, path)
    title = f"{charts.KINDS[options.chart]}, {options.section.replace('_', ' ')}"
    return f"![{title}]({os.path.relpath(path, options.into.parent)})"


def refresh(file: Path) -> int:
    """Make every section of the file again by the command in it; relative paths start at the working directory. Raises
    Refusal for a section without a command."""
    text = read_text(file)
    names = re.findall(r"^<!-- report:(\S+) -->$", text, re.MULTILINE)
    if not names:
        raise Refusal(f"--refresh {file}: has no <!-- report:NAME --> section")
    worst = 0
    for name in names:
        inside = _between(name).search(text)
        made = MADE_BY.search(inside[2]) if inside else None
        if made is None:
            raise Refusal(f"--refresh {file}: section {name} does not say the command that made it; run that once")
        worst = max(worst, main(shlex.split(made["arguments"])))
    return worst
