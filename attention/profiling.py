"""The executors mark their phases here, and users their own blocks. Nothing is recorded unless a recorder is active.

Names: `comp_*` is compute. `comm_*` is a transfer. `wait_*` is the time that the compute stream (on a CPU, the calling
thread) waits for a transfer. It is exposed communication, unless another stream computes meanwhile. Any other name is a
block of a user's, which may hold phases and is timed as a whole."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch

NO_STEP = -1
WHOLE = "pass"  # the phase that is the whole pass


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
    """Collects spans; read their times when the device is idle. With `annotate`, each phase is also a range by that name:
    of the torch profiler (`torch.profiler.record_function`) or of NVTX (`torch.cuda.nvtx.range`)."""

    def __init__(self, device: torch.device, annotate: Callable[[str], AbstractContextManager[Any]] | None = None):
        self.spans: list[Span] = []
        self.span = _CudaSpan if device.type == "cuda" else _CpuSpan
        self.annotate = annotate or nullcontext


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
        self.range = self.recorder.annotate(self.name)
        self.range.__enter__()
        self.current = self.recorder.span(self.name, self.step)

    def __exit__(self, *exc: object) -> None:
        self.current.end()
        self.recorder.spans.append(self.current)
        self.range.__exit__(None, None, None)


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
    pass this does nothing. Raises ValueError for the name `pass`, which the table gives to the whole pass, and for
    one that is empty or has a comma or a line break."""
    if _active is not None and (not name or name == WHOLE or set(name) & set(",\r\n")):
        raise ValueError(f"phase({name!r}): is no name of a phase; give a word, such as phase('mine')")
    return _NOTHING if _active is None else _Phase(_active, name, step)
