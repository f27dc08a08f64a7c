"""The executors mark their phases here, models their layers, and users their own blocks. Nothing is recorded unless a recorder
is active: that of a run, or of `record`.

Names: `comp_*` is compute. `comm_*` is a transfer. `wait_*` is the time that the compute stream (on a CPU, the calling
thread) waits for a transfer. It is exposed communication, unless another stream computes meanwhile. Any other name is a
block of a user's, which may hold phases and is timed as a whole."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from statistics import mean, pstdev
from typing import Any

import torch
from torch import Tensor

NO_STEP = -1
WHOLE = "pass"  # the phase that is the whole pass
KINDS = ("comp_", "wait_", "comm_")  # in the order of tables


@dataclass(eq=False)
class Span:
    """One timed execution of one phase, as a context."""

    recorder: Recorder
    name: str
    step: int = NO_STEP

    def __enter__(self) -> None:
        self.within = self.recorder.pause()
        self.start()

    def __exit__(self, *exc: object) -> None:
        self.end()
        if self.within:  # a layer's backward goes on: it recomputed its forward, which has phases
            self.recorder.start_layer(self.within)

    def start(self) -> None:
        self.range = self.recorder.annotate(self.name)
        self.range.__enter__()
        self.begin = self.recorder.now()

    def end(self) -> None:
        self.finish = self.recorder.now()
        self.recorder.spans.append(self)
        self.range.__exit__(None, None, None)

    def since(self, mark: Any) -> tuple[float, float]:
        """(begin, end) in ms after `mark` of the same clock."""
        return elapsed_ms(mark, self.begin), elapsed_ms(mark, self.finish)


def clock(device: torch.device) -> Callable[[], Any]:
    """The function that marks the present on such a device: perf_counter_ns on a CPU, an event on the current stream on CUDA. Times
    of events are read later, when the device is idle, so that recording synchronises nothing."""
    return _event if device.type == "cuda" else time.perf_counter_ns


def _event() -> Any:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def elapsed_ms(start: Any, stop: Any) -> float:
    """ms between two marks of a `clock`."""
    return (stop - start) / 1e6 if isinstance(start, int) else start.elapsed_time(stop)


class Recorder:
    """Collects spans; read their times when the device is idle. With `annotate`, each phase is also a range by that name:
    of the torch profiler (`torch.profiler.record_function`) or of NVTX (`torch.cuda.nvtx.range`)."""

    def __init__(self, device: torch.device, annotate: Callable[[str], Any] | None = None):
        self.spans: list[Span] = []
        self.span = partial(Span, self)
        self.now = clock(device)
        self.annotate = annotate or nullcontext
        self.layer: str | None = None  # whose backward is going on

    def start_layer(self, name: str) -> None:
        """The backward of a layer, instead of the one that was going on."""
        self.pause()
        self.layer, self.backward = name, self.span(name)
        self.backward.start()

    def pause(self) -> str | None:
        name, self.layer = self.layer, None
        if name:
            self.backward.end()
        return name


active: Recorder | None = None  # phases are recorded while there is one


@contextmanager
def recording(recorder: Recorder) -> Iterator[Recorder]:
    global active
    before, active = active, recorder
    try:
        yield recorder
    finally:
        active = before


class Phases:
    """What `record` recorded. `ms` has the length of each execution, by phase; `total_ms` is that of the whole block."""

    def __init__(self) -> None:
        self.ms: dict[str, list[float]] = defaultdict(list)
        self.total_ms = 0.0

    def __str__(self) -> str:
        """A line for each phase: how often it ran, mean, deviation and total in ms, and its share of the whole block."""
        rows = {name: self.ms[name] for name in in_order(self.ms)} | {"whole block": [self.total_ms]}
        width = max(map(len, rows))
        lines = [f"{'phase':{width}}  {'count':>6}  {'mean ms':>10}  {'deviation':>10}  {'total ms':>10}  {'share':>6}"]
        lines += [
            f"{name:{width}}  {len(ms):6}  {mean(ms):10.3f}  {pstdev(ms):10.3f}  {sum(ms):10.3f}  "
            f"{sum(ms) / (self.total_ms or 1):6.1%}"
            for name, ms in rows.items()
        ]
        return "\n".join(lines)


@contextmanager
def record() -> Iterator[Phases]:
    """Records the phases of the calls in it, outside of a run:

        with attention.profiling.record() as phases:
            with attention.profiling.phase("mine"):
                y = f(x)
        print(phases)

    The phases are complete when the block ends. On CUDA their times are those between events on the current stream, and
    the end waits for the device. CUDA graphs are off meanwhile."""
    phases, recorder = Phases(), Recorder(torch.device("cuda" if torch.cuda.is_initialized() else "cpu"))
    try:
        with recording(recorder), recorder.span(WHOLE):
            yield phases
    finally:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        for span in recorder.spans:
            phases.ms[span.name].append(span.since(span.begin)[1])
        (phases.total_ms,) = phases.ms.pop(WHOLE)


def in_order(names: Iterable[str]) -> list[str]:
    """The names of phases in the order of tables: compute, waiting, transfers, then blocks of a user's."""
    return sorted(names, key=lambda name: ([not name.startswith(kind) for kind in KINDS], name))


_NOTHING = nullcontext()


def phase(name: str, step: int = NO_STEP) -> Span | nullcontext[None]:
    """A context manager around the work of one phase of one step.

    Blocks of your own are timed with the program's phases: in a variant, a kernel or a layer write

        with attention.profiling.phase("mine"):
            y = f(x)

    and a run's phase table and `phases.csv` have a row `mine`, in ms, on each rank and in each pass. On CUDA the time is
    that between two events on the current stream. Blocks may hold phases and other blocks; unless its name begins with
    `comp_`, `wait_` or `comm_`, a block overlaps what it holds and is not part of the sum. Outside of a run's phase
    pass and of `record` this does nothing. Raises ValueError for the name `pass`, which the table gives to the whole pass, and for
    one that is empty or has a comma or a line break."""
    if active is None:
        return _NOTHING
    if not name or name == WHOLE or set(name) & set(",\r\n"):
        raise ValueError(f"phase({name!r}): is no name of a phase; give a word, such as phase('mine')")
    return active.span(name, step)


def layer(name: str, fn: Callable[..., Any], x: Tensor, *more: Any, **named: Any) -> Any:
    """fn(x, *more, **named), as a phase of the forward and one of the backward: from the gradient of its outputs, a tensor or a
    tuple, to that of x. Records nothing, and adds no hook, unless a recorder is active."""
    with phase(name):
        out = fn(x, *more, **named)
    recorder = active
    if recorder is None or not x.requires_grad:
        return out

    def start(_: Tensor) -> None:
        if active is recorder and recorder.layer != name:
            recorder.start_layer(name)

    def end(_: Tensor) -> None:
        if recorder.layer == name:
            recorder.pause()

    for y in out if isinstance(out, tuple) else (out,):
        if isinstance(y, Tensor) and y.requires_grad:
            y.register_hook(start)
    x.register_hook(end)
    return out
