"""What a command would do, before it starts: its runs, which of them are kept and which are impossible and why, their FLOPs, and about
how long they take. `dry_run=true` prints that and ends the program; a sweep prints it in a line before its first run. No world is started
and nothing is written."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from omegaconf import DictConfig
from rich.markup import escape

from runner import environment
from runner.config import folders, overrides
from runner.config.experiment import Experiment
from runner.config.resolve import experiment, identity, key_of, run_name, usable_gpus
from runner.config.rules.machine import MachineLimits, check_fits
from runner.config.values import InvalidConfig, UnsupportedHere, redacted
from runner.launch.processes import cores
from runner.measure import duration, metrics
from runner.output import reader, terminal
from runner.output.reader import UnreadableFile
from runner.peers import everything, missing
from runner.record.result import Result

KEPT = "kept"  # the state of a run that resume=true keeps
TO_DO = "to do"
SKIPPED = ("invalid", "unsupported")  # statuses of runs that were not started


def possible(cfg: DictConfig, gpus: int, seed: int) -> Experiment:
    """The experiment of a configuration. Raises InvalidConfig for a broken rule or what this machine cannot hold,
    UnsupportedHere for what it or its packages cannot do."""
    spec = experiment(cfg, gpus, seed)
    check_here(spec, cfg, gpus)
    return spec


def check_here(spec: Experiment, cfg: DictConfig, gpus: int) -> None:
    """Raises InvalidConfig for what this machine cannot hold, UnsupportedHere for what it or its packages cannot do."""
    gpu_memory = environment.gpu_memory_bytes() if gpus else None
    check_fits(spec, MachineLimits(cores(), environment.memory_bytes(), gpus, gpu_memory))
    if cfg.hardware.name == "cuda" and not gpus:
        raise UnsupportedHere("hardware=cuda: no GPU that this PyTorch can use; hardware=cpu works here")
    chosen = everything().get(spec.variant)  # none: attention=auto
    if chosen is not None and (reason := missing(chosen, spec.device)):
        raise UnsupportedHere(reason)
    if spec.model is not None:
        way_out = "check.enabled=false, fewer layers or a shorter seq_len"
        duration.check_cpu(spec, duration.run_s(spec)[0], way_out)


def refusal(error: InvalidConfig | UnsupportedHere) -> str:
    """The status of a run that is refused."""
    return "invalid" if isinstance(error, InvalidConfig) else "unsupported"


def earlier(folder: Path, key: str) -> Result | None:
    """The earlier result of this run. A file that cannot be read, or that belongs to
    another run, is reported on stderr and not used. Raises InvalidConfig for a result of a newer program, which would be
    overwritten."""
    result = reader.read_result(folder)
    if isinstance(result, Result) and key not in (result.key, key_of(result.config)):
        result = UnreadableFile(folder / reader.RESULT, f"its key is {result.key}, this run's is {key}")
    if isinstance(result, UnreadableFile):
        if result.newer:
            raise InvalidConfig(f"{result}; give another hydra.sweep.dir=FOLDER, or remove it to run anew")
        reader.report_problems([result])
        return None
    return result


def kept(folder: Path, key: str) -> Result | None:
    """The earlier result of this run where `resume=true` keeps it: it is ok and lacks no rounds."""
    before = earlier(folder, key)
    return before if before is not None and before.status == "ok" and not before.unfinished else None


@dataclass(frozen=True)
class Planned:
    """A run. state: `TO_DO`, `KEPT`, or the status of a refused one, with its reason. flops: of an iteration on all ranks.
    seconds: expected, with the start of its world; basis: by what."""

    name: str
    overrides: tuple[str, ...]
    state: str
    reason: str = ""
    flops: int | None = None
    seconds: float = 0.0
    basis: str = ""


@dataclass
class PlannedRuns:
    """The runs that were looked at, of `of` in all."""

    of: int
    runs: list[Planned] = field(default_factory=list)

    def line(self) -> str:
        """The plan in a line."""
        kept = sum(run.state == KEPT for run in self.runs)
        impossible = sum(run.state in SKIPPED for run in self.runs)
        parts = [f"{kept} done before"] if kept else []
        parts += [f"{impossible} impossible"] if impossible else []
        waiting = [run for run in self.runs if run.seconds]
        if waiting:
            parts.append(f"{terminal.flop(sum(run.flops or 0 for run in waiting))} in an iteration of each")
            bases = dict.fromkeys(run.basis for run in waiting)
            parts.append(
                f"about {terminal.seconds(sum(run.seconds for run in waiting))}, estimated by {' and '.join(bases)}"
            )
        some = "" if len(self.runs) == self.of else f"; the first {len(self.runs)} of them"
        return f"Plan: {self.of} run{'s' if self.of > 1 else ''}{some}: {', '.join(parts) or 'nothing is left to do'}"


def show(plan: PlannedRuns) -> None:
    """Print the whole plan."""
    swept_texts, rows = swept([run.overrides for run in plan.runs]), []
    for run in plan.runs:
        # Hydra escapes values
        label = " ".join(re.sub(r"\\(.)", r"\1", text) for text in run.overrides if text in swept_texts)
        flops = "" if run.flops is None else terminal.flop(run.flops)
        about = terminal.seconds(run.seconds) if run.seconds else ""
        rows.append([redacted(label) or run.name, run.state, flops, about, run.reason or run.basis or ""])
    words = ("run", "why, or by what")
    terminal.print_rows(None, ("run", "state", "FLOP", "about", words[1]), rows, ("state", *words), words)
    terminal.out.print(escape(plan.line()), soft_wrap=True)


def swept(jobs: Sequence[Sequence[str]]) -> set[str]:
    """The overrides that not all jobs have."""
    texts: list[set[str]] = [set(job) for job in jobs]
    return {text for job in texts for text in job} - texts[0].intersection(*texts) if texts else set()


def dry_run(arguments: Sequence[str], multirun: bool) -> None:
    """Print what a command would do. Raises InvalidConfig."""
    jobs = overrides.jobs(arguments, multirun)
    with terminal.err.status("planning"):
        planned = made(jobs, folders.sweep_folder(arguments), check_kernels=True)
    show(planned)


def made(
    jobs: Sequence[tuple[str, ...]], folder: Path | None, seconds: float | None = None, check_kernels: bool = False
) -> PlannedRuns:
    """The plan of runs, each given by its overrides. folder: of their sweep. seconds: how long planning may take, for one run at
    least. check_kernels: also whether the kernels can do them, which imports torch."""
    plan, began = PlannedRuns(len(jobs)), time.monotonic()
    seed = folders.seed(folder)
    worlds: set[str] = set()  # that runs so far would have started
    for job in jobs:
        cfg = overrides.composed(job)
        run = Planned(run_name(cfg, usable_gpus(cfg)), job, KEPT)
        try:
            if folder is None or not cfg.resume or not kept(folder / run.name, identity(cfg)):
                run = _planned(run, cfg, seed, worlds, check_kernels)
        except (InvalidConfig, UnsupportedHere) as error:
            run = replace(run, state=refusal(error), reason=str(error))
        plan.runs.append(run)
        if seconds is not None and time.monotonic() - began > seconds:
            break
    return plan


def _planned(run: Planned, cfg: DictConfig, seed: int, worlds: set[str], check_kernels: bool) -> Planned:
    """A run that is to do. Raises InvalidConfig and UnsupportedHere."""
    gpus = usable_gpus(cfg)
    spec = possible(cfg, gpus, seed)
    if check_kernels:
        from runner.measure import kernels  # with torch

        kernels.check(spec)
    seconds, basis = duration.run_s(spec)
    world = str((spec.world_size, spec.device, spec.launch.share_gpu, spec.launch.env))
    if spec.launch.fresh or world not in worlds:
        seconds += duration.start_s(spec)
    worlds.add(world)
    return replace(run, state=TO_DO, flops=metrics.iteration_flops(spec), seconds=seconds, basis=basis)
