"""The main process's part of a run: from a composed configuration to a recorded result, and what the runs of a command share: where the
sweep is, the lengths that failed, its folders. No torch in this process."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from rich.markup import escape

from runner import environment, plan, rounds
from runner.config import folders
from runner.config.experiment import Experiment
from runner.config.place import joined
from runner.config.resolve import identity, run_name, series, usable_gpus
from runner.config.values import InvalidConfig, UnsupportedHere, plain, redacted
from runner.launch.files import WorldSpec
from runner.launch.outcome import Outcome
from runner.launch.worlds import Pool
from runner.measure import metrics, ncu
from runner.output import display, results, summary
from runner.output.terminal import seconds
from runner.record.fields import Failure, Rounds
from runner.record.result import Result

LIMITS = ("oom", "timeout", "crash")  # statuses that end a series of lengths


class Tally:
    """Of one command of this process. runs: None where another program counts them. jobs: those of another launcher."""

    def __init__(self) -> None:
        self.runs: int | None = None
        self.started = time.monotonic()
        self.expected: dict[str, float] = {}  # seconds by a run's name, from a plan of all runs
        self.left: dict[str, float] = {}  # the share of each run that is not over
        self.spent = 0.0  # expected seconds of what was run
        self.statuses: list[str] = []
        self.until_limit = False  # a run that ends out of memory is no failure
        self.folders: list[Path] = []  # of sweeps
        self.jobs: Sequence[Sequence[str]] = ()
        self._failed: dict[str, tuple[int, str]] = {}  # the shortest length that failed and how, by series

    def expect(self, by_name: Mapping[str, float]) -> None:
        self.expected = dict(by_name)

    def over(self, name: str, status: str | None, share: float = 1.0, ran: bool = True) -> None:
        """So large a share of a run has ended; status: of one that is wholly over. ran: whether it took time."""
        if ran:
            self.spent += share * self._weight(name)
        self.left[name] = 0.0 if status else self.left.get(name, 1.0) - share
        if status:
            self.statuses.append(status)

    def _weight(self, name: str) -> float:
        return self.expected.get(name, 0.0) if self.expected else 1.0

    def seconds_left(self) -> float | None:
        """By what the runs so far took of the time expected for them; before the first ended, by the plan alone. None where
        nothing is known."""
        if self.runs is None:
            return None
        if self.expected:
            rest = sum(weight * self.left.get(name, 1.0) for name, weight in self.expected.items())
        else:
            rest = max(0, self.runs - len(self.left)) + sum(self.left.values())
        if self.spent:
            return rest * (time.monotonic() - self.started) / self.spent
        return rest if self.expected else None

    def place(self, number: int) -> str:
        """The place of run `number` (from 0) in its sweep, and the time since the start: `3 of 11, 24 s`."""
        of = f" of {self.runs}" if self.runs is not None else ""
        return f"{number + 1}{of}, {time.monotonic() - self.started:.0f} s"

    def counts(self) -> str:
        """`2 done, 1 failed, 0 skipped, about 3 min left`; kept runs are done. Empty where another program counts the runs."""
        if self.runs is None:
            return ""
        done, skipped = self.statuses.count("ok"), sum(status in plan.SKIPPED for status in self.statuses)
        text = f"{done} done, {len(self.statuses) - done - skipped} failed, {skipped} skipped"
        left = self.seconds_left()
        return text if not left else f"{text}, about {seconds(left)} left"

    def exit_status(self) -> int:
        """1 when a run failed, where out of memory is no failure with `until_limit`; else 0 when a run is ok or there was none,
        2 when all are invalid, and 1 when none could be done here."""
        statuses = {*self.statuses}
        if not statuses or "ok" in statuses:
            return int(bool(statuses - {"ok", *plan.SKIPPED, *["oom"] * self.until_limit}))
        return 2 if statuses == {"invalid"} else 1

    def note_failure(self, cfg: DictConfig, status: str, reason: str | None) -> None:
        """Remembers the length of a run that failed, for `beyond_limit`."""
        if status in LIMITS and cfg.seq_len is not None:
            key, length = series(cfg), cfg.seq_len
            if key not in self._failed or length < self._failed[key][0]:
                self._failed[key] = length, f"{status}: {reason}"

    def beyond_limit(self, cfg: DictConfig) -> str | None:
        """With `until_limit`, why a run is not started: a shorter one that differs in its length alone failed."""
        failure = self._failed.get(series(cfg)) if cfg.until_limit and cfg.seq_len is not None else None
        if failure is None or cfg.seq_len <= failure[0]:
            return None
        length, how = failure
        return f"seq_len={cfg.seq_len}: not run, as seq_len={length} ended as {how}; until_limit=false runs it"


pool = Pool()
tally = Tally()  # of this command


def begin() -> None:
    """Forget an earlier command of this process. The worlds stay, and the seed: all runs of a process have the same inputs."""
    global tally
    tally = Tally()


@dataclass(frozen=True)
class Unfinished:
    """A run with rounds still to do: its number in the sweep, and its result so far."""

    number: int
    result: Result

    @property
    def rounds(self) -> Rounds:
        assert self.result.timing is not None
        return self.result.timing.rounds


def execute(
    cfg: DictConfig, folder: Path, overrides: Sequence[str], number: int | None = None, compared: int = 1
) -> Unfinished | None:
    """Does a whole run, or the first round of a run that takes turns with others. A run that fails is recorded as a result and raises
    nothing. number: of the run in its sweep. compared: the number of runs that the sweep compares, including this one. Returns
    the run if it has rounds still to do."""
    if number is not None and cfg.resume:
        try:
            status = "ok" if plan.kept(folder, identity(cfg)) else None
        except InvalidConfig as error:
            status = plan.refusal(error)
            display.err.print(escape(f"{status}: {error}"), soft_wrap=True)
        if status:
            tally.over(folder.name, status, ran=False)
            if status == "ok":
                display.out.print(f"{folder.name}: kept from before")
                _note_sweep(folder.parent)
            return None
    seed = folders.seed(None if number is None else folder.parent)
    result = run(cfg, folder, seed, "" if number is None else f"run {tally.place(number)}", compared)
    about = replace(result.environment, overrides=[*overrides])
    return _recorded(replace(result, environment=about), number)


def _gpus(key: str, spec: Experiment) -> dict[str, Any]:
    return {key: environment.gpu_state()} if spec.device == "cuda" else {}


def _recorded(result: Result, number: int | None) -> Unfinished | None:
    """Writes the result of a run, whose number in its sweep is None for a single one, and prints it. Returns the run if it has
    rounds still to do."""
    result = replace(result, reason=redacted(result.reason))  # which is printed, too
    folder, more = result.folder, result.unfinished
    if result.config.get("until_limit"):
        tally.note_failure(OmegaConf.create(result.config), result.status, result.reason)
    share = 1 / result.timing.rounds.of if result.timing else 1.0
    tally.over(folder.name, None if more else result.status, share, ran=result.experiment is not None)
    with results.writing(folder):
        results.write_result(result)
        if number is not None:
            _note_sweep(folder.parent)
    if not more and result.group("tracker").get("name") == "mlflow":
        from runner import tracker  # few runs need it

        if reason := tracker.track(result):
            display.err.print(escape(reason), soft_wrap=True)
    _show(result, number, more)
    return Unfinished(number, result) if more and number is not None else None


def _show(result: Result, number: int | None, more: bool) -> None:
    if number is not None:
        where = "; ".join(filter(None, [tally.place(number), tally.counts()]))
        display.out.print(f"{display.run_line(result)} ({where})", soft_wrap=True)
        if (result.group("timing").get("phase_runs") or result.config.get("phases") == "table") and not more:
            display.phases(result)
        return
    if result.status == "ok" or (result.correctness and result.correctness.tensors):
        display.run_table(result)
    if result.status != "ok":
        display.err.print(f"[red]{result.status}[/]: {escape(result.reason or '')}", soft_wrap=True)
    folder = result.folder
    shown = folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder
    display.out.print(f"Result: {shown}", soft_wrap=True)


def further(earlier: Unfinished) -> Unfinished | None:
    """Does the next round of a run. Returns None if it was the last round, or if it failed."""
    result, of = earlier.result, earlier.rounds.of
    folder, done, started = result.folder, earlier.rounds.done, time.monotonic()
    assert result.experiment is not None
    spec = Experiment.from_plain(result.experiment)
    outcome = _job(spec, result, done, of, f"run {tally.place(earlier.number)}")
    with results.writing(folder):
        if outcome.status == "ok" and outcome.result[0].status == "ok":
            later, tables = outcome.result
            samples = results.read_samples(folder / "samples.parquet")
            for rank, more in zip(samples, tables.samples, strict=True):
                for which, ms in more.items():
                    rank[which] += ms
            result = rounds.joined(result, samples, _ended(later, started, spec))
            results.write_samples(folder / "samples.parquet", samples, rounds.of_samples(result))
        else:
            result = _failed(outcome, result, spec)
            result = replace(result, reason=f"in round {done + 1} of {of}: {result.reason}")
            for path in (*folder.glob("*.csv"), folder / "samples.parquet"):  # a failed run has no times
                path.unlink(missing_ok=True)
    return _recorded(result, earlier.number)


def _note_sweep(folder: Path) -> None:
    if folder.absolute() not in map(Path.absolute, tally.folders):
        tally.folders.append(folder)
    summary.summarize_sweep(folder)


def run(cfg: DictConfig, folder: Path, seed: int, place: str = "", compared: int = 1) -> Result:
    """Runs the experiment, or the first round of a run that takes turns with others, and returns the result, whatever the
    outcome. Writes the run's other files. seed: used if the configuration has none. place: the run's place in its sweep,
    for messages. compared: the number of runs that the sweep compares, including this one."""
    started, gpus = time.monotonic(), usable_gpus(cfg)
    config = {key: value for key, value in plain(cfg).items() if key != "hydra"}
    result = Result.begun(folder, identity(cfg), run_name(cfg, gpus), config)
    try:
        spec = plan.possible(cfg, gpus, seed)
        if place and (reason := tally.beyond_limit(cfg)):
            raise UnsupportedHere(reason)
    except (InvalidConfig, UnsupportedHere) as error:
        return _ended(result.anew(status=plan.refusal(error), reason=str(error)), started)
    here = result.environment
    here = replace(here, variables=here.variables | spec.launch.variables, **_gpus("gpus_before", spec))
    if spec.device == "cuda":
        here = replace(here, topology=environment.topology())
    result = replace(result, experiment=spec.plain(), environment=here)
    folder.mkdir(parents=True, exist_ok=True)
    of = rounds.number(cfg.order, spec, compared)
    outcome = _job(spec, result, 0, of, place)
    if outcome.status != "ok":
        return _ended(_failed(outcome, result, spec), started, spec)
    measured, tables = outcome.result
    with results.writing(folder):
        artifacts = results.write_tables(folder, tables)
    taken = measured.experiment | {"timing": asdict(spec.timing)}  # of all rounds
    result = _ended(replace(measured, experiment=taken, artifacts=artifacts), started, spec)
    if result.timing and spec.timing.counters:
        counted = ncu.count(Experiment.from_plain(taken))
        result = replace(result, timing=replace(result.timing, counters=counted))
    return rounds.begun(result, of) if result.timing else result


def _ended(result: Result, started: float, spec: Experiment | None = None) -> Result:
    """The result with when the run began and how long it took."""
    after = _gpus("gpus_after", spec) if spec else {}
    return replace(result, environment=replace(result.environment, **environment.period(started), **after))


def _job(spec: Experiment, result: Result, this: int, of: int, place: str) -> Outcome:
    """Round `this` of `of` of a run, in its world."""
    ranks = f"{spec.world_size} rank{'s' if spec.world_size > 1 else ''}"
    way = [way for way in (spec.options.get("grouping"), spec.kernel, spec.transport) if way not in (None, "auto")]
    title = f"{' '.join([spec.variant, *way])}, {ranks}, {spec.workload.describe()}" + (
        f", round {this + 1} of {of}" if this else ""
    )
    folder, launch = result.folder.absolute(), spec.launch
    job = {"result": result.anew(experiment=rounds.part(spec, this, of).plain(), folder=folder)}
    log = folder / "run.log"
    with display.Progress(title, metrics.iteration_flops(spec), place, tally.counts) as progress:
        return pool.call(world_of(spec), "runner.job:run", job, launch.timeout_s, log, progress, fresh=launch.fresh)


def _failed(outcome: Outcome, result: Result, spec: Experiment) -> Result:
    """The result of a run that failed, without times."""
    artifacts = {"log": "run.log"} if (result.folder / "run.log").exists() else {}
    if outcome.status == "ok":  # a later round that is incorrect
        wrong = outcome.result[0]
        about = {"status": wrong.status, "reason": wrong.reason, "correctness": wrong.correctness}
        return result.anew(artifacts=artifacts, **about)
    failure, limit, reason = None, spec.launch.memory_limit_gb, outcome.reason
    if outcome.world_lost:
        failure = Failure(rank=outcome.rank, phase=outcome.phase, log_tail=outcome.log_tail)
    if outcome.status == "oom" and limit is not None:
        reason = f"{reason} (launch.memory_limit_gb={limit:g})"
    return result.anew(status=outcome.status, reason=reason, failure=failure, artifacts=artifacts)


def world_of(spec: Experiment) -> WorldSpec:
    launch, place = spec.launch, joined()
    gpus = environment.gpu_count() if spec.device == "cuda" else 0
    agents = place.agents(spec.world_size, gpus) if place else 1
    about = launch.nodes, agents, launch.start_timeout_s, launch.share_gpu, tuple(sorted(spec.launch.variables.items()))
    return WorldSpec(spec.world_size, spec.device, *about)
