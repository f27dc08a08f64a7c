"""The timing methods, with the clocks of `stopwatch`. All ranks do the same number of iterations. Samples are in ms, and
none is dropped."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from attention.profiling import Recorder, Span
from runner.measure import statistics
from runner.measure.statistics import Samples
from runner.measure.stopwatch import CudaStopwatch, Stopwatch, between_marks, times_ms
from runner.measure.workload import Passes, Workload

LEAD_MS = 0.1  # the CPU's lead over the GPU before a sample, if it needs one
WINDOW = 12  # the latest iterations of a warm-up, which are tested for a trend
WINDOW_CHANCE = 0.05  # the significance of that trend
BATCH = 10  # samples between two checks of `adaptive`

T = TypeVar("T")


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
    """Times iterations of `work` on this rank. flush: a buffer written before each pass, to empty the L2 cache. announce:
    called with their number before iterations that follow each other, and with 0 after each of them. gather: every
    rank's samples. agree: rank 0's decision."""

    work: Passes
    watch: Stopwatch
    flush: Tensor | None = None
    announce: Callable[[int], None] = lambda runs: None
    gather: Callable[[Samples], list[Samples]] = lambda mine: [mine]
    agree: Callable[[int], int] = int

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
            self.announce(more)
            for _ in range(more):
                iterate(self.work)
                self.announce(0)
            self.watch.settle()
            now = time.perf_counter()
            if done and more >= longest:
                longest, each_ms = more, (now - began) * 1e3 / more
            done += more
            passed_ms = (now - start) * 1e3
            lacking = math.ceil(done * (at_least_ms - passed_ms) / passed_ms) if passed_ms < at_least_ms else 0
            more = self.agree(min(lacking, done))
        further, settled = self.settle(settle_ms if done else 0.0, each_ms)
        return Warmed(done + further, each_ms, settled)

    def settle(self, cap_ms: float, each_ms: float | None) -> tuple[int, bool | None]:
        """Continues a warm-up, with iterations as in `sample`, until the latest `WINDOW` iterations show no trend in any
        pass of the slowest rank, or until `cap_ms` is over; equally on all ranks. Returns the number of iterations, and
        whether they settled. each_ms: the time of an iteration so far; None if unknown: then a single iteration is timed
        first."""
        latest: Samples = {}
        done = 0
        start = time.perf_counter()
        while True:
            left_ms = cap_ms - (time.perf_counter() - start) * 1e3
            fitting = int(left_ms / each_ms) if each_ms is not None else int(cap_ms > 0)
            more = self.agree(max(0, min(WINDOW, fitting)))
            if more:
                began = time.perf_counter()
                for which, ms in statistics.slowest(self.gather(self.sample(more))).items():
                    latest[which] = [*latest.get(which, []), *ms][-WINDOW:]
                each_ms = (time.perf_counter() - began) * 1e3 / more
                done += more
            level = not any(statistics.trend(ms, chance=WINDOW_CHANCE) for ms in latest.values())
            if not more or (done >= WINDOW and level):
                return done, level if done >= statistics.TREND_SAMPLES else None

    def sample(self, runs: int) -> Samples:
        """`runs` iterations, with each pass aligned over the ranks and between marks; one synchronisation at the end."""
        marks: dict[str, list[tuple[Any, Any]]] = {which: [] for which in self.work.passes}
        self.announce(runs)
        with undisturbed():
            for _ in range(runs):
                for which in self.work.passes:
                    if self.flush is not None:
                        self.flush.zero_()
                    marks[which].append(between_marks(self.watch, self.work.run, which))
                self.announce(0)
            self.watch.settle()
        return {which: [self.watch.elapsed(a, b) for a, b in pairs] for which, pairs in marks.items()}

    def adaptive(self, least: int, precision: float, time_cap_s: float) -> tuple[Samples, bool]:
        """(samples, whether the precision was met). Samples in batches until every pass of the slowest rank is precise
        enough, or the time is over."""
        samples: Samples = {which: [] for which in self.work.passes}
        start = time.perf_counter()
        while True:
            for which, more in self.sample(min(BATCH, max(least, 1))).items():
                samples[which] += more
            met = statistics.precise(self.gather(samples), precision, least)
            if met or self.agree(time.perf_counter() - start > time_cap_s):
                return samples, met


@dataclass(frozen=True)
class Recorded:
    """One pass of a rank: its begin, end and phases."""

    which: str
    start: Any
    stop: Any
    spans: list[Span]


def record(
    work: Passes, watch: Stopwatch, runs: int, recorder: Recorder, observed: Callable[[], AbstractContextManager[T]]
) -> tuple[list[Recorded], T]:
    """`runs` iterations as in `Timer.sample` within `observed`, where the recorder is active; and what `observed` gives."""
    leads = leads_ms(work, watch, observed)
    recorder.spans.clear()
    passes = []
    with observed() as observer, undisturbed():
        for which in work.passes * runs:
            if isinstance(watch, CudaStopwatch):
                watch.lead_ms = leads[which]
            passes.append(Recorded(which, *between_marks(watch, work.run, which), recorder.spans[:]))
            recorder.spans.clear()
        watch.settle()
    return passes, observer


def leads_ms(
    work: Passes, watch: Stopwatch, observed: Callable[[], AbstractContextManager[object]]
) -> dict[str, float]:
    """The lead in ms that the CPU needs over the GPU in each pass, so that the cost of recording (within `observed`) does not
    appear as idle time of the GPU. Empty on a CPU."""
    if not isinstance(watch, CudaStopwatch):
        return {}
    usual = _issued_ms(work, watch)
    with observed():
        slowed = _issued_ms(work, watch)
    return {which: LEAD_MS + max(0.0, slowed[which] - usual[which]) for which in work.passes}


def _issued_ms(work: Passes, watch: Stopwatch) -> dict[str, float]:
    """The CPU launch overhead of each pass in ms, at its second run."""
    launched = {}
    for which in work.passes * 2:
        watch.settle()
        start = time.perf_counter()
        work.run(which)
        launched[which] = (time.perf_counter() - start) * 1e3
    watch.settle()
    return launched


def simple(work: Workload, watch: Stopwatch, runs: int) -> Samples:
    """One untimed iteration, then one pair of marks around `runs` calls of each pass: a single mean."""
    iterate(work)
    samples = {}
    with undisturbed():
        for which in work.passes:
            watch.settle()
            samples[which] = [ms / runs for ms in times_ms(watch, partial(work.repeat, which, runs), 1)]
    return samples


def overhead_ms(watch: Stopwatch) -> float:
    """The measured time of an empty region, in ms: the minimum of five."""
    return min(times_ms(watch, lambda: None, 5))


class Around:
    """Passes of which each runs within a context, made by its name."""

    def __init__(self, work: Passes, context: Callable[[str], AbstractContextManager[object]]):
        self.work, self.passes, self.context = work, work.passes, context

    def run(self, which: str) -> None:
        with self.context(which):
            self.work.run(which)


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
        self.work, self.left = work, work.left  # keeps the captured tensors alive

    def run(self, which: str) -> None:
        self.graphs[which].replay()
        self.work.left = self.left  # the graph has rewritten these tensors
