"""The timing methods. `Passes` are what is timed, in order; a `Stopwatch` is how (events on CUDA,
perf_counter on a CPU). All ranks do the same number of iterations; samples are ms and are never dropped."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from attention.profiling import Recorder, Span
from runner.measure import statistics
from runner.measure.statistics import Samples

if TYPE_CHECKING:
    from runner.measure.workload import AttentionWork

LEAD_MS = 0.1  # that hosts get ahead of their GPUs, where they do
LEADING_RUNS = 4  # iterations that leads_ms makes
CYCLES_A_MS = 2_000_000  # of a GPU's clock, about
WINDOW = 12  # iterations, the newest of a warm-up, that show whether it has settled,
WINDOW_CHANCE = 0.05  # taken for a trend where those without one would seldom rise or fall as steadily
BATCH = 10  # adaptive looks at its samples every so many
BASELINE_RUNS = 5  # samples of a baseline,
BASELINE_S = 1.0  # more of short iterations, for so long,
BASELINE_CAP_S = 20.0  # and fewer of long ones, so that they end after this, but one at least


class Passes(Protocol):
    """`passes` in the order in which they run within an iteration: `forward`, then `backward` where it is timed."""

    passes: tuple[str, ...]

    def run(self, which: str) -> None:
        """One pass; `backward` uses the last `forward`."""


class Workpiece(Passes, Protocol):
    """Passes that can be had by themselves, over and over."""

    def repeat(self, which: str, times: int) -> None:
        """The same pass `times` times."""


class Stopwatch(Protocol):
    def align(self) -> None:
        """All ranks start the next pass together."""

    def mark(self) -> Any: ...

    def elapsed(self, start: Any, stop: Any) -> float:
        """ms between two marks, after `settle`."""

    def settle(self) -> None:
        """Wait until everything marked has happened."""


class CudaStopwatch:
    """Events on the current stream. Aligning is a one-element all-reduce on it, so the host runs ahead; a minimum over
    uint8, which no variant does, so that a profile can tell it from their communication. For `lead_ms` the GPU is kept
    busy first, so that every rank's host is ahead of it when the ranks start: what is replayed in some tens of us is over
    before the slowest host has launched it, and all ranks would wait for that one."""

    def __init__(self, device: torch.device, together: bool, lead_ms: float = 0.0):
        self.device = device
        self.token = torch.zeros(1, dtype=torch.uint8, device=device) if together else None
        self.lead_ms = lead_ms

    def align(self) -> None:
        if self.lead_ms:
            torch.cuda._sleep(int(self.lead_ms * CYCLES_A_MS))
        if self.token is not None:
            dist.all_reduce(self.token, dist.ReduceOp.MIN)

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def elapsed(self, start: Any, stop: Any) -> float:
        return start.elapsed_time(stop)

    def settle(self) -> None:
        torch.cuda.synchronize(self.device)


class CpuStopwatch:
    def __init__(self, group: dist.ProcessGroup | None):
        self.group = group

    def align(self) -> None:
        if self.group is not None:
            dist.barrier(self.group)

    def mark(self) -> int:
        return time.perf_counter_ns()

    def elapsed(self, start: Any, stop: Any) -> float:
        return (stop - start) / 1e6

    def settle(self) -> None: ...


@contextmanager
def undisturbed() -> Iterator[None]:
    """No garbage collection in between, but one before, unless this is within another such stretch. Samples and the
    warm-up before them belong into one, for collecting is a pause."""
    was = gc.isenabled()
    if was:
        gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


@dataclass(frozen=True)
class Warmed:
    """A warm-up of so many iterations; the ms of one in its longest stretch but the first, back to back and with nothing between
    them, as a model's layers follow each other. None where there was only the first, which may have compiled and allocated."""

    iterations: int
    back_to_back_ms: float | None


def warm(
    work: Passes,
    watch: Stopwatch,
    runs: int,
    at_least_ms: float,
    agree: Callable[[int], int],
    beat: Callable[[], None] | None = None,
) -> Warmed:
    """Iterate until both limits are reached, on all ranks alike (`agree` gives rank 0's number). Only after a stretch of
    iterations, each at most as long as all before, is the clock looked at, so that a GPU is as busy as it will be when
    sampled: after a pause one at its power limit is faster for some 80 ms."""
    done = 0
    more = max(runs, 1 if at_least_ms > 0 else 0)
    longest = 0
    each_ms: float | None = None
    start = time.perf_counter()
    while more:
        began = time.perf_counter()
        for _ in range(more):
            _iteration(work)
            if beat is not None:
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
    """`iterations` that a warm-up took further. `settled`: whether the newest showed no trend; None where the time was too
    short for as many as can say."""

    iterations: int
    settled: bool | None


def settle(
    work: Passes,
    watch: Stopwatch,
    cap_ms: float,
    each_ms: float | None,
    gather: Callable[[Samples], list[Samples]],
    agree: Callable[[int], int],
    flush: Tensor | None = None,
    beat: Callable[[], None] | None = None,
) -> Settling:
    """Go on with a warm-up, by iterations as `sample` has them, until the newest `WINDOW` show no trend in any pass on the
    slowest rank, or `cap_ms` are over. All ranks do the same number: `gather` gives every rank's samples, `agree` rank 0's
    number. `each_ms`: what an iteration took so far; None where that is not known, so that the first one is by itself."""
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


def _iteration(work: Passes) -> None:
    for which in work.passes:
        work.run(which)


def sample(
    work: Passes, watch: Stopwatch, runs: int, flush: Tensor | None = None, beat: Callable[[], None] | None = None
) -> Samples:
    """`runs` iterations, each pass aligned over the ranks and between its own marks, one settling at the end."""
    marks: dict[str, list[tuple[Any, Any]]] = {which: [] for which in work.passes}
    with undisturbed():
        for _ in range(runs):
            for which in work.passes:
                if flush is not None:
                    flush.zero_()
                watch.align()
                start = watch.mark()
                work.run(which)
                marks[which].append((start, watch.mark()))
            if beat is not None:
                beat()
        watch.settle()
    return {which: [watch.elapsed(a, b) for a, b in pairs] for which, pairs in marks.items()}


@dataclass(frozen=True)
class Recorded:
    """One pass of a rank: when it began and ended, and its phases."""

    which: str
    start: Any
    stop: Any
    spans: list[Span]


def record(work: Passes, watch: Stopwatch, runs: int, recorder: Recorder, leads: dict[str, float]) -> list[Recorded]:
    """`runs` iterations as `sample` has them, with the recorder active; `leads` as `leads_ms` gives them."""
    found = []
    with undisturbed():
        for _ in range(runs):
            for which in work.passes:
                if isinstance(watch, CudaStopwatch):
                    watch.lead_ms = leads[which]
                watch.align()
                start = watch.mark()
                work.run(which)
                found.append(Recorded(which, start, watch.mark(), recorder.spans[:]))
                recorder.spans.clear()
        watch.settle()
    return found


def leads_ms(
    work: Passes, watch: Stopwatch, observed: Callable[[], AbstractContextManager[object]]
) -> dict[str, float]:
    """How far hosts must get ahead of their GPUs in each pass so that what `observed` costs them is not taken for the pass's own
    idle time. Nothing on a CPU, which computes itself."""
    if not isinstance(watch, CudaStopwatch):
        return {}
    usual = _issued_ms(work, watch)
    with observed():
        slowed = _issued_ms(work, watch)
    return {which: LEAD_MS + max(0.0, slowed[which] - usual[which]) for which in work.passes}


def _issued_ms(work: Passes, watch: Stopwatch) -> dict[str, float]:
    """How long the host takes to issue each pass, the second time."""
    found = {}
    for which in (*work.passes, *work.passes):
        watch.settle()
        start = time.perf_counter()
        work.run(which)
        found[which] = (time.perf_counter() - start) * 1e3
    watch.settle()
    return found


def simple(work: Workpiece, watch: Stopwatch, runs: int) -> Samples:
    """One untimed call, then one pair of marks around `runs` calls of each pass: one number, their mean."""
    _iteration(work)
    samples = {}
    with undisturbed():
        for which in work.passes:
            watch.settle()
            watch.align()
            start = watch.mark()
            work.repeat(which, runs)
            stop = watch.mark()
            watch.settle()
            samples[which] = [watch.elapsed(start, stop) / runs]
    return samples


def adaptive(
    work: Passes,
    watch: Stopwatch,
    least: int,
    decide: Callable[[Samples, float], bool | None],
    flush: Tensor | None = None,
    beat: Callable[[], None] | None = None,
) -> tuple[Samples, bool]:
    """Sample in batches until `decide(samples so far, seconds)` has a verdict, the same on every rank. Returns the
    samples and whether the precision was met."""
    samples: Samples = {which: [] for which in work.passes}
    start = time.perf_counter()
    while True:
        for which, more in sample(work, watch, min(BATCH, max(least, 1)), flush, beat).items():
            samples[which] += more
        met = decide(samples, time.perf_counter() - start)
        if met is not None:
            return samples, met


def verdict(slowest: Samples, least: int, precision: float, seconds: float, time_cap_s: float) -> bool | None:
    """Adaptive's stopping rule, on the slowest rank's time of each iteration: True when every pass is known precisely
    enough, False when the time is over, None to go on."""
    if all(statistics.settled(ms, precision, least) for ms in slowest.values()):
        return True
    return False if seconds > time_cap_s else None


def baseline_runs(runs: int, iteration_s: float) -> int:
    """Samples of a baseline beside `runs` of the run itself: of short iterations as many, for after a pause a GPU is
    faster than it can go on being, and of a few samples the median would be of those."""
    runs = min(runs, max(BASELINE_RUNS, int(BASELINE_S / iteration_s)))
    return max(1, min(runs, int(BASELINE_CAP_S / iteration_s)))


def overhead_ms(watch: Stopwatch) -> float:
    """What an empty region measures: the least of five."""
    pairs = []
    for _ in range(5):
        watch.align()
        start = watch.mark()
        pairs.append((start, watch.mark()))
    watch.settle()
    return min(watch.elapsed(a, b) for a, b in pairs)


class Graphed:
    """A workpiece captured once in CUDA graphs, a graph a pass; running it replays. Capturing with collectives can hang
    on a broken stack: the launcher's time limit bounds it."""

    def __init__(self, work: AttentionWork):
        self.passes = work.passes
        self.graphs: dict[str, torch.cuda.CUDAGraph] = {}
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                _iteration(work)
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
        self.work.left = self.left  # which the graph has written anew

    def repeat(self, which: str, times: int) -> None:
        for _ in range(times):
            self.run(which)
