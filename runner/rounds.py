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

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import sqrt
from statistics import median
from typing import Any

from runner.config.experiment import Experiment
from runner.measure import metrics, statistics
from runner.measure.statistics import Samples

ROUNDS = 3
LEAST_SAMPLES = 3  # per turn, under order=auto
LEAST_CPU_FLOP = 1e11  # in all samples of a run on a CPU, under order=auto; two cores do some 50 GFLOP/s
METHODS = ("warmup", "adaptive", "cudagraph", "profiler")  # with one sample per call; `simple` has one mean
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
    if order == SEQUENTIAL or compared < 2 or spec.timing.method not in METHODS:
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


def begun(measured: Mapping[str, Any], rounds: int, started_at: float) -> dict[str, Any]:
    """`timing.rounds` after a run's first round, from the result of its job; `started_at` in seconds since the epoch."""
    return _rounds([_round(measured, started_at)], rounds)


def _round(measured: Mapping[str, Any], started_at: float) -> dict[str, Any]:
    timing = measured["timing"]
    return {
        "samples": timing["passes"]["forward"]["n"],
        "median_ms": _medians(timing),
        **{key: timing.get(key) for key in OF_WARMUP},  # missing with timing=simple
        "started_at": started_at,
        "during": measured["environment"]["during"],
    }


def _medians(timing: Mapping[str, Any]) -> dict[str, float]:
    return {which: times["median"] for which, times in timing["passes"].items()}


def _rounds(by_round: list[dict[str, Any]], rounds: int) -> dict[str, Any]:
    medians = {which: [each["median_ms"][which] for each in by_round] for which in by_round[0]["median_ms"]}
    drift = {which: max(ms) / min(ms) - 1 if min(ms) else 0.0 for which, ms in medians.items()}
    return {"done": len(by_round), "of": rounds, "drift": drift, "by_round": by_round}


def joined(
    value: Mapping[str, Any], samples: list[Samples], later: Mapping[str, Any], period: Mapping[str, float]
) -> dict[str, Any]:
    """A result with one more round. samples: of all ranks and rounds. later: the new round's result. period: when the round
    began and how long it took, as from `environment.period`."""
    spec, before = Experiment.from_plain(value["experiment"]), value["timing"]
    by_round = [*before["rounds"]["by_round"], _round(later, period["started_at"])]
    timing = {**before, **statistics.of_ranks(samples, before["overhead_ms"])}
    timing["rounds"] = _rounds(by_round, before["rounds"]["of"])
    iterations, settled, back_to_back = ([one[key] for one in by_round] for key in OF_WARMUP)
    timing["warmup_iterations"] = sum(iterations)
    timing["warmup_settled"] = False if False in settled else None if None in settled else True
    known = [ms for ms in back_to_back if ms is not None]
    timing["back_to_back_ms"] = median(known) if known else None
    if "precision_met" in timing:
        timing["precision_met"] = statistics.precise(samples, spec.timing.precision, spec.timing.timing_runs)
    medians = _medians(timing)
    limited = metrics.at(later["metrics"], medians, spec)  # by the newest ceilings
    environment = {**value["environment"], "ceilings": later["ceilings"]}
    environment["seconds"] += period["seconds"]
    by_device = [entry for one in by_round for entry in one["during"]["by_device"]]
    environment["during"] = {**environment["during"], "by_device": by_device}
    whole = {**value, "timing": timing, "metrics": limited, "environment": environment}
    if "passes" in (baseline := value.get("baseline") or {}):
        whole["baseline"] = {**baseline, **metrics.gain(baseline, medians, spec.world_size, limited)}
    return whole


def of_samples(value: Mapping[str, Any]) -> list[int]:
    """The number of samples of each round of a result."""
    return [one["samples"] for one in value["timing"]["rounds"]["by_round"]]
