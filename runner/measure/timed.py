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
from runner.measure.timing import Stopwatch
from runner.measure.workload import Passes, Workload

SLOW_S = 1.0  # from such iterations on, waiting for each costs the timing nothing
L2_BYTES = 256 << 20


def measure(
    me: Rank, spec: Experiment, work: Workload, watch: Stopwatch, iteration_s: float
) -> tuple[dict[str, Any], Passes]:
    """`samples` and `timing` of the result, and the passes that a sample was of. `iteration_s`: seconds that one iteration
    should take."""
    options, layers = spec.timing, spec.timing.layers
    note: dict[str, Any] = {}
    if options.method == "cudagraph":
        passes: Passes = timing.Graphed(work)
        watch = timing.stopwatch(me, me.world > 1, timing.LEAD_MS)
    else:
        passes = sampled_passes(spec, work)
        iteration_s *= layers
    if options.method == "simple":
        me.say("timing", iteration_s * options.timing_runs)  # without a word in between
        mine = timing.simple(work, watch, options.timing_runs)
    else:
        mine, note = _sampled(me, spec, passes, watch, iteration_s)
    by_rank = me.gather({which: [ms / layers for ms in found] for which, found in mine.items()})
    found = of_ranks(by_rank)
    timed = {
        "method": options.method,
        "unit": "ms",
        **found,
        **overhead(timing.overhead_ms(watch) / layers, found["passes"]),
        "flush_l2": options.flush_l2,
        "layers": layers,
        "new_packs": options.new_packs,
        "do_bench": None,
        **note,
    }
    return {"samples": by_rank, "timing": timed}, passes


def _sampled(
    me: Rank, spec: Experiment, passes: Passes, watch: Stopwatch, iteration_s: float
) -> tuple[Samples, dict[str, Any]]:
    """This rank's samples after a warm-up, and what the result says of how they were taken."""
    options, flush, beat = spec.timing, flush_buffer(me, spec), beats(me, "timing", watch, iteration_s)
    note: dict[str, Any] = {}

    def verdict(so_far: Samples, seconds: float) -> bool | None:
        slow = slowest(me.gather(so_far))
        found = timing.verdict(slow, options.timing_runs, options.precision, seconds, options.time_cap_s)
        return me.agree(found)

    me.say("timing", silent_s(me, iteration_s, options.warmup_runs))
    with timing.undisturbed():
        warmed = timing.warm(passes, watch, options.warmup_runs, options.warmup_ms, me.agree, beat)
        me.say("timing", silent_s(me, iteration_s, timing.WINDOW))
        each_ms, cap_ms = warmed.back_to_back_ms, settle_ms(options)
        settling = timing.settle(passes, watch, cap_ms, each_ms, me.gather, me.agree, flush, beat)
        me.say("timing", silent_s(me, iteration_s, options.timing_runs))
        if options.method == "adaptive":
            mine, note["precision_met"] = timing.adaptive(passes, watch, options.timing_runs, verdict, flush, beat)
        else:
            mine = timing.sample(passes, watch, options.timing_runs, flush, beat)
    note["warmup_iterations"] = warmed.iterations + settling.iterations
    note["warmup_settled"] = settling.settled
    each = [ms / options.layers for ms in me.gather(warmed.back_to_back_ms) if ms is not None]
    note["back_to_back_ms"] = max(each, default=None)
    return mine, note


def sampled_passes(spec: Experiment, work: Workload) -> Passes:
    """What a sample is of: the work's passes, or those of several layers."""
    layers, new_packs = spec.timing.layers, spec.timing.new_packs
    return work if layers == 1 and not new_packs else work.layered(layers, new_packs)


def settle_ms(options: Timing) -> float:
    """How long a warm-up may go on until it settles; 0 without a warm-up."""
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
    """What is written before each pass to empty the L2 cache, where that is asked for. Like triton's do_bench, 256 MB of
    int32: a GPU at its power limit is the faster the longer it rests between passes, and bytes take longer to write."""
    return torch.empty(L2_BYTES // 4, dtype=torch.int32, device=me.device) if spec.timing.flush_l2 else None


def samples_clocks(me: Rank) -> bool:
    """Whether this rank samples clocks for its node."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def clocks(me: Rank, sampled: dict[str, Any]) -> dict[str, Any]:
    """What each node's `sampler.sampling` found, of the GPUs that the ranks use."""
    used = None if me.device.type == "cpu" else set(me.gather(environment.gpu_uuid(me.device)))
    nodes = [node for node in me.gather(sampled) if node]
    return {
        "period_ms": next((node["period_ms"] for node in nodes if "period_ms" in node), None),
        "unavailable": next((node["unavailable"] for node in nodes if "unavailable" in node), None),
        "by_device": [
            {"device": name, **entry}
            for node in nodes
            for name, entry in node.get("of", {}).items()
            if used is None or name in used
        ],
    }
