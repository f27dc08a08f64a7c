"""Hydra's sweeper of this program: it gives the runs that `runner.command` made of a command line to another launcher."""

from __future__ import annotations

from collections.abc import Sequence

from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

TARGET = {"_target_": "hydra_plugins.attention_runner.AttentionRunner"}
ConfigStore.instance().store("attention_runner", TARGET, group="hydra/sweeper", provider="attention_runner")


class AttentionRunner(Sweeper):
    """Its import of the program is late, since Hydra imports every plugin, also for other programs."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.launcher = Plugins.instance().instantiate_launcher(hydra_context, task_function, config)

    def sweep(self, arguments: list[str]) -> Sequence[JobReturn]:
        from runner import app

        return self.launcher.launch(app.tally.jobs, initial_job_idx=0)
