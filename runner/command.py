"""A command: its overrides are checked, its folder is made, and Hydra does its runs, in this process or as the jobs of another launcher:
submitit on a Slurm cluster, ray, or joblib on this machine's CPU. Such a job is a process of its own, with worlds of its own
that end with it; all write into the folder of the sweep."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from hydra.errors import HydraException
from hydra.types import TaskFunction
from omegaconf import DictConfig

from runner import app, environment, plan
from runner.config import folders, overrides, place, resolve
from runner.config.values import CannotWrite, InvalidConfig, UnsupportedHere, message, shown
from runner.launch.parents import Head, follow
from runner.output import reader, results, summary

PLUGINS = {  # by launcher: the package that brings it, and our extra
    "submitit_slurm": ("hydra_submitit_launcher", "slurm"),
    "submitit_local": ("hydra_submitit_launcher", "slurm"),
    "ray": ("hydra_ray_launcher", "ray"),
    "joblib": ("hydra_joblib_launcher", "joblib"),
}
CHOICE = "hydra/launcher="

resolve.register()  # a job's process imports this module, and then composes


@contextmanager
def command(arguments: Sequence[str], multirun: bool) -> Iterator[tuple[TaskFunction, list[str]]]:
    """What surrounds the runs of a command. Yields what Hydra calls for each of them, and the overrides as Hydra needs them.

    Raises InvalidConfig and errors of Hydra and OmegaConf for overrides that break a rule, before anything is written, and
    CannotWrite where nothing can be."""
    resolve.register()
    app.begin()
    where = "."
    # Hydra only warns of a searchpath that does not exist
    warnings.filterwarnings("error", "provider=hydra.searchpath", UserWarning)
    try:
        cfg = overrides.check(arguments, multirun)
        elsewhere = launcher(arguments) in PLUGINS
        where = cfg.output
        if not where:
            raise InvalidConfig("output=: must be a folder; give output=DIR, or leave it out for output=outputs")
        if not multirun:
            with suppress(UnsupportedHere):  # which is recorded
                plan.possible(cfg, resolve.usable_gpus(cfg), folders.fresh_seed())
            folder = folders.create(Path(where, "runs"), folders.now())
            run_dir = folders.quoted(f"{folder}/${{run_name:}}")
            yield app.execute, [f"hydra.run.dir={run_dir}", *arguments]
        else:
            folder = folders.sweep_folder(arguments) or folders.create(Path(where, "multirun"), folders.now())
            with folders.locked(folder):
                folders.record_seed(folder)
                texts = overrides.for_each_run(arguments)
                # a job elsewhere may have another working folder
                yield execute if elsewhere else app.execute, [*texts, folders.SWEEP + folders.quoted(folder.absolute())]
                if elsewhere:
                    app.tally.folders.append(folder)
                    app.tally.statuses.extend(result.status for result in reader.read_results(folder, below=False)[0])
                    summary.summarize_sweep(folder)
    except UserWarning as error:
        raise InvalidConfig(f"{message(error)} Give a folder that exists, or pkg://PACKAGE") from None
    except OSError as error:
        if isinstance(error, (CannotWrite, HydraException)):
            raise
        raise CannotWrite(results.cannot_write(shown(str(error.filename or where)), error)) from None
    if app.tally.error is not None:
        raise app.tally.error


def launcher(arguments: Sequence[str]) -> str:
    """The launcher that a command line names, or none. Raises InvalidConfig where it cannot start runs here."""
    name = next((text.removeprefix(CHOICE) for text in reversed(arguments) if text.startswith(CHOICE)), "")
    if name not in PLUGINS:
        return name
    plugin, extra = PLUGINS[name]
    if not _installed(plugin):
        raise InvalidConfig(f"{CHOICE}{name}: not installed; pip install -e '.[{extra}]', or leave it out")
    if (joined := place.joined()) is not None:
        raise InvalidConfig(
            f"{CHOICE}{name}: {joined.launcher} has started this program's ranks already; use one of them"
        )
    on_cpu = "hardware=cpu" in arguments
    if name == "joblib" and not on_cpu and (gpus := environment.gpu_count()):
        raise InvalidConfig(
            f"{CHOICE}joblib: runs at the same time would share this machine's {gpus} GPUs; use hardware=cpu, or leave it out"
        )
    return name


def _installed(plugin: str) -> bool:
    return bool(importlib.util.find_spec("hydra_plugins") and importlib.util.find_spec(f"hydra_plugins.{plugin}"))


def one_of_several(found: place.Place | None, program: Callable[[], int]) -> int:
    """The exit status of a program that may be one of several processes of a launcher: the first one composes and records, the
    others start ranks for it. Raises parents.Unusable where they cannot meet."""
    if found is None:
        return program()
    if not found.is_head:
        return follow(found)
    head = app.pool.head = Head(found)
    place.join(found)
    status = 1
    try:
        status = program()
        return status
    except InvalidConfig:
        status = 2  # of the others, too
        raise
    finally:
        app.pool.close()
        head.end(status)
        app.pool.head = None
        place.join(None)


def execute(cfg: DictConfig) -> None:
    """One job of another launcher, which may have several processes."""

    def program() -> int:
        app.execute(cfg)
        app.pool.close()
        return 0

    one_of_several(place.from_environment(), program)
    if app.tally.error is not None:
        raise app.tally.error
