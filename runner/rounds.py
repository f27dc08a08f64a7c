"""Sweeps that compare runs take their samples in rounds, so that a drift of the machine affects all runs equally: GPUs get
warmer, other jobs start. Runs are compared if their overrides differ only in `COMPARED`. Three of them, in three rounds, run as

    A B C   B C A   C A B

and each turn takes a third of a run's samples.

- A turn is a job in the warm world: inputs from the same seed, the correctness check, a warm-up, then this round's share of
  `timing_runs`. So every number is checked, and only one run's inputs are in memory.
- The first turn also does phases, profile, baseline, memory, energy and counters, once. In it `attention=auto`
  chooses a variant, which later turns run.
- After each turn `result.json` and `samples.parquet` are rewritten. The statistics cover all samples so far; `timing.rounds`
  has the rounds done and planned, each round's medians and their drift. An interrupted sweep leaves valid results with fewer
  samples, and `resume=true` runs these anew.
- A run that fails in a later turn is a failed run, without times. Its other turns are skipped. The other runs continue, in a
  new world if the old one was lost.

`order=auto` interleaves if a sweep compares runs and each turn gets at least `LEAST_SAMPLES` samples. It does not with
`timing=simple` (a single mean), with `launch.fresh=true` (each turn would start a world), and on a CPU for samples of less
than `LEAST_CPU_FLOP` in all. These take about a second, in which a machine does not drift and which is shorter than a turn's
check and warm-up. `order=interleaved` allows turns of a single sample; `order=sequential` runs job after job.

This module divides samples and joins rounds; it needs no world and no torch. `runner.sweep` does the runs in this
order, and `runner.app` does a turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import sqrt
from statistics import median

from runner.config.experiment import Experiment
from runner.measure import metrics, statistics
from runner.measure.statistics import Samples
from runner.record.fields import Rounds, Timing, Turn
from runner.record.result import Result

ROUNDS = 3
LEAST_SAMPLES = 3  # per turn, under order=auto
LEAST_CPU_FLOP = 1e11  # in all samples of a run on a CPU, under order=auto; two cores do some 50 GFLOP/s
OF_WARMUP = ("warmup_iterations", "warmup_settled", "back_to_back_ms")
COMPARED = ("attention", "kernel", "transport", "replay")
SEQUENTIAL, INTERLEAVED = "sequential", "interleaved"


def groups(jobs: Sequence[Sequence[str]], order: str) -> list[list[int]]:
    """Groups of compared jobs: the indices of the jobs whose overrides differ only in `COMPARED` and, with
    order=interleaved:KEY, in this key. jobs: the overrides of each. The groups are in the order of their first jobs."""
    if order == SEQUENTIAL:
        return [[i] for i in range(len(jobs))]
    return alike(jobs, (*COMPARED, *order.split(":")[1:]))


def alike(jobs: Sequence[Sequence[str]], keys: Sequence[str]) -> list[list[int]]:
    """Groups of jobs whose overrides differ only in these keys, as `groups`."""
    by_rest: dict[tuple[str, ...], list[int]] = {}
    for index, overrides in enumerate(jobs):
        rest = tuple(text for text in overrides if not _key(text).startswith(tuple(f"{key}." for key in keys)))
        by_rest.setdefault(rest, []).append(index)
    return list(by_rest.values())


def _key(override: str) -> str:
    """The key of an override, with a dot after it."""
    return f"{override.lstrip('+~').partition('=')[0]}."


def number(order: str, spec: Experiment, compared: int) -> int:
    """The number of rounds of a run in a group of `compared` runs."""
    samples = spec.timing.timing_runs
    if order == SEQUENTIAL or compared < 2 or spec.timing.method == "simple":
        return 1
    if order.startswith(INTERLEAVED):
        return min(ROUNDS, samples)
    if spec.launch.fresh or _short(spec):
        return 1
    return max(1, min(ROUNDS, samples // LEAST_SAMPLES))


def _short(spec: Experiment) -> bool:
    """Whether the samples take too little time for a machine to drift. Never on GPUs, where a turn is cheap."""
    flops = metrics.flops(spec)
    one = flops.get("total", flops["forward"]) * spec.timing.layers
    return spec.device == "cpu" and one * spec.timing.timing_runs < LEAST_CPU_FLOP


def turns(runs: int, this: int, rounds: int) -> list[int]:
    """The order of `runs` compared runs in round `this` of `rounds`, counted from 0: each round starts with a later run."""
    start = this * runs // rounds
    return [*range(start, runs), *range(start)]


def part(spec: Experiment, this: int, rounds: int) -> Experiment:
    """The experiment of the run's turn in round `this` of `rounds`, counted from 0, with this round's share of the samples. With
    adaptive timing, the interval of a single round may be sqrt(rounds) times as wide."""
    samples, more = divmod(spec.timing.timing_runs, rounds)
    timing = replace(
        spec.timing,
        timing_runs=samples + (this < more),
        precision=spec.timing.precision * sqrt(rounds),
        time_cap_s=spec.timing.time_cap_s / rounds,
    )
    if this == 0:
        return replace(spec, timing=timing)
    method = "warmup" if timing.method == "profiler" else timing.method
    timing = replace(timing, method=method, counters=False)
    return replace(spec, timing=timing, phases=False, energy=False, baseline="none")


def begun(result: Result, rounds: int) -> Result:
    """A run after its first round."""
    return _with_rounds(result, [_round(result)], rounds)


def _round(result: Result) -> Turn:
    timing, about = result.timing, result.environment
    assert timing is not None
    warmup = {key: getattr(timing, key) for key in OF_WARMUP}  # None with timing=simple
    samples, medians = timing.passes["forward"].n, _medians(timing)
    return Turn(samples=samples, median_ms=medians, started_at=about.started_at, during=about.during, **warmup)


def _medians(timing: Timing) -> dict[str, float]:
    return {which: times.median for which, times in timing.passes.items()}


def _with_rounds(result: Result, by_round: list[Turn], of: int) -> Result:
    medians = {which: [one.median_ms[which] for one in by_round] for which in by_round[0].median_ms}
    drift = {which: max(ms) / min(ms) - 1 if min(ms) else 0.0 for which, ms in medians.items()}
    assert result.timing is not None
    rounds = Rounds(done=len(by_round), of=of, drift=drift, by_round=by_round)
    return replace(result, timing=replace(result.timing, rounds=rounds))


def joined(result: Result, samples: list[Samples], later: Result) -> Result:
    """A result with one more round. samples: of all ranks and rounds. later: the new round's result."""
    timing, metrics_now = result.timing, later.metrics
    assert result.experiment is not None and timing is not None and metrics_now is not None
    spec, before = Experiment.from_plain(result.experiment), timing.rounds
    by_round = [*before.by_round, _round(later)]
    iterations, settled, back_to_back = ([getattr(one, key) for one in by_round] for key in OF_WARMUP)
    known = [ms for ms in back_to_back if ms is not None]
    timing = replace(
        timing,
        **statistics.of_ranks(samples, timing.overhead_ms),
        warmup_iterations=sum(iterations),
        warmup_settled=False if False in settled else None if None in settled else True,
        back_to_back_ms=median(known) if known else None,
    )
    if timing.precision_met is not None:
        met = statistics.precise(samples, spec.timing.precision, spec.timing.timing_runs)
        timing = replace(timing, precision_met=met)
    medians = _medians(timing)
    limited = metrics.at(metrics_now, medians, spec)  # by the newest ceilings
    baseline = result.baseline and metrics.compared(result.baseline, medians, spec.world_size, limited)
    about, now = result.environment, later.environment
    by_device = [entry for one in by_round for entry in one.during.by_device]
    during, seconds = replace(about.during, by_device=by_device), about.seconds + now.seconds
    about = replace(about, ceilings=now.ceilings, seconds=seconds, during=during, gpus_after=now.gpus_after)
    whole = replace(result, timing=timing, metrics=limited, baseline=baseline, environment=about)
    return _with_rounds(whole, by_round, before.of)


def of_samples(result: Result) -> list[int]:
    """The number of samples of each round."""
    return [one.samples for one in result.timing.rounds.by_round] if result.timing else []
