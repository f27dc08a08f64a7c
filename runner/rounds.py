"""Sweeps that compare runs take their samples in rounds, so that a drift of the machine affects all runs equally: GPUs get
warmer, other jobs start. Runs are compared if their overrides differ only in `COMPARED`. Three of them, in three rounds, run as

    A B C   B C A   C A B

and each turn takes a third of a run's samples.

- A turn is a job in the warm world: inputs from the same seed, the correctness check, a warm-up, then this round's share of
  `timing_runs`. So every number is checked, and only one run's inputs are in memory.
- The first turn also does phases, profile, baseline, memory, energy, do_bench and counters, once. In it `attention=auto`
  chooses a variant, which later turns run.
- After each turn `result.json` and `samples.parquet` are rewritten. The statistics cover all samples so far; `timing.rounds`
  has the rounds done and planned, each round's medians and their drift. An interrupted sweep leaves valid results with fewer
  samples, and `resume=true` does the missing rounds.
- A run that fails in a later turn is a failed run, without times. Its other turns are skipped. The other runs continue, in a
  new world if the old one was lost.

`order=auto` interleaves if a sweep compares runs and each turn gets at least `LEAST_SAMPLES` samples. It does not with
`timing=simple` (a single mean), with `launch.fresh=true` (each turn would start a world), and on a CPU for samples of less
than `LEAST_CPU_FLOP` in all. These take about a second, in which a machine does not drift and which is shorter than a turn's
check and warm-up. `order=interleaved` allows turns of a single sample; `order=sequential` runs job after job.

This module divides samples and joins rounds; it needs no world and no torch. `runner.interleave` passes Hydra's jobs in this
order, and `runner.app` does a turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import sqrt
from typing import Any

from runner.config.experiment import Experiment
from runner.measure import metrics, statistics
from runner.measure.sampler import of_values
from runner.measure.statistics import Samples

ROUNDS = 3
LEAST_SAMPLES = 3  # per turn, under order=auto
LEAST_CPU_FLOP = 1e11  # in all samples of a run on a CPU, under order=auto; two cores do some 50 GFLOP/s
METHODS = ("warmup", "adaptive", "cudagraph", "profiler")  # with one sample per call; `simple` has one mean
OF_WARMUP = ("warmup_iterations", "warmup_settled", "back_to_back_ms")
COMPARED = ("attention", "kernel", "transport", "replay")


def groups(jobs: Sequence[Sequence[str]], compared: Sequence[str] = COMPARED) -> list[list[int]]:
    """Groups of compared jobs: the indices of the jobs whose overrides differ only in the keys `compared`. jobs: the overrides
    of each. The groups are in the order of their first jobs."""
    found: dict[tuple[str, ...], list[int]] = {}
    for index, overrides in enumerate(jobs):
        found.setdefault(tuple(text for text in overrides if not _of(text, compared)), []).append(index)
    return list(found.values())


def _of(override: str, keys: Sequence[str]) -> bool:
    key = override.lstrip("+~").partition("=")[0]
    return any(key == name or key.startswith(f"{name}.") for name in keys)


def number(order: str, spec: Experiment, compared: int) -> int:
    """The number of rounds of a run in a group of `compared` runs."""
    samples = spec.timing.timing_runs
    if order == "sequential" or compared < 2 or spec.timing.method not in METHODS:
        return 1
    if order == "interleaved":
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
    timing = spec.timing
    if rounds > 1:
        every, more = divmod(timing.timing_runs, rounds)
        timing = replace(
            timing,
            timing_runs=every + (this < more),
            precision=timing.precision * sqrt(rounds),
            time_cap_s=timing.time_cap_s / rounds,
        )
    if this == 0:
        return replace(spec, timing=timing)
    method = "warmup" if timing.method == "profiler" else timing.method
    timing = replace(timing, method=method, do_bench=False, counters=False)
    return replace(spec, timing=timing, phases=False, energy=False, baseline="none")


def begun(found: Mapping[str, Any], rounds: int, started_at: float) -> dict[str, Any]:
    """`timing.rounds` after a run's first round, from the result of its job; `started_at` in seconds since the epoch."""
    return _rounds([_one(found, started_at)], rounds)


def _one(found: Mapping[str, Any], started_at: float) -> dict[str, Any]:
    timing = found["timing"]
    return {
        "samples": timing["passes"]["forward"]["n"],
        "median_ms": {which: summary["median"] for which, summary in timing["passes"].items()},
        **{key: timing.get(key) for key in OF_WARMUP},  # missing with timing=simple
        "started_at": started_at,
        "during": found["environment"]["during"],
    }


def _rounds(by_round: list[dict[str, Any]], rounds: int) -> dict[str, Any]:
    medians = [one["median_ms"] for one in by_round]
    slow = {which: [each[which] for each in medians] for which in medians[0]}
    drift = {which: max(ms) / min(ms) - 1 if min(ms) else 0.0 for which, ms in slow.items()}
    return {"done": len(by_round), "of": rounds, "drift": drift, "by_round": by_round}


def unfinished(value: Mapping[str, Any]) -> bool:
    """Whether a result has fewer rounds than its run should have."""
    rounds = (value.get("timing") or {}).get("rounds")  # missing in results of earlier versions
    return value["status"] == "ok" and rounds is not None and rounds["done"] < rounds["of"]


def joined(
    value: Mapping[str, Any], samples: list[Samples], later: Mapping[str, Any], period: Mapping[str, float]
) -> dict[str, Any]:
    """A result with one more round. samples: of all ranks and rounds. later: the new round's result. period: when the round
    began and how long it took, as from `environment.period`."""
    spec = Experiment.from_plain(value["experiment"])
    before = value["timing"]
    found = statistics.of_ranks(samples)
    medians = {which: summary["median"] for which, summary in found["passes"].items()}
    by_round = [*before["rounds"]["by_round"], _one(later, period["started_at"])]
    timing = {**before, **found, "rounds": _rounds(by_round, before["rounds"]["of"])}
    timing |= statistics.overhead(before["overhead_ms"], found["passes"])
    timing["warmup_iterations"] = sum(one["warmup_iterations"] for one in by_round)
    settled = [one["warmup_settled"] for one in by_round]
    timing["warmup_settled"] = False if False in settled else None if None in settled else True
    back_to_back = [one["back_to_back_ms"] for one in by_round if one["back_to_back_ms"] is not None]
    if back_to_back:
        timing["back_to_back_ms"] = statistics.summarize(back_to_back).median
    if "precision_met" in timing:
        precision, runs = spec.timing.precision, spec.timing.timing_runs
        slow = statistics.slowest(samples)
        timing["precision_met"] = all(statistics.settled(ms, precision, runs) for ms in slow.values())
    limited = metrics.at(later["metrics"], medians, spec)  # by the newest ceilings
    environment = {**value["environment"], "ceilings": later["ceilings"]}
    environment["seconds"] += period["seconds"]
    first = environment["during"]  # rounds of earlier versions have none of their own
    environment["during"] = _all_during([one.get("during", first) for one in by_round])
    whole = {**value, "timing": timing, "metrics": limited, "environment": environment}
    if (value.get("baseline") or {}).get("passes"):
        baseline = value["baseline"]
        whole["baseline"] = {**baseline, **metrics.gain(baseline, medians, spec.world_size, limited)}
    return whole


def _all_during(rounds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The clocks of all rounds: for each device the minimum, the maximum, the median of the rounds' medians, and all throttle
    reasons seen."""
    by_device: dict[str, list[Mapping[str, Any]]] = {}
    for during in rounds:
        for entry in during["by_device"]:
            by_device.setdefault(entry["device"], []).append(entry)
    names = ("period_ms", "unavailable")
    common = {name: next((one[name] for one in rounds if one[name] is not None), None) for name in names}
    return {**common, "by_device": [_one_device(entries) for entries in by_device.values()]}


def _one_device(entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    whole: dict[str, Any] = {"device": entries[0]["device"], "samples": sum(entry["samples"] for entry in entries)}
    for key in dict.fromkeys(key for entry in entries for key in entry if key not in whole):
        taken = [entry[key] for entry in entries if entry.get(key) is not None]
        if key == "throttle_reasons":
            whole[key] = sorted({reason for reasons in taken for reason in reasons})
        else:
            whole[key] = of_values(*([each[name] for each in taken] for name in ("min", "median", "max")))
    return whole


def of_samples(value: Mapping[str, Any]) -> list[int]:
    """The number of samples of each round of a result."""
    return [one["samples"] for one in value["timing"]["rounds"]["by_round"]]


def first(samples: Sequence[Samples], number: int) -> list[Samples] | None:
    """The first `number` samples of each rank and pass; None if any of them has fewer."""
    if any(len(ms) < number for rank in samples for ms in rank.values()):
        return None
    return [{which: ms[:number] for which, ms in rank.items()} for rank in samples]
