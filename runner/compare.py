"""`python -m runner.compare A B`: two result sets, run by run: what is slower, faster, larger or broken in B.

    python -m runner.compare outputs/multirun/2026-01-31_12-00-00 outputs/multirun/2026-01-31_13-00-00
    python -m runner.compare A B --where world_size=4 --pass forward --tolerance 0.01
    python -m runner.compare A B >> $GITHUB_STEP_SUMMARY    # in a workflow of GitHub; the exit status fails the step
    python -m runner.compare outputs/multirun/*     # more than two: each commit's set against the one before

Runs are compared whose configurations agree: variant, options (a changed default separates runs), workload, ranks,
kernel, transport, replay and timing. Of a repeated run the latest counts. What else differs, such as the machine or
packages, is said in a line.

A pass is slower or faster when the whole 95% interval of the ratio of medians, B over A, lies beyond the tolerance,
even when the whole interval lies within it, and else inconclusive, as with fewer than 6 samples. The interval is wider
where neighbouring samples resemble each other. It covers the samples of these two runs, not the variation between
starts of a program.

More than two sets are compared in the order of their commits in this repository's history, each with the one before;
by the dates of their first runs where the repository lacks one of the commits.

Exit status: 0 when nothing is worse; 1 when a run in B is slower, larger, not timed, or not ok any more; else 2 when B
lacks a run that is ok in A, and for sets that cannot be compared. Inconclusive runs, and runs only in B, are not worse."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from runner import environment
from runner.config.values import Refusal
from runner.output import commands
from runner.output.table import escaped
from runner.report.pairs import notes, paired, table
from runner.report.runs import PASSES, Run, read, where
from runner.report.verdicts import TOLERANCE


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(sys.argv[1:] if arguments is None else arguments)
    return commands.exit_status(lambda: _main(options), os_error=2)


def _main(options: argparse.Namespace) -> int:
    if not options.tolerance >= 0:
        raise Refusal(f"--tolerance {options.tolerance}: must be at least 0; 0.02 is 2%")
    sets = {str(folder): where(read([folder]), options.where) for folder in (options.a, options.b, *options.more)}
    names = [str(folder) for folder in (options.a, options.b, *options.more)]
    if options.more:
        names = _in_commit_order(names, sets)
    statuses: set[int] = set()
    parts = []
    for name_a, name_b in pairwise(names):
        a, b = sets[name_a], sets[name_b]
        pairs = paired(a, b, options.which, options.tolerance)
        if not any(pair.a and pair.b for pair in pairs):
            alike = "the same variant, options, workload, ranks, kernel, transport, replay and timing"
            raise Refusal(f"{name_a} and {name_b}: nothing was asked for in both; compared are runs with {alike}")
        if any(run.ok for run in (*a, *b)) and all(run.ms(options.which) is None for run in (*a, *b)):
            raise Refusal(f"--pass {options.which}: no run has it; forward has every run")
        title = [f"## {escaped(name_a)} → {escaped(name_b)}\n"] if options.more else []
        below = map(escaped, notes(a, b, pairs, options.which))
        parts.append("\n".join([*title, table(pairs).markdown(), *below]))
        statuses |= {pair.verdict.status for pair in pairs}
    print("\n\n".join(parts))
    return 1 if 1 in statuses else max(statuses)


def _in_commit_order(names: Sequence[str], sets: Mapping[str, Sequence[Run]]) -> list[str]:
    """The names of the sets by the commit of their first run, in the repository's order; by the date of that run where the
    repository lacks a commit."""
    first = {name: min((run.environment for run in runs), key=lambda of: of.started_at) for name, runs in sets.items()}
    by_date = sorted(names, key=lambda name: first[name].started_at)
    commits = {name: (git.commit if (git := first[name].git) else None) or "" for name in by_date}
    history = environment.by_history([*commits.values()])
    known = {*commits.values()} <= {*history}
    return sorted(by_date, key=lambda name: history.index(commits[name])) if known else by_date


def _parser() -> argparse.ArgumentParser:
    parser = commands.parser("runner.compare", __doc__)
    add = parser.add_argument
    add("a", type=Path, metavar="A", help="folder of a run or of many: before")
    add("b", type=Path, metavar="B", help="folder of a run or of many: after")
    add("more", type=Path, nargs="*", metavar="C", help="further folders: each is compared with the one before")
    commands.add_where(parser)
    add("--pass", dest="which", choices=PASSES, default="total", help="the times that decide (default: total)")
    add("--tolerance", type=float, default=TOLERANCE, help="of times (default 0.02: 2%%)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
