"""The one loop over the runs of a command: the plan in a line, the order of the runs, the turns of compared runs
(`runner.rounds`), the lengths that failed, and where the sweep is. A single run is a sweep of one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.markup import escape

from runner import app, plan, rounds
from runner.config import overrides, resolve
from runner.output import terminal

PLAN_S = 0.5  # of the plan before a sweep; runs beyond it are counted, not looked at


def launch(jobs: Sequence[tuple[str, ...]], folder: Path, multirun: bool) -> list[Path]:
    """Does the runs of a command, each given by its overrides. Returns their folders."""
    if multirun:
        app.tally.runs = len(jobs)
        if not terminal.out.quiet:
            _say_plan(jobs, folder)
    first = overrides.composed(jobs[0])
    app.tally.until_limit = first.until_limit
    done: dict[int, Path] = {}
    for group in rounds.groups(jobs, first.order):
        unfinished = []
        for i in group:
            cfg, number = overrides.composed(jobs[i]), len(done) if multirun else None
            done[i] = folder / resolve.run_name(cfg, resolve.usable_gpus(cfg))
            if run := app.execute(cfg, done[i], jobs[i], number, len(group)):
                unfinished.append(run)
        _take_turns(unfinished)
    return [done[i] for i in range(len(jobs))]


def _say_plan(jobs: Sequence[tuple[str, ...]], folder: Path) -> None:
    planned = plan.made(jobs, folder, PLAN_S)
    if len(planned.runs) == planned.of:
        app.tally.expect({run.name: run.seconds for run in planned.runs})
    terminal.out.print(escape(planned.line()), soft_wrap=True)


def _take_turns(runs: Sequence[app.Unfinished]) -> None:
    """Does the other rounds of compared runs, whose first one is done."""
    left: list[app.Unfinished | None] = list(runs)
    most = max((run.rounds.of for run in runs), default=1)
    for this in range(1, most):
        for i in rounds.turns(len(left), this, most):
            run = left[i]
            if run is not None:
                left[i] = app.further(run)
