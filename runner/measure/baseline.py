"""The baseline of a run. `single`: the same global work on one device, by rank 0 alone while the others wait. `dense`: dense
attention over the same tokens, by the same variant on all ranks."""

from __future__ import annotations

import time
from dataclasses import replace
from statistics import median
from typing import Any

from runner.config.experiment import Experiment
from runner.config.values import UnsupportedHere
from runner.launch.rank import Rank, is_out_of_memory
from runner.measure import choosing, length, memory, metrics, timed, timing
from runner.measure.statistics import slowest
from runner.measure.stopwatch import stopwatch
from runner.measure.timed import beats, flush_buffer, sampled_passes, settle_ms, silent_s
from runner.measure.workloads import kind

LEAST_TOKENS = 2048  # a shorter sequence that does not fit is an error

_known: dict[Any, dict[str, Any]] = {}  # on rank 0; the variants of a sweep share a baseline


def dense(me: Rank, spec: Experiment, measured: dict[str, Any], dense_s: float) -> dict[str, Any]:
    """Dense attention in the mask's direction, timed as the run was, with speedup and efficiency of the run against it.
    dense_s: seconds that an iteration should take."""
    me.say("baseline", dense_s)
    here = spec.dense
    try:
        work = choosing.together(me, lambda: kind(spec).create(me, here))
    except ValueError as error:
        return {"kind": "dense", "unsupported": str(error)}
    watch = stopwatch(me, together=me.world > 1)
    found, _ = timed.measure(me, here, work, watch, dense_s, "baseline")
    passes = {which: times["median"] for which, times in found["timing"]["passes"].items()}
    samples = found["timing"]["passes"]["forward"]["n"]
    about = {"kind": "dense", "kernel": work.report()["kernel"], "samples": samples, "passes": passes}
    return about | metrics.gain(about, _times(measured), me.world, measured)


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
    if spec.device == "cuda":
        memory.empty_caches(me.device)
    if me.rank == 0 and key not in _known:
        _known[key] = _single(me, spec, single_s)
    me.say("baseline", waiting=True)
    result = dict(me.agree(_known.get(key)))
    if "passes" in result:
        result |= metrics.gain(result, _times(measured), me.world, measured)
    return result


def _times(measured: dict[str, Any]) -> dict[str, float]:
    """The run's median of each pass in ms."""
    return {which: measured["tokens"] / entry["tokens_per_s"] * 1e3 for which, entry in measured["passes"].items()}


def _single(me: Rank, spec: Experiment, single_s: float) -> dict[str, Any]:
    length = spec.workload.seq_len
    while True:
        here = replace(spec, workload=spec.workload.shortened(length))
        try:
            medians, about = _medians(me, here, single_s)
            break
        except (UnsupportedHere, ValueError) as error:
            return {"unsupported": str(error)}
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error) or length < LEAST_TOKENS:
                raise
            memory.empty_caches(me.device)
            length //= 2
        if spec.workload.seqlens:
            return {"unsupported": "the packed batch does not fit one device"}
    extrapolated = length != spec.workload.seq_len
    scale = metrics.flops(spec)["forward"] / metrics.flops(here)["forward"] if extrapolated else 1.0
    passes = {which: ms * scale for which, ms in medians.items()}
    return {**about, "passes": passes, "extrapolated": extrapolated, "measured_seq_len": length}


def _medians(me: Rank, spec: Experiment, single_s: float) -> tuple[dict[str, float], dict[str, Any]]:
    """The median of each pass in ms; `kernel` and the number of `samples`."""
    work = kind(spec).single(me, spec)
    watch = stopwatch(me, together=False)
    flush, passes, layers = flush_buffer(me, spec), sampled_passes(spec, work), spec.timing.layers
    single_s *= layers
    beat = beats(me, "baseline", watch, single_s)
    beat()

    def seconds_each(at_least_ms: float) -> float:
        """Of an iteration, in a warm-up of at least so long and at least one."""
        start = time.perf_counter()
        done = timing.warm(passes, watch, 1, at_least_ms, beat=beat).iterations
        return (time.perf_counter() - start) / done

    with timing.undisturbed():
        once = seconds_each(0.0)
        if once < length.BASELINE_CAP_S:  # the first may have compiled and allocated
            once = seconds_each(spec.timing.warmup_ms)
            me.say("baseline", silent_s(me, max(once, single_s), timing.WINDOW))
            timing.settle(passes, watch, settle_ms(spec.timing), once * 1e3, flush=flush, beat=beat)
        runs = length.baseline_runs(spec.timing.timing_runs, once)
        me.say("baseline", silent_s(me, max(once, single_s), runs))
        samples = slowest([timing.sample(passes, watch, runs, flush, beat)])
    about = {"kernel": work.report()["kernel"], "samples": runs}
    return {which: median(ms) / layers for which, ms in samples.items()}, about
