"""The executors mark their phases here. Nothing is recorded unless a recorder is active.

Names: `comp_*` is compute. `comm_*` is a transfer. `wait_*` is the time that the compute stream (on a CPU, the calling
thread) waits for a transfer. It is exposed communication, unless another stream computes meanwhile."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol

import torch

NO_STEP = -1


class Span(Protocol):
    """One timed execution of one phase."""

    name: str
    step: int

    def since(self, mark: Any) -> tuple[float, float]:
        """(begin, end) in ms after `mark`: a perf_counter_ns on a CPU, an event on CUDA."""


class _CpuSpan:
    def __init__(self, name: str, step: int):
        self.name, self.step, self.start, self.stop = name, step, time.perf_counter_ns(), 0

    def end(self) -> None:
        self.stop = time.perf_counter_ns()

    def since(self, mark: int) -> tuple[float, float]:
        return (self.start - mark) / 1e6, (self.stop - mark) / 1e6


class _CudaSpan:
    """Two events on the current stream. Their times are read later, so that recording synchronises nothing."""

    def __init__(self, name: str, step: int):
        self.name, self.step = name, step
        self.begin = torch.cuda.Event(enable_timing=True)
        self.finish = torch.cuda.Event(enable_timing=True)
        self.begin.record()

    def end(self) -> None:
        self.finish.record()

    def since(self, mark: torch.cuda.Event) -> tuple[float, float]:
        return mark.elapsed_time(self.begin), mark.elapsed_time(self.finish)


class Recorder:
    """Collects spans; read their times when the device is idle. With `annotate`, each phase is also a range of the
    running torch profiler."""

    def __init__(self, device: torch.device, annotate: bool = False):
        self.spans: list[Span] = []
        self.span = _CudaSpan if device.type == "cuda" else _CpuSpan
        self.annotate = annotate


_active: Recorder | None = None


@contextmanager
def recording(recorder: Recorder) -> Iterator[Recorder]:
    global _active
    before, _active = _active, recorder
    try:
        yield recorder
    finally:
        _active = before


class _Phase:
    def __init__(self, recorder: Recorder, name: str, step: int):
        self.recorder, self.name, self.step = recorder, name, step

    def __enter__(self) -> None:
        if self.recorder.annotate:
            self.range = torch.profiler.record_function(self.name)
            self.range.__enter__()
        self.current = self.recorder.span(self.name, self.step)

    def __exit__(self, *exc: object) -> None:
        self.current.end()
        self.recorder.spans.append(self.current)
        if self.recorder.annotate:
            self.range.__exit__(None, None, None)


_NOTHING = nullcontext()


def active() -> bool:
    """Whether phases are being recorded."""
    return _active is not None


def phase(name: str, step: int = NO_STEP) -> _Phase | nullcontext[None]:
    """A context manager around the work of one phase of one step."""
    return _NOTHING if _active is None else _Phase(_active, name, step)
