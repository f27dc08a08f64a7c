"""What a command would do, before it starts: its runs, which of them are kept and which are impossible and why, their FLOPs, and about
how long they take. `dry_run=true` prints that and ends the program; a sweep prints it in a line before its first run. No world is started
and nothing is written."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException
from rich.markup import escape

from runner import environment, rounds, sweep
from runner.config.experiment import Experiment
from runner.config.groups import groups
from runner.config.resolve import experiment, identity, key_of, run_name, usable_gpus
from runner.config.rules.machine import MachineLimits, check_fits
from runner.config.values import InvalidConfig, Refused, UnsupportedHere, message
from runner.launch.processes import cores
from runner.measure import duration, metrics
from runner.output import reader, terminal
from runner.output.reader import UnreadableFile
from runner.output.record import Result
from runner.peers import everything, missing
from runner.tally import SKIPPED

SHORT_S = 0.5  # of the plan before a sweep; runs beyond it are counted, not looked at
KEPT = "kept"  # the state of a run that resume=true keeps
TO_DO = "to do"


def check_here(spec: Experiment, cfg: DictConfig, gpus: int) -> None:
    """Raises InvalidConfig for what this machine cannot hold, UnsupportedHere for what it or its packages cannot do."""
    gpu_memory = environment.gpu_memory_bytes() if gpus else None
    check_fits(spec, MachineLimits(cores(), environment.memory_bytes(), gpus, gpu_memory))
    if cfg.hardware.name == "cuda" and not gpus:
        raise UnsupportedHere("hardware=cuda: no GPU that this PyTorch can use; hardware=cpu works here")
    chosen = everything().get(spec.variant)  # none: attention=auto
    if chosen is not None and (reason := missing(chosen, spec.device)):
        raise UnsupportedHere(reason)


def refusal(error: InvalidConfig | UnsupportedHere) -> str:
    """The status of a run that is refused."""
    return "invalid" if isinstance(error, InvalidConfig) else "unsupported"


def earlier(folder: Path, key: str) -> Result | None:
    """The earlier result of this run, which may lie in another folder of the sweep. A file that cannot be read, or that belongs to
    another run, is reported on stderr and not used. Raises InvalidConfig for a result of a newer program, which would be
    overwritten."""
    found = reader.read_result(folder)
    if found is None and (other := _elsewhere(folder.parent).get(key)) is not None:
        found = reader.read_result(other)
    if isinstance(found, Result) and key not in (found.key, key_of(found.config)):
        found = UnreadableFile(folder / reader.RESULT, f"its key is {found.key}, this run's is {key}")
    if isinstance(found, UnreadableFile):
        if found.newer:
            raise InvalidConfig(f"{found}; give another hydra.sweep.dir=FOLDER, or remove it to run anew")
        reader.report_problems([found])
        return None
    return found


@lru_cache
def _elsewhere(sweep: Path) -> dict[str, Path]:
    """The folders of a sweep's ok runs that an earlier version named by another key, by the key that they have now."""
    found = ((one, key_of(one.config)) for one in reader.read_results(sweep, below=False)[0] if one.status == "ok")
    return {key: one.folder for one, key in found if key != one.key}


@dataclass(frozen=True)
class Planned:
    """A run. state: `TO_DO`, `KEPT`, the rounds of a run that goes on, or the status of a refused one, with its reason. flops: of
    an iteration on all ranks. seconds: expected, with the start of its world; basis: by what."""

    name: str
    overrides: tuple[str, ...]
    state: str
    reason: str = ""
    flops: int | None = None
    seconds: float = 0.0
    basis: str = ""

    @property
    def is_possible(self) -> bool:
        return self.state not in SKIPPED


@dataclass
class PlannedRuns:
    """The runs that were looked at, of `of` in all."""

    of: int
    runs: list[Planned] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return sum(run.seconds for run in self.runs)

    def line(self) -> str:
        """The plan in a line."""
        kept = sum(run.state == KEPT for run in self.runs)
        impossible = sum(not run.is_possible for run in self.runs)
        parts = [f"{kept} done before"] if kept else []
        parts += [f"{impossible} impossible"] if impossible else []
        waiting = [run for run in self.runs if run.seconds]
        if waiting:
            parts.append(f"{terminal.flop(sum(run.flops or 0 for run in waiting))} in an iteration of each")
            bases = dict.fromkeys(run.basis for run in waiting)
            parts.append(f"about {terminal.seconds(self.seconds)}, estimated by {' and '.join(bases)}")
        some = "" if len(self.runs) == self.of else f"; the first {len(self.runs)} of them"
        return f"Plan: {self.of} run{'s' if self.of > 1 else ''}{some}: {', '.join(parts) or 'nothing is left to do'}"


def show(plan: PlannedRuns) -> None:
    """Print the whole plan."""
    table = terminal.new_table()
    for title in ("run", "state", "FLOP", "about", "why, or by what"):
        table.add_column(title, justify="right" if title in ("FLOP", "about") else "left")
    swept = _swept([run.overrides for run in plan.runs])
    for run in plan.runs:
        label = " ".join(text for text in run.overrides if text in swept) or run.name
        flops = "" if run.flops is None else terminal.flop(run.flops)
        about = terminal.seconds(run.seconds) if run.seconds else ""
        table.add_row(*map(escape, (label, run.state, flops, about, run.reason or run.basis)))
    terminal.show(table, words=("run", "why, or by what"))
    terminal.out.print(escape(plan.line()), soft_wrap=True)


def _swept(jobs: Sequence[Sequence[str]]) -> set[str]:
    """The overrides that not all jobs have."""
    return {text for job in jobs for text in job if not all(text in other for other in jobs)}


class Before(Callback):
    """Plan before the first run; with `dry_run=true` show the plan and end."""

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        if config.dry_run:
            given = OmegaConf.to_container(config.hydra.overrides.task, resolve=False)
            _dry(_Planner([tuple(given)], sweeping=False), [config])  # type: ignore[arg-type]

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        if not config.dry_run and terminal.out.quiet:
            return
        try:
            jobs = _jobs(config)
        except (HydraException, OmegaConfBaseException) as error:
            if config.dry_run:
                raise Refused(message(error)) from None
            return  # Hydra refuses it next
        planner = _Planner(jobs, sweeping=True)
        if config.dry_run:
            _dry(planner, _composed(config, jobs))
        try:
            plan = planner.plan(_composed(config, jobs), time.monotonic() + SHORT_S)
        except (HydraException, OmegaConfBaseException):
            return  # refused next, or recorded by its run
        if len(plan.runs) == plan.of:
            sweep.tally.expect({run.name: run.seconds for run in plan.runs})
        terminal.out.print(escape(plan.line()), soft_wrap=True)


class Shown(SystemExit):
    """The plan was printed, and the program ends. Hydra swallows other exceptions of its callbacks."""


def _dry(planner: _Planner, configs: Any) -> None:
    """Raises Shown, or Refused for a command that would be refused as a whole."""
    try:
        with terminal.err.status("planning"):
            plan = planner.plan(configs, check_kernels=True)
        show(plan)
    except Exception as error:  # else Hydra would warn and start the runs
        raise Refused(message(error)) from error
    raise Shown(0)


def _jobs(config: DictConfig) -> list[tuple[str, ...]]:
    """The overrides of each run of a sweep, as Hydra's sweeper has them."""
    given: Any = OmegaConf.to_container(config.hydra.overrides.task, resolve=False)
    texts = [f"{key}={value}" for key, value in (config.hydra.sweeper.get("params") or {}).items()]
    parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())
    (jobs,) = BasicSweeper.split_arguments(parser.parse_overrides([*texts, *given]), None)
    return [tuple(job) for job in jobs]


def _composed(config: DictConfig, jobs: Sequence[Sequence[str]]) -> Iterator[DictConfig]:
    """The configuration of each run. Hydra composes the choices of groups, which is slow, once for all runs that have them."""
    loader, parser = GlobalHydra.instance().config_loader(), OverridesParser.create()
    made: dict[tuple[str, ...], DictConfig] = {}
    for job in jobs:
        keys: list[Override] = []
        choices: list[str] = []
        for text, override in zip(job, parser.parse_overrides(list(job)), strict=True):
            if override.key_or_group in groups() or override.is_hydra_override():
                choices.append(text)
            else:
                keys.append(override)
        base = made.get(tuple(choices))
        if base is None:
            base = made[tuple(choices)] = loader.load_sweep_config(config, choices)
        cfg = copy.deepcopy(base)
        with open_dict(cfg.hydra):
            cfg.hydra.sweep.dir = config.hydra.sweep.dir
        ConfigLoaderImpl._apply_overrides_to_config(keys, cfg)
        yield cfg


class _Planner:
    """jobs: the overrides of each run. sweeping: whether they are the runs of a sweep."""

    def __init__(self, jobs: Sequence[tuple[str, ...]], sweeping: bool):
        self.jobs, self.sweeping = jobs, sweeping
        self.starts = duration.Starts()
        self.times: dict[str, Path] | None = None
        self.seed: int | None = None

    def plan(self, configs: Any, until: float | None = None, check_kernels: bool = False) -> PlannedRuns:
        """until: a time at which to stop, after one run at least."""
        found = PlannedRuns(len(self.jobs))
        for job, cfg in zip(self.jobs, configs, strict=False):
            found.runs.append(self.run(cfg, job, check_kernels))
            if until is not None and time.monotonic() > until:
                break
        return found

    def run(self, cfg: DictConfig, job: tuple[str, ...], check_kernels: bool) -> Planned:
        gpus = usable_gpus(cfg)
        about = run_name(cfg, gpus), job
        folder = Path(cfg.hydra.sweep.dir) if self.sweeping else None
        try:
            before = earlier(folder / about[0], identity(cfg)) if folder is not None and cfg.resume else None
            if before is not None and before.status != "ok":
                before = None
            goes_on = before is not None and rounds.unfinished(before.plain)
            if before is not None and not goes_on:
                return Planned(*about, KEPT)
            if self.seed is None:
                self.seed = sweep.fresh_seed() if folder is None else sweep.known_seed(folder)
            spec = experiment(cfg, gpus, self.seed)
            check_here(spec, cfg, gpus)
            if check_kernels:
                from runner.measure import kernels  # with torch

                kernels.check(spec)
        except (InvalidConfig, UnsupportedHere) as error:
            return Planned(*about, refusal(error), str(error))
        flops = metrics.flops(spec)
        run = Planned(*about, TO_DO, flops=flops.get("total", flops["forward"]))
        run = self._timed(run, spec, cfg)
        if not goes_on:
            return run
        assert before is not None
        taken = before.plain["timing"]["rounds"]
        left = 1 - taken["done"] / taken["of"]
        return replace(run, state=f"{taken['done']} of {taken['of']} rounds done", seconds=run.seconds * left)

    def _timed(self, run: Planned, spec: Experiment, cfg: DictConfig) -> Planned:
        """The run with its time: that of an earlier run with the same key on this machine, else an estimate."""
        start_s = self.starts.seconds(spec)
        seconds = self._earlier_s(run.name, cfg)
        if seconds is not None:
            return replace(run, seconds=seconds, basis="earlier results")
        seconds, basis = duration.of_run(spec)
        return replace(run, seconds=start_s + seconds, basis=basis)

    def _earlier_s(self, name: str, cfg: DictConfig) -> float | None:
        folders = [Path(cfg.hydra.sweep.dir) / name] if self.sweeping else []
        if self.times is None:
            known = sorted(Path(cfg.output).glob(f"*/*/*/{reader.RESULT}"))  # the newest last
            self.times = {path.parent.name: path.parent for path in known}
        folders += [self.times[name]] if name in self.times else []
        for folder in folders:
            found = reader.read_result(folder)
            if isinstance(found, Result) and found.status == "ok" and found.key == identity(cfg):
                there: Mapping[str, Any] = found.plain.get("environment") or {}
                if there.get("machine_id") == environment.host()["machine_id"] and there.get("seconds"):
                    return float(there["seconds"])
        return None
