"""Hydra's launcher of this program: it gives all runs of a sweep to `runner.sweep`, which orders them, plans them and does them
in this process."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn, run_job
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, open_dict

TARGET = {"_target_": "hydra_plugins.attention_runner.AttentionRunner"}
ConfigStore.instance().store("attention_runner", TARGET, group="hydra/launcher", provider="attention_runner")


class AttentionRunner(Launcher):
    """Its imports of the program are late, since Hydra imports every plugin, also for other programs."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.context, self.task, self.config = hydra_context, task_function, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        from runner import sweep

        jobs = [tuple(job) for job in job_overrides]
        return sweep.launch(
            jobs, Path(self.config.hydra.sweep.dir), self.config, partial(self._job, first=initial_job_idx)
        )

    def _job(self, job: Sequence[str], number: int, compared: int, first: int) -> JobReturn:
        config = self.context.config_loader.load_sweep_config(self.config, list(job))
        with open_dict(config):
            config.hydra.job.id = config.hydra.job.num = first + number
        task = partial(self.task, compared=compared)
        return run_job(task, config, "hydra.sweep.dir", "hydra.sweep.subdir", self.context)
