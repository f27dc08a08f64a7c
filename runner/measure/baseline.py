"""The baseline of a run. `single`: the same global work on one device, by rank 0 alone while the others wait. `dense`: dense
attention over the same tokens, by the same variant on all ranks."""

from __future__ import annotations

import time
from dataclasses import replace
from statistics import median
from typing import Any

from runner.config.experiment import Experiment
from runner.launch.rank import Rank, is_out_of_memory
from runner.measure import choosing, length, memory, metrics, timed, timing
from runner.measure.statistics import slowest
from runner.measure.stopwatch import stopwatch
from runner.measure.workloads import single, workload

LEAST_TOKENS = 2048  # a shorter sequence that does not fit is an error

_known: dict[Any, dict[str, Any]] = {}  # on rank 0; the variants of a sweep share a baseline


def dense(me: Rank, spec: Experiment, measured: dict[str, Any], dense_s: float) -> dict[str, Any]:
    """Dense attention in the mask's direction, timed as the run was, with speedup and efficiency of the run against it.
    measured: the run's metrics. dense_s: seconds that an iteration should take."""
    me.say("baseline", dense_s)
    here = spec.dense
    try:
        work = choosing.together(me, lambda: workload(spec)(me, here))
    except ValueError as error:
        return {"kind": "dense", "unsupported": str(error)}
    timed_dense, _ = timed.measure(me, here, work, stopwatch(me, me.world > 1), dense_s, "baseline")
    times = timed_dense["timing"]["passes"]
    passes = {which: summary["median"] for which, summary in times.items()}
    about = {"kind": "dense", "kernel": work.report()["kernel"], "samples": times["forward"]["n"], "passes": passes}
    return _compared(me, about, measured)


def measure(me: Rank, spec: Experiment, measured: dict[str, Any], single_s: float) -> dict[str, Any]:
    """The baseline, with speedup and efficiency of the run against it. If the work does not fit one device, it is measured
    at half the length (and so on), extrapolated by FLOPs and marked so. measured: the run's metrics. single_s: seconds that
    an iteration on one device should take."""
    options = spec.timing
    key = (
        spec.workload, spec.dilation, spec.model, spec.kernel, spec.mode, spec.device, me.world, spec.deterministic,
        options.flush_l2, options.autograd_thread, options.layers, options.new_packs,
    )  # fmt: skip
    me.say("baseline", single_s, waiting=me.rank != 0)
    memory.empty_caches(me.device)
    if me.rank == 0 and key not in _known:
        _known[key] = _single(me, spec, single_s)
    me.say("baseline", waiting=True)
    return _compared(me, me.agree(_known.get(key)), measured)


def _compared(me: Rank, baseline: dict[str, Any], measured: dict[str, Any]) -> dict[str, Any]:
    """The baseline with the run's speedup and efficiency against it, where it has times."""
    if "passes" not in baseline:
        return baseline
    times = {which: measured["tokens"] / entry["tokens_per_s"] * 1e3 for which, entry in measured["passes"].items()}
    return baseline | metrics.gain(baseline, times, me.world, measured)


def _single(me: Rank, spec: Experiment, single_s: float) -> dict[str, Any]:
    whole = tokens = spec.workload.seq_len
    while True:
        here = replace(spec, workload=spec.workload.shortened(tokens))
        try:
            single = _timed(me, here, single_s)
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
    single["passes"] = {which: ms * scale for which, ms in single["passes"].items()}
    return {**single, "extrapolated": tokens < whole, "measured_seq_len": tokens}


def _timed(me: Rank, spec: Experiment, single_s: float) -> dict[str, Any]:
    """`kernel`, the number of `samples`, and `passes`: the median of each in ms."""
    options, layers = spec.timing, spec.timing.layers
    work, watch = single(me, spec), stopwatch(me, together=False)
    announce = timed.Announcer(me, "baseline", watch, single_s * layers)
    timer = timing.Timer(timed.sampled_passes(spec, work), watch, timed.flush_buffer(me, spec), announce)

    def seconds_each(*limits: float) -> float:
        """Of an iteration, in a warm-up of at least one."""
        start = time.perf_counter()
        done = timer.warm(1, *limits).iterations
        return (time.perf_counter() - start) / done

    with timing.undisturbed():
        once = seconds_each(0.0)
        if once < length.BASELINE_CAP_S:  # the first may have compiled and allocated
            once = seconds_each(options.warmup_ms, options.settle_ms)
        announce.iteration_s = max(once, announce.iteration_s)
        runs = length.baseline_runs(options.timing_runs, once)
        samples = slowest([timer.sample(runs)])
    passes = {which: median(ms) / layers for which, ms in samples.items()}
    return {"kernel": work.report()["kernel"], "samples": runs, "passes": passes}
