"""Runs of a sweep that another of Hydra's launchers starts: submitit on a Slurm cluster, ray, or joblib on this machine's
CPU. Each job is a process of its own, with worlds of its own that end with it; all write into the folder of the sweep."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, open_dict

from runner import app, environment
from runner.config import folders, place, resolve
from runner.config.values import Refused
from runner.launch.parents import Head, follow
from runner.output import reader, summary

PLUGINS = {  # by launcher: the package that brings it, and our extra
    "submitit_slurm": ("hydra_submitit_launcher", "slurm"),
    "submitit_local": ("hydra_submitit_launcher", "slurm"),
    "ray": ("hydra_ray_launcher", "ray"),
    "joblib": ("hydra_joblib_launcher", "joblib"),
}
CHOICE = "hydra/launcher"
OURS = "attention_runner"

resolve.register()  # a job's process imports this module, and then composes


def chosen(arguments: list[str]) -> str:
    """The launcher that a command line names. Raises Refused where it cannot start runs here."""
    names = [text.partition("=")[2] for text in arguments if text.startswith(f"{CHOICE}=")]
    name = names[-1] if names else OURS
    if name in PLUGINS and not _installed(PLUGINS[name][0]):
        raise Refused(f"{CHOICE}={name}: not installed; pip install -e '.[{PLUGINS[name][1]}]', or leave it out")
    if name in PLUGINS and (joined := place.joined()) is not None:
        raise Refused(f"{CHOICE}={name}: {joined.launcher} has started this program's ranks already; use one of them")
    on_cpu = any(text.removeprefix("++") == "hardware=cpu" for text in arguments)
    if name == "joblib" and not on_cpu and (gpus := environment.gpu_count()):
        raise Refused(
            f"{CHOICE}=joblib: runs at the same time would share this machine's {gpus} GPUs; use hardware=cpu, or leave it out"
        )
    return name


def _installed(plugin: str) -> bool:
    return importlib.util.find_spec("hydra_plugins") is not None and bool(
        importlib.util.find_spec(f"hydra_plugins.{plugin}")
    )


def execute(cfg: DictConfig) -> None:
    """One job. Of a job with several processes, the first one composes and records, the others start ranks for it."""
    found = place.from_environment()
    if found is not None and not found.is_head:
        follow(found)
        return
    head = None if found is None else Head(found)
    place.join(found)
    app.pool.head = head
    try:
        app.execute(cfg)
    finally:
        app.pool.close()
        if head is not None:
            head.end(0)
        app.pool.head = None
        place.join(None)


class Elsewhere(Callback):
    """Fix the sweep's folder before the jobs of another launcher start, and sum it up once all have ended."""

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        if _in_this_process(config):
            return
        folder = str(Path(config.hydra.sweep.dir).absolute())
        with open_dict(config):
            config.hydra.sweep.dir = folder
            # a job composes anew, at a later time
            config.hydra.overrides.hydra.append(f"hydra.sweep.dir={folders.quoted(folder)}")

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        if _in_this_process(config):
            return
        folder = Path(config.hydra.sweep.dir)
        app.tally.folders.append(folder)
        app.tally.statuses.extend(result.status for result in reader.read_results(folder, below=False)[0])
        summary.summarize_sweep(folder)


def _in_this_process(config: DictConfig) -> bool:
    return config.hydra.runtime.choices.get(CHOICE, OURS) not in PLUGINS
