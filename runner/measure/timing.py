"""A run's timing: warm-up and samples by its method. All ranks do the same number of iterations. Samples are in ms, and none is
dropped."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attention.profiling import elapsed_ms
from runner import environment
from runner.launch.rank import Rank
from runner.measure import statistics
from runner.measure.attention_work import Layers
from runner.measure.sampler import summary
from runner.measure.statistics import Fields, Samples
from runner.measure.stopwatch import Stopwatch
from runner.measure.workload import Passes, Workload
from runner.record.fields import During, Sampled, Timing

LEAD_MS = 0.1  # the CPU's lead over the GPU before a sample, if it needs one
WINDOW = 12  # the latest iterations of a warm-up, which are tested for a trend
WINDOW_CHANCE = 0.05  # the significance of that trend
BATCH = 10  # samples between two checks of `adaptive`
SLOW_S = 1.0  # waiting for each iteration that takes so long does not affect the timing
L2_BYTES = 256 << 20


@contextmanager
def undisturbed() -> Iterator[None]:
    """Collects garbage before the body and disables collection within it; nested contexts do nothing. Warm-up and samples
    belong in one context, because a collection between them would be a pause."""
    was = gc.isenabled()
    if was:
        gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def iterate(work: Passes) -> None:
    for which in work.passes:
        work.run(which)


@dataclass
class Called:
    """Passes that are run by a function of their names."""

    passes: tuple[str, ...]
    run: Callable[[str], None]


@dataclass(frozen=True)
class Warmed:
    """The outcome of a warm-up. back_to_back_ms: ms per iteration in its longest group of consecutive iterations, which run
    back to back like a model's layers. The first group may compile and allocate, so it does not count; None if there was
    no other group. settled: whether the latest iterations show no trend; None if there were too few."""

    iterations: int
    back_to_back_ms: float | None
    settled: bool | None


@dataclass
class Timer:
    """Times iterations of `work` on the ranks of `watch`, which announce `phase`. iteration_s: seconds that an iteration should take.
    flush: a buffer written before each pass, to empty the L2 cache."""

    work: Passes
    watch: Stopwatch
    phase: str = "timing"
    iteration_s: float = 0.0
    flush: Tensor | None = None

    def iterations(self, runs: int) -> Iterator[None]:
        """So many turns of a loop over iterations, each announced. The CPU runs ahead of a GPU: there, iterations that are not slow are
        announced together, before the first."""
        ahead = self.watch.on_gpu and self.iteration_s < SLOW_S
        for number in range(runs):
            if not ahead and number:
                self.watch.settle()
            if not ahead or not number:
                self.watch.me.say(self.phase, self.iteration_s * (runs if ahead else 1))
            yield

    def warm(self, runs: int, at_least_ms: float, settle_ms: float = 0.0) -> Warmed:
        """Iterates until both limits are reached, equally on all ranks, then settles for at most `settle_ms`, if there were any. The clock is
        read only after groups of iterations, so that the GPU is as busy as during sampling; a group is at most as long as
        all earlier ones together. (After a pause, a GPU at its power limit is faster for some 80 ms.)"""
        done = longest = 0
        more = max(runs, 1 if at_least_ms > 0 else 0)
        each_ms: float | None = None
        start = time.perf_counter()
        while more:
            began = time.perf_counter()
            for _ in self.iterations(more):
                iterate(self.work)
            self.watch.settle()
            now = time.perf_counter()
            if done and more >= longest:
                longest, each_ms = more, (now - began) * 1e3 / more
            done += more
            lacking = math.ceil(done * (at_least_ms / (now - start) / 1e3 - 1))
            more = self.watch.me.agree(min(max(0, lacking), done))
        further, settled = self.settle(settle_ms if done else 0.0, each_ms)
        return Warmed(done + further, each_ms, settled)

    def settle(self, cap_ms: float, each_ms: float | None) -> tuple[int, bool | None]:
        """Continues a warm-up, with iterations as in `sample`, until the latest `WINDOW` iterations show no trend in any
        pass of the slowest rank, or until `cap_ms` is over; equally on all ranks. Returns the number of iterations, and
        whether they settled. each_ms: the time of an iteration so far; None if unknown: then a single iteration is timed
        first."""
        done, level = 0, False
        for samples in self.batches(1 if each_ms is None else int(cap_ms / each_ms), WINDOW, cap_ms):
            latest = self.watch.me.gather({which: ms[-WINDOW:] for which, ms in samples.items()})
            done = len(samples[self.work.passes[0]])
            level = not any(statistics.trend(ms, chance=WINDOW_CHANCE) for ms in statistics.slowest(latest).values())
            if done >= WINDOW and level:
                break
        return done, level if done >= statistics.TREND_SAMPLES else None

    def adaptive(self, least: int, precision: float, cap_ms: float) -> tuple[Samples, bool]:
        """(samples, whether the precision was met). Samples in batches until every pass of the slowest rank is precise
        enough, or no batch fits in the time."""
        met = False
        for samples in self.batches(least, min(BATCH, least), cap_ms):
            met = statistics.precise(self.watch.me.gather(samples), precision, least)
            if met:
                break
        return samples, met

    def batches(self, first: int, most: int, cap_ms: float) -> Iterator[Samples]:
        """All samples of this rank so far, after each batch of at most `most` iterations, the first of `first` or fewer. The number of
        the others is what still fits in the time; equal on all ranks."""
        samples: Samples = {which: [] for which in self.work.passes}
        start = time.perf_counter()
        runs = self.watch.me.agree(min(first, most) if cap_ms > 0 else 0)
        while runs:
            began = time.perf_counter()
            for which, ms in self.sample(runs).items():
                samples[which] += ms
            yield samples
            now = time.perf_counter()
            fitting = int((cap_ms / 1e3 - (now - start)) / (now - began) * runs)
            runs = self.watch.me.agree(max(0, min(fitting, most)))

    def sample(self, runs: int) -> Samples:
        """`runs` iterations, with each pass aligned over the ranks and between marks; one synchronisation at the end."""
        marks: dict[str, list[tuple[Any, Any]]] = {which: [] for which in self.work.passes}
        with undisturbed():
            for _ in self.iterations(runs):
                for which in self.work.passes:
                    if self.flush is not None:
                        self.flush.zero_()
                    marks[which].append(self.watch.around(self.work.run, which))
            self.watch.settle()
        return {which: [elapsed_ms(*pair) for pair in pairs] for which, pairs in marks.items()}


def simple(work: Workload, watch: Stopwatch, runs: int) -> Samples:
    """One untimed iteration, then one pair of marks around `runs` calls of each pass: a single mean."""
    iterate(work)
    samples = {}
    with undisturbed():
        for which in work.passes:
            watch.settle()
            samples[which] = [ms / runs for ms in watch.times_ms(partial(work.repeat, which, runs), 1)]
    return samples


def overhead_ms(watch: Stopwatch) -> float:
    """The measured time of an empty region, in ms: the minimum of five."""
    return min(watch.times_ms(lambda: None, 5))


class Graphed:
    """Work captured in CUDA graphs, one per pass; `run` replays them. Capturing collectives may hang on a broken installation;
    the launcher's time limit ends that."""

    def __init__(self, work: Workload):
        self.passes = work.passes
        self.graphs: dict[str, torch.cuda.CUDAGraph] = {}
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                iterate(work)
            stream.synchronize()
            pool = torch.cuda.graph_pool_handle()
            for which in self.passes:
                self.graphs[which] = graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                    work.run(which)
        torch.cuda.current_stream().wait_stream(stream)
        self.work = work
        self.left = {name: vars(work)[name] for name in work.results}  # keeps the captured tensors alive

    def run(self, which: str) -> None:
        self.graphs[which].replay()
        vars(self.work).update(self.left)  # the graph has rewritten these tensors


def measure(work: Workload, iteration_s: float, phase: str = "timing") -> tuple[Timing, list[Samples], Passes]:
    """The timing, all ranks' samples, and the passes that were sampled. iteration_s: seconds that one iteration should take.
    phase: what the ranks announce."""
    me, options, layers = work.me, work.experiment.timing, work.experiment.timing.layers
    by_graphs = options.method == "cudagraph"
    passes: Passes = Graphed(work) if by_graphs else sampled_passes(work)
    watch = Stopwatch(me, lead_ms=LEAD_MS if by_graphs else 0.0)
    note: Fields = {name: getattr(options, name) for name in ("method", "flush_l2", "layers", "new_packs")}
    if options.method == "simple":
        me.say(phase, iteration_s * options.timing_runs)  # one stretch that announces nothing
        mine = simple(work, watch, options.timing_runs)
    else:
        timer = Timer(passes, watch, phase, iteration_s * layers, flush_buffer(work))
        with undisturbed():
            warmed = timer.warm(options.warmup_runs, options.warmup_ms, options.settle_ms)
            if options.method == "adaptive":
                limits = options.timing_runs, options.precision, options.time_cap_s * 1e3
                mine, note["precision_met"] = timer.adaptive(*limits)
            else:
                mine = timer.sample(options.timing_runs)
        note |= {"warmup_iterations": warmed.iterations, "warmup_settled": warmed.settled}
        each_ms = warmed.back_to_back_ms  # None on all ranks or on none
        note["back_to_back_ms"] = each_ms and max(me.gather(each_ms)) / layers
    samples = me.gather({which: [ms / layers for ms in times] for which, times in mine.items()})
    return Timing(**note, **statistics.of_ranks(samples, overhead_ms(watch) / layers)), samples, passes


def sampled_passes(work: Any) -> Passes:
    """The passes that are sampled: those of the workload, or of several layers of attention."""
    layers, new_packs = work.experiment.timing.layers, work.experiment.timing.new_packs
    passes: Passes = work if layers == 1 and not new_packs else Layers(work, layers, new_packs)
    return passes


def flush_buffer(work: Workload) -> Tensor | None:
    """The buffer written before each pass if `timing.flush_l2` is set. As triton's do_bench, 256 MB of int32: a GPU at its
    power limit is the faster the longer it rests between passes, and bytes take longer to write."""
    is_flushed = work.experiment.timing.flush_l2
    return torch.empty(L2_BYTES // 4, dtype=torch.int32, device=work.me.device) if is_flushed else None


def clocks(me: Rank, sampled: Fields) -> During:
    """What `sampler.sampling` sampled of each rank's GPU."""
    by_device = []
    if "series" in sampled:
        by_device = [Sampled(device=environment.gpu_uuid(me.device), **summary(sampled["series"]))]
    mine = During(by_device=by_device, period_ms=sampled.get("period_ms"), unavailable=sampled.get("unavailable"))
    ranks = me.gather(mine)
    first = next((rank for rank in ranks if rank.period_ms), ranks[0])
    return replace(first, by_device=[entry for rank in ranks for entry in rank.by_device])
