"""A run's timing: warm-up and samples by its method, on all ranks."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from runner import environment
from runner.config.experiment import Experiment, Timing
from runner.launch.rank import Rank
from runner.measure import timing
from runner.measure.statistics import Samples, of_ranks, overhead, slowest
from runner.measure.stopwatch import Stopwatch, stopwatch
from runner.measure.workload import Passes, Workload

SLOW_S = 1.0  # waiting for each iteration that takes so long does not affect the timing
L2_BYTES = 256 << 20


def measure(
    me: Rank, spec: Experiment, work: Workload, watch: Stopwatch, iteration_s: float, phase: str = "timing"
) -> tuple[dict[str, Any], Passes]:
    """`samples` and `timing` of the result, and the passes that were sampled. iteration_s: seconds that one iteration should
    take. phase: what the ranks announce."""
    options, layers = spec.timing, spec.timing.layers
    note: dict[str, Any] = {}
    if options.method == "cudagraph":
        passes: Passes = timing.Graphed(work)
        watch = stopwatch(me, me.world > 1, timing.LEAD_MS)
    else:
        passes = sampled_passes(spec, work)
        iteration_s *= layers
    if options.method == "simple":
        me.say(phase, iteration_s * options.timing_runs)  # one stretch that announces nothing
        mine = timing.simple(work, watch, options.timing_runs)
    else:
        mine, note = _sampled(me, spec, passes, watch, iteration_s, phase)
    by_rank = me.gather({which: [ms / layers for ms in found] for which, found in mine.items()})
    found = of_ranks(by_rank)
    found |= overhead(timing.overhead_ms(watch) / layers, found["passes"])
    about = {"flush_l2": options.flush_l2, "layers": layers, "new_packs": options.new_packs, "do_bench": None}
    return {"samples": by_rank, "timing": {"method": options.method, "unit": "ms", **found, **about, **note}}, passes


def _sampled(
    me: Rank, spec: Experiment, passes: Passes, watch: Stopwatch, iteration_s: float, phase: str
) -> tuple[Samples, dict[str, Any]]:
    """This rank's samples after a warm-up, and the fields of the result on how they were taken."""
    options, flush, beat = spec.timing, flush_buffer(me, spec), beats(me, phase, watch, iteration_s)

    def verdict(so_far: Samples, seconds: float) -> bool | None:
        slow = slowest(me.gather(so_far))
        return me.agree(timing.verdict(slow, options.timing_runs, options.precision, seconds, options.time_cap_s))

    note: dict[str, Any] = {}
    me.say(phase, silent_s(me, iteration_s, options.warmup_runs))
    with timing.undisturbed():
        warmed = timing.warm(passes, watch, options.warmup_runs, options.warmup_ms, me.agree, beat)
        me.say(phase, silent_s(me, iteration_s, timing.WINDOW))
        each_ms, cap_ms = warmed.back_to_back_ms, settle_ms(options)
        settling = timing.settle(passes, watch, cap_ms, each_ms, me.gather, me.agree, flush, beat)
        me.say(phase, silent_s(me, iteration_s, options.timing_runs))
        if options.method == "adaptive":
            mine, note["precision_met"] = timing.adaptive(passes, watch, options.timing_runs, verdict, flush, beat)
        else:
            mine = timing.sample(passes, watch, options.timing_runs, flush, beat)
    each = [ms / options.layers for ms in me.gather(warmed.back_to_back_ms) if ms is not None]
    note |= {"warmup_iterations": warmed.iterations + settling.iterations, "warmup_settled": settling.settled}
    return mine, note | {"back_to_back_ms": max(each, default=None)}


def sampled_passes(spec: Experiment, work: Workload) -> Passes:
    """The passes that are sampled: the work's, or those of several layers."""
    layers, new_packs = spec.timing.layers, spec.timing.new_packs
    return work if layers == 1 and not new_packs else work.layered(layers, new_packs)


def settle_ms(options: Timing) -> float:
    """The longest time that a warm-up may take to settle; 0 without a warm-up."""
    return options.settle_ms if options.warmup_runs or options.warmup_ms else 0.0


def beats(me: Rank, phase: str, watch: Stopwatch, iteration_s: float) -> Callable[[], None]:
    """A function to call after each iteration: it announces the next one."""

    def beat() -> None:
        if me.device.type == "cuda":  # the CPU runs ahead of the GPU: it waits only for slow iterations
            if iteration_s < SLOW_S:
                return
            watch.settle()
        me.say(phase, iteration_s)

    return beat


def silent_s(me: Rank, iteration_s: float, runs: int) -> float:
    """How long so many iterations announce nothing: all of them on a GPU whose CPU runs ahead, else one."""
    return iteration_s * max(1, runs) if me.device.type == "cuda" and iteration_s < SLOW_S else iteration_s


def flush_buffer(me: Rank, spec: Experiment) -> torch.Tensor | None:
    """The buffer written before each pass if `timing.flush_l2` is set. Like triton's do_bench, 256 MB of int32: a GPU at its
    power limit is the faster the longer it rests between passes, and bytes take longer to write."""
    return torch.empty(L2_BYTES // 4, dtype=torch.int32, device=me.device) if spec.timing.flush_l2 else None


def samples_clocks(me: Rank) -> bool:
    """Whether this rank samples clocks for its node."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def clocks(me: Rank, sampled: dict[str, Any]) -> dict[str, Any]:
    """What each node's `sampler.sampling` found, for the GPUs that the ranks use."""
    used = None if me.device.type == "cpu" else set(me.gather(environment.gpu_uuid(me.device)))
    nodes = [node for node in me.gather(sampled) if node]
    common = {key: next((node[key] for node in nodes if key in node), None) for key in ("period_ms", "unavailable")}
    entries = [{"device": name, **entry} for node in nodes for name, entry in node.get("of", {}).items()]
    return {**common, "by_device": [entry for entry in entries if used is None or entry["device"] in used]}
