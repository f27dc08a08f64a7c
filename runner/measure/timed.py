"""A run's timing: warm-up and samples by its method, on all ranks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch

from runner import environment
from runner.config.experiment import Experiment
from runner.launch.rank import Rank
from runner.measure import timing
from runner.measure.statistics import of_ranks
from runner.measure.stopwatch import Stopwatch, stopwatch
from runner.measure.workload import Passes, Workload

SLOW_S = 1.0  # waiting for each iteration that takes so long does not affect the timing
L2_BYTES = 256 << 20
TURNS = 5  # of ours, between six of do_bench's


@dataclass
class Announcer:
    """What a `Timer` announces in this phase, of iterations that should take so many seconds. The CPU runs ahead of a GPU: there,
    iterations that are not slow are announced together, before the first."""

    me: Rank
    phase: str
    watch: Stopwatch
    iteration_s: float

    def __call__(self, runs: int) -> None:
        ahead = self.me.device.type == "cuda" and self.iteration_s < SLOW_S
        if ahead and not runs:
            return
        if not runs:
            self.watch.settle()
        self.me.say(self.phase, self.iteration_s * (runs if ahead else 1))


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
    if options.method == "simple":
        me.say(phase, iteration_s * options.timing_runs)  # one stretch that announces nothing
        mine = timing.simple(work, watch, options.timing_runs)
    else:
        announce = Announcer(me, phase, watch, iteration_s * layers)
        timer = timing.Timer(passes, watch, flush_buffer(me, spec), announce, me.gather, me.agree)
        with timing.undisturbed():
            warmed = timer.warm(options.warmup_runs, options.warmup_ms, options.settle_ms)
            if options.method == "adaptive":
                limits = options.timing_runs, options.precision, options.time_cap_s
                mine, note["precision_met"] = timer.adaptive(*limits)
            else:
                mine = timer.sample(options.timing_runs)
        back_to_back = [ms / layers for ms in me.gather(warmed.back_to_back_ms) if ms is not None]
        note |= {"warmup_iterations": warmed.iterations, "warmup_settled": warmed.settled}
        note["back_to_back_ms"] = max(back_to_back, default=None)
    samples = me.gather({which: [ms / layers for ms in times] for which, times in mine.items()})
    times = of_ranks(samples, timing.overhead_ms(watch) / layers)
    about = {"flush_l2": options.flush_l2, "layers": layers, "new_packs": options.new_packs, "do_bench": None}
    return {"samples": samples, "timing": {"method": options.method, "unit": "ms", **times, **about, **note}}, passes


def sampled_passes(spec: Experiment, work: Workload) -> Passes:
    """The passes that are sampled: the work's, or those of several layers."""
    layers, new_packs = spec.timing.layers, spec.timing.new_packs
    return work if layers == 1 and not new_packs else work.layered(layers, new_packs)


def flush_buffer(me: Rank, spec: Experiment) -> torch.Tensor | None:
    """The buffer written before each pass if `timing.flush_l2` is set. Like triton's do_bench, 256 MB of int32: a GPU at its
    power limit is the faster the longer it rests between passes, and bytes take longer to write."""
    return torch.empty(L2_BYTES // 4, dtype=torch.int32, device=me.device) if spec.timing.flush_l2 else None


class _OnePass:
    """A single pass, repeated, as do_bench runs it."""

    def __init__(self, work: Workload, which: str):
        self.passes: tuple[str, ...] = (which,)
        self.call = partial(work.repeat, which, 1)

    def run(self, which: str) -> None:
        self.call()


def by_do_bench(me: Rank, spec: Experiment, work: Workload, iteration_s: float) -> dict[str, dict[str, Any]]:
    """`timing.do_bench`: each pass by triton.testing.do_bench and by our sampling under the same conditions, medians in ms: that pass
    alone, in turns, with the same L2 flush, and an equal warm-up without a pause after it, since a GPU at its power limit sets
    its clocks by the load just before. `ratio` is the median over our turns, each against do_bench's turns before and after
    it, since clocks drift. The headline times differ: they alternate forward and backward, as training does."""
    from triton.testing import do_bench

    watch, flush = stopwatch(me, together=False), flush_buffer(me, spec)

    def theirs_ms() -> float:
        me.say("timing", iteration_s)
        with timing.undisturbed():
            return do_bench(alone.call, warmup=500, rep=500, return_mode="median")

    def ours_ms() -> float:
        me.say("timing", iteration_s)
        with timing.undisturbed():
            for _ in range(runs):
                alone.call()
            return median(timing.Timer(alone, watch, flush).sample(runs)[which])

    compared = {}
    for which in work.passes:
        work.run("forward")
        alone = _OnePass(work, which)
        theirs, ours = [theirs_ms()], []
        runs = max(10, int(500 / theirs[0]))
        for _ in range(TURNS):
            ours.append(ours_ms())
            theirs.append(theirs_ms())
        by_turn = [2 * x / (a + b) for x, a, b in zip(ours, theirs, theirs[1:], strict=False)]
        times = {"do_bench_ms": median(theirs), "ours_ms": median(ours), "ratio": median(by_turn)}
        compared[which] = times | {"do_bench_turns_ms": theirs, "ours_turns_ms": ours}
    work.release()
    return compared


def clocks(me: Rank, sampled: dict[str, Any]) -> dict[str, Any]:
    """What each node's `sampler.sampling` found, for the GPUs that the ranks use."""
    used = me.gather(environment.gpu_uuid(me.device)) if me.device.type == "cuda" else []
    nodes = [node for node in me.gather(sampled) if node]
    common = {key: next((node[key] for node in nodes if key in node), None) for key in ("period_ms", "unavailable")}
    devices = [
        {"device": name, **entry} for node in nodes for name, entry in node.get("of", {}).items() if name in used
    ]
    return {**common, "by_device": devices}
