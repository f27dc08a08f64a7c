"""A launcher for Hydra: compared runs of a sweep take turns, as `runner.rounds` describes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from hydra._internal.core_plugins.basic_launcher import BasicLauncher
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus

from runner import app, rounds


class Interleaving(BasicLauncher):
    """Like Hydra's basic launcher (job after job in this process), in another order."""

    compared: Sequence[str] = rounds.COMPARED

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        found: dict[int, JobReturn] = {}
        for group in self._groups(job_overrides):
            unfinished: dict[int, app.Unfinished] = {}
            for index in group:
                returned = self._job(job_overrides[index], initial_job_idx + len(found), len(group))
                found[index] = returned
                if returned.status == JobStatus.COMPLETED and isinstance(returned.return_value, app.Unfinished):
                    unfinished[index] = returned.return_value
            _further(list(unfinished.values()))
        return [found[index] for index in sorted(found)]

    def _groups(self, jobs: Sequence[Sequence[str]]) -> list[list[int]]:
        assert self.hydra_context is not None and self.config is not None
        first = self.hydra_context.config_loader.load_sweep_config(self.config, list(jobs[0]))
        if first.get("order") == "sequential":
            return [[index] for index in range(len(jobs))]
        return rounds.groups(jobs, self.compared)

    def _job(self, overrides: Sequence[str], index: int, compared: int) -> JobReturn:
        task: Any = self.task_function
        assert task is not None
        self.task_function = partial(task, compared=compared)
        try:
            (returned,) = super().launch([overrides], index)
        finally:
            self.task_function = task
        return returned


def _further(runs: Sequence[app.Unfinished]) -> None:
    """Does the missing rounds of a group of runs; an earlier command may have done some."""
    left: list[app.Unfinished | None] = list(runs)
    most = max((run.rounds for run in runs), default=1)
    for this in range(1, most):
        for index in rounds.turns(len(left), this, most):
            run = left[index]
            if run is not None and run.done == this:
                left[index] = app.further(run)


def register(compared: Sequence[str] = ()) -> None:
    """Replaces `hydra/launcher=basic` by our launcher, which is neither in Hydra's packages nor an installed plugin.
    compared: further keys in which compared runs differ."""
    Interleaving.compared = (*rounds.COMPARED, *compared)
    Plugins.instance().class_name_to_class[f"{BasicLauncher.__module__}.{BasicLauncher.__name__}"] = Interleaving
