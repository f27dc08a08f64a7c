"""The main process's part of a run: from a composed configuration to a recorded result. No torch in this process."""

from __future__ import annotations

import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from rich.markup import escape

from runner import environment, plan, rounds, seeds
from runner.config.experiment import Experiment
from runner.config.place import joined
from runner.config.resolve import experiment, identity, run_name, usable_gpus
from runner.config.values import CannotWrite, InvalidConfig, Terminated, UnsupportedHere, plain
from runner.launch.files import WorldSpec
from runner.launch.outcome import Outcome
from runner.launch.pool import Pool
from runner.measure import metrics, ncu
from runner.measure.statistics import Samples
from runner.output import display, results, summary
from runner.output.record import Result
from runner.redaction import redacted
from runner.tally import Tally

pool = Pool()
tally = Tally()  # of this command


def begin() -> None:
    """Forget an earlier command of this process. The worlds stay, and the seed: all runs of a process have the same inputs."""
    global tally
    tally = Tally()


@dataclass(frozen=True)
class Unfinished:
    """A run with rounds still to do: its number in the sweep, its folder, and its result so far."""

    number: int
    folder: Path
    value: dict[str, Any]

    @property
    def done(self) -> int:
        return int(self.value["timing"]["rounds"]["done"])

    @property
    def rounds(self) -> int:
        return int(self.value["timing"]["rounds"]["of"])


def execute(cfg: DictConfig, compared: int = 1) -> Unfinished | None:
    """Does one of Hydra's jobs: a whole run, or the first round of a run that takes turns with others. A run that fails is
    recorded as a result and raises nothing. compared: the number of runs that a sweep compares, including this one.
    Returns the run if it has rounds still to do. `tally.error` is what ends the command: nothing can be written."""
    tally.busy = True
    unfinished = None
    try:
        unfinished = _execute(cfg, compared)
    except CannotWrite as error:  # Hydra would print it
        tally.error = error
    tally.busy = False
    return unfinished


def _execute(cfg: DictConfig, compared: int) -> Unfinished | None:
    hydra = HydraConfig.get()
    folder = Path(hydra.runtime.output_dir)
    sweeping = hydra.mode == RunMode.MULTIRUN
    place = f"run {tally.place(hydra.job.num)}" if sweeping else ""
    if sweeping and cfg.resume:
        try:
            earlier = plan.earlier(folder, identity(cfg))
        except InvalidConfig as error:
            tally.over(folder.name, plan.refusal(error), ran=False)
            display.err.print(escape(f"invalid: {error}"), soft_wrap=True)
            return None
        if earlier is not None and earlier.status == "ok":
            _note_sweep(folder.parent)
            if not rounds.unfinished(earlier.plain):
                display.out.print(f"{earlier.name}: kept from before")
                tally.over(folder.name, "ok", ran=False)
                return None
            try:
                rest = _resumed(cfg, earlier.folder, earlier.plain, hydra.job.num)
            except (InvalidConfig, UnsupportedHere) as error:
                tally.over(folder.name, plan.refusal(error), ran=False)
                note = f"{earlier.name}: kept as it is, without its other rounds: {error}"
                display.err.print(escape(note), soft_wrap=True)
                return None
            if isinstance(rest, Unfinished):
                return rest
            display.out.print(f"{earlier.name}: {rest}, so it is run anew", soft_wrap=True)
    with results.writing(folder.parent):
        seed = seeds.of_folder(folder.parent) if sweeping and cfg.seed is None else seeds.fresh()
    value = run(cfg, folder, seed, place, compared)
    value["environment"]["overrides"] = list(hydra.overrides.task)
    if sweeping:
        return _recorded(value, folder, hydra.job.num)
    tally.over(folder.name, value["status"])
    with results.writing(folder):
        results.write_result(folder, value)
    _track(value, folder)
    result = Result.of(value, folder)
    if result.status == "ok" or (result.correctness and result.correctness.tensors):
        display.run_table(result)
    if result.status != "ok":
        display.err.print(f"[red]{result.status}[/]: {escape(result.reason or '')}", soft_wrap=True)
    shown = folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder
    display.out.print(f"Result: {shown}", soft_wrap=True)
    return None


def _resumed(cfg: DictConfig, folder: Path, earlier: dict[str, Any], number: int) -> Unfinished | str:
    """An interrupted run, ready for its missing rounds with the limits of this command; or the reason why it cannot continue:
    samples are missing, or new samples would not be comparable. Raises InvalidConfig and UnsupportedHere."""
    if _taken(folder, earlier) is None:
        return "samples of its earlier rounds are missing"
    now = experiment(cfg, usable_gpus(cfg), earlier["experiment"]["seed"])
    if changed := environment.changed(earlier["environment"], _surroundings(now)):
        return f"its environment has changed since its first rounds ({', '.join(changed)})"
    earlier["config"]["tracker"] = plain(cfg.tracker)  # with what the file has without its secrets
    earlier["experiment"]["launch"] = asdict(now.launch)
    return Unfinished(number, folder, earlier)


def _surroundings(spec: Experiment) -> dict[str, Any]:
    """The part of a result's environment that is known before the run."""
    found = dict(environment.host())
    found["variables"] = found["variables"] | _variables(spec)
    if spec.device == "cuda":
        found |= {"topology": environment.topology(), "gpus_before": environment.gpu_state()}
    return found


def _taken(folder: Path, value: dict[str, Any]) -> list[Samples] | None:
    """The samples of a result: for each rank, a list for each pass. None if some are missing in the file, or it is another run's. The
    file is written before the result, so it may contain one round more, which is left out."""
    try:
        samples = results.read_samples(folder / "samples.parquet")
    except (OSError, ValueError, KeyError):  # ValueError: no parquet file
        return None
    passes = set(value["timing"]["passes"]) - {"total"}
    if len(samples) != value["experiment"]["world_size"] or any(set(rank) != passes for rank in samples):
        return None
    return rounds.first(samples, sum(rounds.of_samples(value)))


def _recorded(value: dict[str, Any], folder: Path, number: int) -> Unfinished | None:
    """Writes the result of a run of a sweep and prints a line. Returns the run if it has rounds still to do."""
    more = rounds.unfinished(value)
    if value["config"].get("until_limit"):
        tally.note_failure(OmegaConf.create(value["config"]), value["status"], value["reason"])
    ran = value.get("experiment") is not None
    share = 1 / value["timing"]["rounds"]["of"] if ran and value.get("timing") else 1.0
    tally.over(folder.name, None if more else value["status"], share, ran)
    if not more:
        _track(value, folder)
    with results.writing(folder):
        results.write_result(folder, value)
        _note_sweep(folder.parent)
    where = "; ".join(filter(None, [tally.place(number), tally.counts()]))
    result = Result.of(value, folder)
    display.out.print(f"{display.run_line(result)} ({where})", soft_wrap=True)
    if (result.group("timing").get("phase_runs") or result.config.get("phases") == "table") and not more:
        display.phases(result)
    return Unfinished(number, folder, value) if more else None


def _track(value: dict[str, Any], folder: Path) -> None:
    from runner import tracker  # few runs need it

    if reason := tracker.track(value, folder):
        display.err.print(escape(reason), soft_wrap=True)


def further(earlier: Unfinished) -> Unfinished | None:
    """Does the next round of a run. Returns None if it was the last round, or if it failed. An unexpected error is recorded
    as a crash of this run, and the sweep goes on."""
    try:
        return _next_round(earlier)
    except Exception as error:
        if _stopping(error):
            raise
        with results.writing(earlier.folder), (earlier.folder / "run.log").open("a") as log:
            log.write(redacted("".join(traceback.format_exception(error))))
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}; see run.log"
        failed = results.result(status="crash", reason=reason, artifacts={"log": "run.log"}, **_about(earlier.value))
        _ended(earlier, failed)
        return None


def _stopping(error: BaseException | None) -> bool:
    """Whether an error was raised while Ctrl-C or SIGTERM unwound the program."""
    return error is not None and (isinstance(error, (KeyboardInterrupt, Terminated)) or _stopping(error.__context__))


def _about(value: dict[str, Any]) -> dict[str, Any]:
    """The fields that a result keeps when a later round fails."""
    return {key: value[key] for key in ("key", "name", "config", "experiment", "chosen", "environment")}


def _ended(earlier: Unfinished, failed: dict[str, Any]) -> None:
    """Record a run whose next round failed."""
    with results.writing(earlier.folder):
        for name in ("samples.parquet", "phases.csv", "kernels.csv", "kernel_times.csv"):  # a failed run has no times
            (earlier.folder / name).unlink(missing_ok=True)
    failed["reason"] = f"in round {earlier.done + 1} of {earlier.rounds}: {failed['reason']}"
    _recorded(failed, earlier.folder, earlier.number)


def _next_round(earlier: Unfinished) -> Unfinished | None:
    folder, value, this = earlier.folder, earlier.value, earlier.done
    spec = Experiment.from_plain(value["experiment"])
    started = time.monotonic()
    place = f"run {tally.place(earlier.number)}"
    with _progress(spec, place, f", round {this + 1} of {earlier.rounds}") as progress:
        outcome = _in_world(rounds.part(spec, this, earlier.rounds), folder, progress)
    if outcome.status != "ok" or outcome.result["status"] != "ok":
        _ended(earlier, _failed(outcome, folder, _about(value)))
        return None
    with results.writing(folder):
        samples = rounds.first(results.read_samples(folder / "samples.parquet"), sum(rounds.of_samples(value)))
        if samples is None:
            raise RuntimeError(f"{folder / 'samples.parquet'}: fewer samples than the finished rounds took")
        for rank, later in zip(samples, outcome.result["samples"], strict=True):
            for which, ms in later.items():
                rank[which] += ms
        value = rounds.joined(value, samples, outcome.result, environment.period(started))
        if spec.device == "cuda":
            value["environment"]["gpus_after"] = environment.gpu_state()
        results.write_samples(folder / "samples.parquet", samples, rounds.of_samples(value))
    return _recorded(value, folder, earlier.number)


def _note_sweep(folder: Path) -> None:
    if folder not in tally.folders:
        tally.folders.append(folder)
    summary.summarize_sweep(folder)


def run(cfg: DictConfig, folder: Path, seed: int, place: str = "", compared: int = 1) -> dict[str, Any]:
    """Runs the experiment, or the first round of a run that takes turns with others, and returns the result, whatever the
    outcome. Writes the run's other files. seed: used if the configuration has none. place: the run's place in its sweep,
    for messages. compared: the number of runs that the sweep compares, including this one."""
    started = time.monotonic()
    name = run_name(cfg, usable_gpus(cfg))
    config = {key: value for key, value in plain(cfg).items() if key != "hydra"}
    about: dict[str, Any] = {"key": identity(cfg), "name": name, "config": config}
    try:
        gpus = usable_gpus(cfg)
        spec = experiment(cfg, gpus, seed)
        if place and (reason := tally.beyond_limit(cfg)):
            raise UnsupportedHere(reason)
        plan.check_here(spec, cfg, gpus)
    except (InvalidConfig, UnsupportedHere) as error:
        about["environment"] = environment.host() | environment.period(started)
        return results.result(status=plan.refusal(error), reason=str(error), **about)
    about |= {"experiment": spec.plain(), "environment": _surroundings(spec)}
    folder.mkdir(parents=True, exist_ok=True)
    of = rounds.number(cfg.order, spec, compared)
    with _progress(spec, place) as progress:
        outcome = _in_world(rounds.part(spec, 0, of), folder, progress)
    about["environment"] |= environment.period(started)
    if spec.device == "cuda":
        about["environment"]["gpus_after"] = environment.gpu_state()
    if outcome.status != "ok":
        return _failed(outcome, folder, about)
    taken = outcome.result.pop("experiment", about["experiment"])  # with attention=auto, the experiment that was chosen
    about["experiment"] = {**taken, "timing": asdict(spec.timing)}
    if outcome.result.get("timing"):
        outcome.result["timing"]["rounds"] = rounds.begun(outcome.result, of, about["environment"]["started_at"])
        if spec.timing.counters:
            outcome.result["timing"]["counters"] = ncu.count(Experiment.from_plain(about["experiment"]))
    return _record(outcome.result, folder, about)


def _variables(spec: Experiment) -> dict[str, str]:
    """The environment variables that the run sets for its ranks."""
    return {name: str(value) for name, value in (spec.launch.env or {}).items()}


def _progress(spec: Experiment, place: str, note: str = "") -> display.Progress:
    flops = metrics.flops(spec)
    ranks = f"{spec.world_size} rank{'s' if spec.world_size > 1 else ''}"
    title = f"{spec.variant}, {ranks}, {spec.workload.describe()}{note}"
    return display.Progress(title, flops.get("total", flops["forward"]), place, tally.counts)


def _failed(outcome: Outcome, folder: Path, about: dict[str, Any]) -> dict[str, Any]:
    """The result of a run that failed, without times."""
    artifacts = {"log": "run.log"} if (folder / "run.log").exists() else None
    if outcome.status == "ok":  # a later round that is incorrect
        found = outcome.result
        about |= {"correctness": found["correctness"]}
        return results.result(status=found["status"], reason=found["reason"], artifacts=artifacts, **about)
    lost = {"rank": outcome.rank, "phase": outcome.phase, "log_tail": outcome.log_tail}
    failure = lost if outcome.world_lost else None
    limit, reason = about["experiment"]["launch"]["memory_limit_gb"], outcome.reason
    if outcome.status == "oom" and limit is not None:
        reason = f"{reason} (launch.memory_limit_gb={limit:g})"
    return results.result(status=outcome.status, reason=reason, failure=failure, artifacts=artifacts, **about)


def world_of(spec: Experiment) -> WorldSpec:
    launch, variables = spec.launch, tuple(sorted(_variables(spec).items()))
    place = joined()
    gpus = environment.gpu_count() if spec.device == "cuda" else 0
    agents = place.agents(spec.world_size, gpus) if place else 1
    return WorldSpec(
        spec.world_size, spec.device, launch.nodes, agents, launch.start_timeout_s, launch.share_gpu, variables
    )


def _in_world(spec: Experiment, folder: Path, progress: display.Progress) -> Outcome:
    launch, arguments = spec.launch, {"experiment": spec.plain(), "folder": str(folder.absolute())}
    log, job = folder / "run.log", "runner.job:run"
    return pool.call(world_of(spec), job, arguments, launch.timeout_s, log, progress, fresh=launch.fresh)


def _record(measured: dict[str, Any], folder: Path, about: dict[str, Any]) -> dict[str, Any]:
    """Writes the run's tables and builds its result."""
    with results.writing(folder):
        artifacts = results.write_tables(folder, measured)
    about["environment"] |= measured.pop("environment")
    about["environment"] |= {key: measured.pop(key, None) for key in ("ceilings", "estimate")}
    return results.result(**about, **measured, artifacts=artifacts)
