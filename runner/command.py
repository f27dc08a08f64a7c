"""A command: its overrides are checked, its folder is made, and its runs are done, in this process or as the jobs of another launcher:
submitit on a Slurm cluster, ray, or joblib on this machine's CPU. Such a job is a process of its own, with worlds of its own
that end with it; all write into the folder of the sweep.

`ab=KEY:FIRST,SECOND`: a sweep over two values of one key, whose runs take turns, and a verdict at its end.

    python -m runner ab=kernel:sdpa_flash,math
    python -m runner ab=attention:ring,zigzag seq_len=8192,16384
    python -m runner ab='window:[512,0],[1024,0]' timing.timing_runs=60

It stands for `-m KEY=FIRST,SECOND order=interleaved:KEY`. A sweep that compares two runs in turns ends in a verdict anyway, one for
each combination of its other keys. What both runs of a pair have in common in a round, such as a slower clock, is taken out."""

from __future__ import annotations

import importlib.util
import shlex
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from hydra import initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig

from runner import app, environment, plan, rounds, sweep
from runner.config import folders, overrides, place, resolve
from runner.config.values import CannotWrite, InvalidConfig, UnsupportedHere, message, shown
from runner.launch import processes
from runner.launch.parents import Head, follow
from runner.output import display, reader, results, summary
from runner.report import page
from runner.report.runs import Run
from runner.report.table import time
from runner.report.verdicts import TOLERANCE, Interval, speed
from runner.rounds import INTERLEAVED

PLUGINS = {  # by launcher: the package that brings it, and our extra
    "submitit_slurm": ("hydra_submitit_launcher", "slurm"),
    "submitit_local": ("hydra_submitit_launcher", "slurm"),
    "ray": ("hydra_ray_launcher", "ray"),
    "joblib": ("hydra_joblib_launcher", "joblib"),
}
CHOICE = "hydra/launcher="


def perform(arguments: Sequence[str], multirun: bool) -> list[Path]:
    """Does the runs of a command. Returns their folders, in the order of its overrides.

    Raises InvalidConfig for overrides that break a rule, before anything is written, and CannotWrite where nothing can be."""
    app.begin()
    where = "."
    try:
        jobs = overrides.jobs(arguments, multirun)
        cfg, elsewhere = overrides.composed(jobs[0]), launcher(arguments)
        where = cfg.output
        if not where:
            raise InvalidConfig("output=: must be a folder; give output=DIR, or leave it out for output=outputs")
        if not multirun:
            with suppress(UnsupportedHere):  # which is recorded
                plan.possible(cfg, resolve.usable_gpus(cfg), folders.fresh_seed())
            return sweep.launch(jobs, folders.create(Path(where, "runs"), folders.now()), multirun)
        folder = folders.sweep_folder(arguments) or folders.create(Path(where, "multirun"), folders.now())
        with folders.locked(folder):
            folders.record(folder, arguments)
            return _elsewhere(jobs, folder, arguments) if elsewhere else sweep.launch(jobs, folder, multirun)
    except HydraException as error:  # of another launcher
        raise InvalidConfig(message(error)) from None
    except OSError as error:
        if isinstance(error, CannotWrite):
            raise
        raise CannotWrite(results.cannot_write(shown(str(error.filename or where)), error)) from None


def _elsewhere(jobs: Sequence[Sequence[str]], folder: Path, arguments: Sequence[str]) -> list[Path]:
    """Does the runs of a sweep as jobs of another launcher. Raises what a job raised."""
    app.tally.jobs = jobs
    own = [text for text in arguments if text.lstrip("+").startswith(overrides.HYDRA)]
    where = folders.SWEEP + folders.quoted(folder.absolute())  # a job may have another working folder
    with initialize_config_module("runner.conf", version_base="1.3"):
        given = [*own, "hydra/sweeper=attention_runner", "hydra.mode=MULTIRUN", where]
        hydra = GlobalHydra.instance().hydra
        done = hydra.multirun("config", execute, given, with_log_configuration=False)  # type: ignore[union-attr]
    app.tally.folders.append(folder)
    app.tally.statuses.extend(result.status for result in reader.read_results(folder, below=False)[0])
    summary.summarize_sweep(folder)
    return [job.return_value for job in done]


def launcher(arguments: Sequence[str]) -> str:
    """The launcher that a command line names, or none. Raises InvalidConfig where it cannot start runs here."""
    name = next((text.removeprefix(CHOICE) for text in reversed(arguments) if text.startswith(CHOICE)), "")
    if name not in PLUGINS:
        return name.removeprefix("basic")  # Hydra's own, which is this process
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


def one_of_several(program: Callable[[], int]) -> int:
    """The exit status of a program that may be one of several processes of a launcher: the first one composes and records, the
    others start ranks for it. Raises parents.Unusable where they cannot meet."""
    found = place.from_environment()
    if found is None:
        return program()
    if found.launcher == "torchrun":  # which puts this process into a session of its own
        processes.die_with_parent()
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


def execute(cfg: DictConfig) -> Path:
    """One job of another launcher, which may have several processes. Returns the folder of its run."""
    hydra = HydraConfig.get()
    folder = Path(hydra.runtime.output_dir)

    def program() -> int:
        app.execute(cfg, folder, hydra.overrides.task, hydra.job.num)
        app.pool.close()
        return 0

    one_of_several(program)
    return folder


PREFIX = "ab="
WHERE = "dry_run=", "order=", "output=", "resume=", "hydra"  # overrides that say nothing of a run's work


def expand(arguments: Sequence[str]) -> list[str]:
    """The overrides with `ab=` written out as a sweep. Raises InvalidConfig."""
    texts: list[str] = []
    for text in arguments:
        if not text.startswith(PREFIX):
            texts.append(text)
            continue
        key, _, both = text.removeprefix(PREFIX).partition(":")
        if not key or not both or len({*overrides.values(f"{key}={both}", True)}) != 2:
            raise InvalidConfig(
                f"{shown(text)}: must be ab=KEY:FIRST,SECOND, two different values; for instance ab=kernel:sdpa_flash,math"
            )
        texts += [f"{key}={both}", f"order={INTERLEAVED}:{key}"]
    return texts


def is_sweep(arguments: Sequence[str]) -> bool:
    """Whether overrides are of a sweep without -m: those of an experiment, of `ab=`, or of a sweep that is resumed."""
    return any(text.startswith(("+experiment=", "order=interleaved:", "resume=true")) for text in arguments)


def sum_up(folder: Path, whole: bool) -> None:
    """Print the table of a sweep and, of a `whole` one, where its page is and what was compared, else what goes on with it."""
    display.sweep_table(summary.sweep_rows(folder))
    display.out.print(f"Sweep: {folder}", soft_wrap=True)
    again = f"python -m runner {shlex.quote(f'resume={folder}')} goes on"
    for line in [page.at_end_of_sweep(folder), *verdicts(folder)] if whole else [again]:
        display.out.print(line, soft_wrap=True, markup=False)


def verdicts(folder: Path) -> list[str]:
    """A line for each two runs in a sweep's folder that were compared in turns."""
    runs = sorted(map(Run.of, reader.read_results(folder)[0]), key=lambda run: run.environment.started_at)
    asked = [[text for text in run.environment.overrides if not text.startswith(WHERE)] for run in runs]
    _, _, key = next((str(run.result.config.get("order")) for run in runs), "").partition(":")
    pairs = [
        pair
        for pair in rounds.alike(asked, [key] if key else rounds.COMPARED)
        if len(pair) == 2 and any(_in_turns(runs[i]) for i in pair)
    ]
    shared = [{*asked[i]} & {*asked[j]} for i, j in pairs]
    common = set.intersection(*shared) if shared else set()
    lines = []
    for (i, j), alike in zip(pairs, shared, strict=True):
        about = " ".join(text for text in asked[i] if text in alike - common)
        names = [" ".join(text for text in asked[k] if text not in alike) for k in (i, j)]
        lines.append(f"{about}: " * bool(about) + _verdict(names, [runs[i], runs[j]]))
    return lines


def _in_turns(run: Run) -> bool:
    return run.result.timing is not None and run.result.timing.rounds.of > 1


def _verdict(names: list[str], runs: list[Run]) -> str:
    for name, run in zip(names, runs, strict=True):
        if not run.ok:
            return f"no verdict: {name} is {run.status}" + (f", {run.result.reason}" if run.result.reason else "")
    first, second = runs
    verdict, ratio = speed(first, second, "total", TOLERANCE, paired=True)
    times = f"{time(first, 'total')} → {time(second, 'total')} ms"
    return f"{names[1]} against {names[0]}: {verdict}, {_by(verdict, ratio)} ({times})"


def _by(verdict: str, ratio: Interval | None) -> str:
    if ratio is None:
        return "as an interval needs 6 samples; give more timing.timing_runs"
    low, high = (f"{end - 1:+.1%}" for end in ratio)
    more = "; more timing.timing_runs narrows it" if verdict == "inconclusive" else ""
    return f"{low} to {high} of its time{more}"
