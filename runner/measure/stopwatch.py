"""The clocks of the timing methods: events on CUDA, perf_counter on a CPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from attention.gpu import private

if TYPE_CHECKING:
    from runner.launch.rank import Rank

CYCLES_A_MS = 2_000_000  # GPU clock cycles per ms, roughly


class CudaStopwatch:
    """Events on the current stream. lead_ms: how long `align` keeps the GPU busy first, so that every rank's CPU is ahead when
    the ranks start; a replay of some tens of µs would otherwise wait for the slowest CPU. together: as `stopwatch`."""

    def __init__(self, device: torch.device, together: bool, lead_ms: float = 0.0):
        self.device = device
        self.token = torch.zeros(1, dtype=torch.uint8, device=device) if together else None
        self.lead_ms = lead_ms

    def align(self) -> None:
        """Makes all ranks start the next pass together: an all-reduce of one element on the stream, so the CPU runs ahead. It
        is a minimum over uint8, which no variant uses, so a profile can tell it apart."""
        if self.lead_ms:
            private.sleep_cycles(int(self.lead_ms * CYCLES_A_MS))
        if self.token is not None:
            dist.all_reduce(self.token, dist.ReduceOp.MIN)

    def mark(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def elapsed(self, start: Any, stop: Any) -> float:
        """ms between two marks, after `settle`."""
        return start.elapsed_time(stop)

    def settle(self) -> None:
        """Waits until all marks are reached."""
        torch.cuda.synchronize(self.device)


class CpuStopwatch:
    """The same by the CPU's clock. group: whose ranks start each pass together."""

    def __init__(self, group: dist.ProcessGroup | None):
        self.group = group

    def align(self) -> None:
        if self.group is not None:
            dist.barrier(self.group)

    def mark(self) -> Any:
        return time.perf_counter_ns()

    def elapsed(self, start: Any, stop: Any) -> float:
        return (stop - start) / 1e6

    def settle(self) -> None: ...


Stopwatch = CudaStopwatch | CpuStopwatch


def stopwatch(me: Rank, together: bool, lead_ms: float = 0.0) -> Stopwatch:
    """The stopwatch of this rank's device. together: all ranks start each pass at once. lead_ms: see `CudaStopwatch`."""
    if me.device.type == "cuda":
        return CudaStopwatch(me.device, together, lead_ms)
    return CpuStopwatch(me.control if together else None)


def between_marks(watch: Stopwatch, run: Callable[..., object], *arguments: Any) -> tuple[Any, Any]:
    """The marks before and after `run`, which all ranks start together."""
    watch.align()
    start = watch.mark()
    run(*arguments)
    return start, watch.mark()


def times_ms(watch: Stopwatch, run: Callable[[], object], times: int) -> list[float]:
    """ms of so many calls, each of which all ranks start together."""
    pairs = [between_marks(watch, run) for _ in range(times)]
    watch.settle()
    return [watch.elapsed(*marks) for marks in pairs]
