"""The baseline of a run. `single`: the same global work on one device, by rank 0 alone while the others wait. `dense`: dense
attention over the same tokens, by the same variant on all ranks."""

from __future__ import annotations

import time
from dataclasses import replace
from statistics import median
from typing import Any

from runner.config.experiment import Experiment
from runner.launch.rank import Rank, is_out_of_memory
from runner.measure import choosing, duration, memory, metrics, timing
from runner.measure.statistics import slowest
from runner.measure.stopwatch import Stopwatch
from runner.measure.workloads import single, workload

LEAST_TOKENS = 2048  # a shorter sequence that does not fit is an error

_known: dict[Any, dict[str, Any]] = {}  # on rank 0; the variants of a sweep share a baseline


def measure(me: Rank, spec: Experiment, metric_fields: dict[str, Any], expected_s: float) -> dict[str, Any]:
    """The baseline, with speedup and efficiency of the run against it where it has times. metric_fields: the run's metrics.
    expected_s: seconds that an iteration should take."""
    baseline = (_dense if spec.baseline == "dense" else _single)(me, spec, expected_s)
    if "passes" not in baseline:
        return baseline
    tokens, passes = metric_fields["tokens"], metric_fields["passes"]
    times = {which: tokens / entry["tokens_per_s"] * 1e3 for which, entry in passes.items()}
    return baseline | metrics.gain(baseline, times, me.world, metric_fields)


def _dense(me: Rank, spec: Experiment, expected_s: float) -> dict[str, Any]:
    """Dense attention in the mask's direction, timed as the run was."""
    me.say("baseline", expected_s)
    try:
        work = choosing.together(me, lambda: workload(spec)(me, spec.dense))
    except ValueError as error:
        return {"kind": "dense", "unsupported": str(error)}
    times = timing.measure(work, expected_s, "baseline")[0]["timing"]["passes"]
    passes = {which: summary["median"] for which, summary in times.items()}
    return {"kind": "dense", "kernel": work.report()["kernel"], "samples": times["forward"]["n"], "passes": passes}


def _single(me: Rank, spec: Experiment, expected_s: float) -> dict[str, Any]:
    """What is known of the work on one device, or measured now by rank 0."""
    known_by = (
        spec.workload, spec.dilation, spec.model, spec.kernel, spec.mode, spec.device, me.world, spec.deterministic, spec.timing,
    )  # fmt: skip
    me.say("baseline", expected_s, waiting=me.rank != 0)
    memory.empty_caches(me.device)
    if me.rank == 0 and known_by not in _known:
        _known[known_by] = _fitting(me, spec, expected_s)
    me.say("baseline", waiting=True)
    return me.agree(_known.get(known_by))


def _fitting(me: Rank, spec: Experiment, expected_s: float) -> dict[str, Any]:
    """The work on one device. If it does not fit, it is measured at half the length (and so on), extrapolated by FLOPs and
    marked so."""
    whole = tokens = spec.workload.seq_len
    while True:
        here = replace(spec, workload=spec.workload.shortened(tokens))
        try:
            baseline = _timed(me, here, expected_s)
            break
        except ValueError as error:
            return {"unsupported": str(error)}
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error) or tokens < LEAST_TOKENS:
                raise
            memory.empty_caches(me.device)
            tokens //= 2
        if spec.workload.seqlens:
            return {"unsupported": "the packed batch does not fit one device"}
    scale = metrics.flops(spec)["forward"] / metrics.flops(here)["forward"] if tokens < whole else 1.0
    baseline["passes"] = {which: ms * scale for which, ms in baseline["passes"].items()}
    return {**baseline, "extrapolated": tokens < whole, "measured_seq_len": tokens}


def _timed(me: Rank, spec: Experiment, expected_s: float) -> dict[str, Any]:
    """`kernel`, the number of `samples`, and `passes`: the median of each in ms."""
    options, layers, work = spec.timing, spec.timing.layers, single(me, spec)
    passes, watch = timing.sampled_passes(work), Stopwatch(me, alone=True)
    timer = timing.Timer(passes, watch, "baseline", expected_s * layers, timing.flush_buffer(work))

    def seconds_each(*limits: float) -> float:
        """Of an iteration, in a warm-up of at least one."""
        start = time.perf_counter()
        done = timer.warm(1, *limits).iterations
        return (time.perf_counter() - start) / done

    with timing.undisturbed():
        once = seconds_each(0.0)
        if once < duration.BASELINE_CAP_S:  # the first may have compiled and allocated
            once = seconds_each(options.warmup_ms, options.settle_ms)
        timer.iteration_s = max(once, timer.iteration_s)
        runs = duration.baseline_runs(options.timing_runs, once)
        samples = slowest([timer.sample(runs)])
    medians = {which: median(ms) / layers for which, ms in samples.items()}
    return {"kernel": work.report()["kernel"], "samples": runs, "passes": medians}
