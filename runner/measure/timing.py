"""The timing methods, with the clocks of `stopwatch`. All ranks do the same number of iterations. Samples are in ms, and
none is dropped."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attention.profiling import Recorder, Span
from runner.measure import statistics
from runner.measure.statistics import Samples
from runner.measure.stopwatch import CudaStopwatch, Stopwatch, between_marks
from runner.measure.workload import Passes, Workload

LEAD_MS = 0.1  # the CPU's lead over the GPU before a sample, if it needs one
WINDOW = 12  # the latest iterations of a warm-up, which are tested for a trend
WINDOW_CHANCE = 0.05  # the significance of that trend
BATCH = 10  # samples between two checks of `adaptive`

Gather = Callable[[Samples], list[Samples]]  # every rank's samples
Agree = Callable[[int], int]  # rank 0's number


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
    no other group."""

    iterations: int
    back_to_back_ms: float | None


def warm(
    work: Passes,
    watch: Stopwatch,
    runs: int,
    at_least_ms: float,
    agree: Agree = int,
    beat: Callable[[], None] = lambda: None,
) -> Warmed:
    """Iterates until both limits are reached, equally on all ranks. The clock is read only after groups of iterations, so that
    the GPU is as busy as during sampling; a group is at most as long as all earlier ones together. (After a pause, a GPU at
    its power limit is faster for some 80 ms.) beat: called after each iteration."""
    done = longest = 0
    more = max(runs, 1 if at_least_ms > 0 else 0)
    each_ms: float | None = None
    start = time.perf_counter()
    while more:
        began = time.perf_counter()
        for _ in range(more):
            iterate(work)
            beat()
        watch.settle()
        now = time.perf_counter()
        if done and more >= longest:
            longest, each_ms = more, (now - began) * 1e3 / more
        done += more
        passed_ms = (now - start) * 1e3
        lacking = math.ceil(done * (at_least_ms - passed_ms) / passed_ms) if passed_ms < at_least_ms else 0
        more = agree(min(lacking, done))
    return Warmed(done, each_ms)


@dataclass(frozen=True)
class Settling:
    """The additional iterations of a warm-up. settled: whether the latest ones show no trend; None if there were too few."""

    iterations: int
    settled: bool | None


def settle(
    work: Passes,
    watch: Stopwatch,
    cap_ms: float,
    each_ms: float | None,
    gather: Gather = lambda mine: [mine],
    agree: Agree = int,
    flush: Tensor | None = None,
    beat: Callable[[], None] = lambda: None,
) -> Settling:
    """Continues a warm-up, with iterations as in `sample`, until the latest `WINDOW` iterations show no trend in any pass of the
    slowest rank, or until `cap_ms` is over; equally on all ranks. each_ms: the time of an iteration so far; None if unknown:
    then a single iteration is timed first."""
    so_far: Samples = {}
    done = 0
    start = time.perf_counter()
    while True:
        left_ms = cap_ms - (time.perf_counter() - start) * 1e3
        fitting = int(left_ms / each_ms) if each_ms is not None else int(cap_ms > 0)
        more = agree(max(0, min(WINDOW, fitting)))
        if not more:
            return Settling(done, _level(so_far) if done >= statistics.TREND_SAMPLES else None)
        began = time.perf_counter()
        for which, ms in statistics.slowest(gather(sample(work, watch, more, flush, beat))).items():
            so_far[which] = [*so_far.get(which, []), *ms][-WINDOW:]
        each_ms = (time.perf_counter() - began) * 1e3 / more
        done += more
        if done >= WINDOW and _level(so_far):
            return Settling(done, True)


def _level(samples: Samples) -> bool:
    return not any(statistics.trend(ms, chance=WINDOW_CHANCE) for ms in samples.values())


def sample(
    work: Passes, watch: Stopwatch, runs: int, flush: Tensor | None = None, beat: Callable[[], None] = lambda: None
) -> Samples:
    """`runs` iterations, with each pass aligned over the ranks and between marks; one synchronisation at the end. flush: a
    buffer written before each pass, to empty the L2 cache."""
    marks: dict[str, list[tuple[Any, Any]]] = {which: [] for which in work.passes}
    with undisturbed():
        for _ in range(runs):
            for which in work.passes:
                if flush is not None:
                    flush.zero_()
                marks[which].append(between_marks(watch, work.run, which))
            beat()
        watch.settle()
    return {which: [watch.elapsed(a, b) for a, b in pairs] for which, pairs in marks.items()}


@dataclass(frozen=True)
class Recorded:
    """One pass of a rank: its begin, end and phases."""

    which: str
    start: Any
    stop: Any
    spans: list[Span]


def record(work: Passes, watch: Stopwatch, runs: int, recorder: Recorder, leads: dict[str, float]) -> list[Recorded]:
    """`runs` iterations as in `sample`, with the recorder active; leads: from `leads_ms`."""
    found = []
    with undisturbed():
        for _ in range(runs):
            for which in work.passes:
                if isinstance(watch, CudaStopwatch):
                    watch.lead_ms = leads[which]
                found.append(Recorded(which, *between_marks(watch, work.run, which), recorder.spans[:]))
                recorder.spans.clear()
        watch.settle()
    return found


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
    found = {}
    for which in (*work.passes, *work.passes):
        watch.settle()
        start = time.perf_counter()
        work.run(which)
        found[which] = (time.perf_counter() - start) * 1e3
    watch.settle()
    return found


def simple(work: Workload, watch: Stopwatch, runs: int) -> Samples:
    """One untimed iteration, then one pair of marks around `runs` calls of each pass: a single mean."""
    iterate(work)
    samples = {}
    with undisturbed():
        for which in work.passes:
            watch.settle()
            marks = between_marks(watch, work.repeat, which, runs)
            watch.settle()
            samples[which] = [watch.elapsed(*marks) / runs]
    return samples


def adaptive(
    work: Passes,
    watch: Stopwatch,
    least: int,
    decide: Callable[[Samples, float], bool | None],
    flush: Tensor | None = None,
    beat: Callable[[], None] = lambda: None,
) -> tuple[Samples, bool]:
    """(samples, whether the precision was met). Samples in batches, until `decide(samples so far, seconds)` returns a verdict,
    which is the same on every rank."""
    samples: Samples = {which: [] for which in work.passes}
    start = time.perf_counter()
    met = None
    while met is None:
        for which, more in sample(work, watch, min(BATCH, max(least, 1)), flush, beat).items():
            samples[which] += more
        met = decide(samples, time.perf_counter() - start)
    return samples, met


def verdict(slowest: Samples, least: int, precision: float, seconds: float, time_cap_s: float) -> bool | None:
    """The stopping rule of `adaptive`, on the slowest rank's times: True when every pass is precise enough, False when
    the time is over, None to continue."""
    if all(statistics.settled(ms, precision, least) for ms in slowest.values()):
        return True
    return False if seconds > time_cap_s else None


def overhead_ms(watch: Stopwatch) -> float:
    """The measured time of an empty region, in ms: the minimum of five."""
    pairs = [between_marks(watch, lambda: None) for _ in range(5)]
    watch.settle()
    return min(watch.elapsed(a, b) for a, b in pairs)


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
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                    work.run(which)
                self.graphs[which] = graph
        torch.cuda.current_stream().wait_stream(stream)
        self.work, self.left = work, work.left  # keeps the captured tensors alive

    def run(self, which: str) -> None:
        self.graphs[which].replay()
        self.work.left = self.left  # the graph has rewritten these tensors
