"""The one loop over the runs of a command: the plan in a line, the order of the runs, the turns of compared runs
(`runner.rounds`), the lengths that failed, and where the sweep is. A single run is a sweep of one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from hydra.core.utils import JobReturn, JobStatus
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException
from rich.markup import escape

from runner import app, plan, rounds
from runner.config import overrides
from runner.output import terminal

PLAN_S = 0.5  # of the plan before a sweep; runs beyond it are counted, not looked at


def launch(
    jobs: Sequence[tuple[str, ...]],
    folder: Path,
    cfg: DictConfig,
    job: Callable[[tuple[str, ...], int, int], JobReturn],
) -> list[JobReturn]:
    """Does the runs of a sweep, each given by its overrides. job: does the first turn of a run, given its overrides, its number and
    the number of runs that it is compared with, itself included. With `hydra.sweeper.max_batch_size` Hydra calls this for each
    batch."""
    jobs = overrides.applied(jobs)
    app.tally.runs, app.tally.until_limit = (app.tally.runs or 0) + len(jobs), cfg.until_limit
    if not terminal.out.quiet:
        _say_plan(jobs, folder)
    done: dict[int, JobReturn] = {}
    for group in rounds.groups(jobs, cfg.order):
        unfinished: list[app.Unfinished] = []
        for i in group:
            done[i] = returned = job(jobs[i], len(done), len(group))
            if app.tally.error is not None:
                raise app.tally.error
            if returned.status == JobStatus.COMPLETED and isinstance(returned.return_value, app.Unfinished):
                unfinished.append(returned.return_value)
        _take_turns(unfinished)
    return [done[i] for i in range(len(jobs))]


def _say_plan(jobs: Sequence[tuple[str, ...]], folder: Path) -> None:
    try:
        planned = plan.made(jobs, folder, PLAN_S)
    except (HydraException, OmegaConfBaseException):
        return  # recorded by its run
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
