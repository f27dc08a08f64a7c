"""`python -m runner.compare A B`: two result sets, run by run: what is slower, faster, larger or broken in B.

    python -m runner.compare outputs/multirun/2026-01-31_12-00-00 outputs/multirun/2026-01-31_13-00-00
    python -m runner.compare A B --where world_size=4 --pass forward --tolerance 0.01
    python -m runner.compare A B --format github    # annotations, and a table for the step's summary

Runs are compared whose configurations agree: variant, options (a changed default separates runs), workload, ranks,
kernel, transport, replay and timing. Of a repeated run the latest counts. What else differs, such as the machine or
packages, is said in a line.

A pass is slower or faster when the whole 95% interval of the ratio of medians, B over A, lies beyond the tolerance,
even when the whole interval lies within it, and else inconclusive, as with fewer than 6 samples. The interval is wider
where neighbouring samples resemble each other. It covers the samples of these two runs, not the variation between
starts of a program.

Exit status: 0 when nothing is worse; 1 when a run in B is slower, larger, not timed, or not ok any more; else 2 when B
lacks a run that is ok in A, and for sets that cannot be compared. Inconclusive runs, and runs only in B, are not worse."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from runner.output import commands
from runner.report import pair_formats
from runner.report.pair_formats import Comparison
from runner.report.pairs import add_options, check_options, compare
from runner.report.runs import WAYS, WORKLOAD, Run, read, where

FORMATS = {"md": pair_formats.markdown, "json": pair_formats.as_json, "html": pair_formats.html}


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(sys.argv[1:] if arguments is None else arguments)
    return commands.exit_status(lambda: _main(options), os_error=2)


def _main(options: argparse.Namespace) -> int:
    check_options(options)
    a, b = (where(read([folder]), options.where) for folder in (options.a, options.b))
    pairs = compare(a, b, options.which, options.tolerance, options.memory_tolerance)
    if not any(pair.a and pair.b for pair in pairs):
        raise ValueError(f"{options.a} and {options.b}: nothing was asked for in both{_apart(a, b)}")
    if any(run.ok for run in (*a, *b)) and all(run.ms(options.which) is None for run in (*a, *b)):
        raise ValueError(f"--pass {options.which}: no run has it; forward has every run")
    found = Comparison(str(options.a), str(options.b), a, b, pairs, options.which)
    if options.format == "github":
        print("\n".join(pair_formats.workflow_commands(found)))
        _to_step_summary(pair_formats.markdown(found))
    else:
        print(FORMATS[options.format](found))
    return found.exit_status


def _to_step_summary(text: str) -> None:
    """Into the summary of a GitHub workflow's step; elsewhere to the output."""
    path = os.environ.get("GITHUB_STEP_SUMMARY")
    if not path:
        print(text)
        return
    with open(path, "a", encoding="utf-8") as file:
        file.write(f"{text}\n")


def _parser() -> argparse.ArgumentParser:
    parser = commands.parser("runner.compare", __doc__)
    add = parser.add_argument
    add("a", type=Path, metavar="A", help="folder of a run or of many: before")
    add("b", type=Path, metavar="B", help="folder of a run or of many: after")
    add_options(parser)
    choices = (*FORMATS, "github")
    add("--format", choices=choices, default="md", help="md, json, html (a page), or github (workflow annotations)")
    return parser


def _apart(a: Sequence[Run], b: Sequence[Run]) -> str:
    """The facts in which the sets have no value in common."""
    found = []
    for key in ("attention", *(key for key in WORKLOAD if key != "gpu"), *WAYS):
        one, other = ({str(getattr(run, key)) for run in runs} for runs in (a, b))
        if not one & other:
            found.append(f"{key} is {' '.join(sorted(one))} in the one and {' '.join(sorted(other))} in the other")
    return f": {'; '.join(found)}" if found else ""


if __name__ == "__main__":
    sys.exit(main())
