"""The executors mark their phases here, models their layers, and users their own blocks. Nothing is recorded unless a recorder
is active: that of a run, or of `record`.

Names: `comp_*` is compute. `comm_*` is a transfer. `wait_*` is the time that the compute stream (on a CPU, the calling
thread) waits for a transfer. It is exposed communication, unless another stream computes meanwhile. Any other name is a
block of a user's, which may hold phases and is timed as a whole."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from statistics import mean, pstdev
from typing import Any

import torch
from torch import Tensor

NO_STEP = -1
WHOLE = "pass"  # the phase that is the whole pass
KINDS = ("comp_", "wait_", "comm_")  # in the order of tables


class Span:
    """One timed execution of one phase: on CUDA two events on the current stream. Their times are read later, so that recording
    synchronises nothing."""

    def __init__(self, name: str, step: int, cuda: bool):
        self.name, self.step, self.cuda = name, step, cuda
        self.begin = self._now()

    def _now(self) -> Any:
        if not self.cuda:
            return time.perf_counter_ns()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def end(self) -> None:
        self.finish = self._now()

    def since(self, mark: Any) -> tuple[float, float]:
        """(begin, end) in ms after `mark`: a perf_counter_ns on a CPU, an event on CUDA."""
        if self.cuda:
            return mark.elapsed_time(self.begin), mark.elapsed_time(self.finish)
        return (self.begin - mark) / 1e6, (self.finish - mark) / 1e6


class Recorder:
    """Collects spans; read their times when the device is idle. With `annotate`, each phase is also a range by that name:
    of the torch profiler (`torch.profiler.record_function`) or of NVTX (`torch.cuda.nvtx.range`)."""

    def __init__(self, device: torch.device, annotate: Callable[[str], AbstractContextManager[Any]] | None = None):
        self.spans: list[Span] = []
        self.span = partial(Span, cuda=device.type == "cuda")
        self.annotate = annotate or nullcontext
        self.layer: _Phase | None = None  # the one whose backward is going on


_active: Recorder | None = None


@contextmanager
def recording(recorder: Recorder) -> Iterator[Recorder]:
    global _active
    before, _active = _active, recorder
    try:
        yield recorder
    finally:
        _active = before


class Phases:
    """What `record` recorded. `ms` has the length of each execution, by phase; `total_ms` is that of the whole block."""

    def __init__(self) -> None:
        self.ms: dict[str, list[float]] = defaultdict(list)
        self.total_ms = 0.0

    def table(self) -> str:
        """A line for each phase: how often it ran, mean, deviation and total in ms, and its share of the whole block."""
        width = max(map(len, [*self.ms, "whole block"]))
        lines = [f"{'phase':{width}}  {'count':>6}  {'mean ms':>10}  {'deviation':>10}  {'total ms':>10}  {'share':>6}"]
        for name, ms in [*((name, self.ms[name]) for name in in_order(self.ms)), ("whole block", [self.total_ms])]:
            share = sum(ms) / self.total_ms if self.total_ms else 0.0
            numbers = f"{len(ms):6}  {mean(ms):10.3f}  {pstdev(ms):10.3f}  {sum(ms):10.3f}  {share:6.1%}"
            lines.append(f"{name:{width}}  {numbers}")
        return "\n".join(lines)

    __str__ = table


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
    whole = recorder.span(WHOLE, NO_STEP)
    try:
        with recording(recorder):
            yield phases
    finally:
        whole.end()
        if whole.cuda:
            torch.cuda.synchronize()
        for span in [*recorder.spans, whole]:
            begin, end = span.since(whole.begin)
            if span is whole:
                phases.total_ms = end
            else:
                phases.ms[span.name].append(end - begin)


def in_order(names: Iterable[str]) -> list[str]:
    """The names of phases in the order of tables: compute, waiting, transfers, then blocks of a user's."""
    return sorted(names, key=lambda name: (*(not name.startswith(kind) for kind in KINDS), name))


class _Phase:
    def __init__(self, recorder: Recorder, name: str, step: int):
        self.recorder, self.name, self.step = recorder, name, step

    def __enter__(self) -> None:
        self.within = self.recorder.layer
        self._pause(self.within)
        self.start()

    def __exit__(self, *exc: object) -> None:
        self.end()
        if self.within is not None:  # a layer's backward goes on: it recomputed its forward, which has phases
            self.recorder.layer = self.within
            self.within.start()

    def start(self) -> None:
        self.range = self.recorder.annotate(self.name)
        self.range.__enter__()
        self.current = self.recorder.span(self.name, self.step)

    def end(self) -> None:
        self.current.end()
        self.recorder.spans.append(self.current)
        self.range.__exit__(None, None, None)

    def start_backward(self) -> None:
        """Instead of the layer whose backward was going on."""
        self._pause(self.recorder.layer)
        self.recorder.layer = self
        self.start()

    def end_backward(self) -> None:
        if self.recorder.layer is self:
            self._pause(self)

    def _pause(self, layer: _Phase | None) -> None:
        if layer is not None:
            layer.end()
            self.recorder.layer = None


_NOTHING = nullcontext()


def active() -> bool:
    """Whether phases are being recorded."""
    return _active is not None


def phase(name: str, step: int = NO_STEP) -> _Phase | nullcontext[None]:
    """A context manager around the work of one phase of one step.

    Blocks of your own are timed with the program's phases: in a variant, a kernel or a layer write

        with attention.profiling.phase("mine"):
            y = f(x)

    and a run's phase table and `phases.csv` have a row `mine`, in ms, on each rank and in each pass. On CUDA the time is
    that between two events on the current stream. Blocks may hold phases and other blocks; unless its name begins with
    `comp_`, `wait_` or `comm_`, a block overlaps what it holds and is not part of the sum. Outside of a run's phase
    pass and of `record` this does nothing. Raises ValueError for the name `pass`, which the table gives to the whole pass, and for
    one that is empty or has a comma or a line break."""
    if _active is not None and (not name or name == WHOLE or set(name) & set(",\r\n")):
        raise ValueError(f"phase({name!r}): is no name of a phase; give a word, such as phase('mine')")
    return _NOTHING if _active is None else _Phase(_active, name, step)


def layer(name: str, fn: Callable[..., Any], x: Tensor, *more: Any, **named: Any) -> Any:
    """fn(x, *more, **named), as a phase of the forward and one of the backward: from the gradient of its outputs, a tensor or a
    tuple, to that of x. Records nothing, and adds no hook, unless a recorder is active."""
    if _active is None:
        return fn(x, *more, **named)
    with phase(name):
        out = fn(x, *more, **named)
    outs = [y for y in (out if isinstance(out, tuple) else (out,)) if isinstance(y, Tensor) and y.requires_grad]
    if x.requires_grad and outs:
        going: list[_Phase] = []

        def start(_: Tensor) -> None:
            if _active is not None and not going:
                going.append(_Phase(_active, name, NO_STEP))
                going[0].start_backward()

        def end(_: Tensor) -> None:
            if going:
                going.pop().end_backward()

        for y in outs:
            y.register_hook(start)
        x.register_hook(end)
    return out
