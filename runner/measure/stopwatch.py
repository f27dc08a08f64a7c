"""The clock of the timing methods, and the ranks that time together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from attention import profiling
from attention.gpu import private
from runner.launch.rank import Rank

CYCLES_A_MS = 2_000_000  # GPU clock cycles per ms, roughly


class Stopwatch:
    """Events on the current stream of a GPU, or the CPU's clock. lead_ms: how long `align` keeps a GPU
    busy first, so that every rank's CPU is ahead when the ranks start; a replay of some tens of µs would otherwise wait for
    the slowest CPU."""

    def __init__(self, me: Rank, lead_ms: float = 0.0):
        self.me, self.lead_ms = me, lead_ms
        self.on_gpu = me.device.type == "cuda"
        self.token = torch.zeros(1, dtype=torch.uint8, device=me.device)

    def align(self) -> None:
        """Makes all ranks start the next pass together, on GPUs by an all-reduce of one element on the stream, so the CPU runs ahead.
        It is a minimum over uint8, which no variant uses, so a profile can tell it apart."""
        if self.lead_ms:
            private.sleep_cycles(int(self.lead_ms * CYCLES_A_MS))
        if self.me.world > 1:
            if self.on_gpu:
                dist.all_reduce(self.token, dist.ReduceOp.MIN)
            else:
                self.me.barrier()

    def mark(self) -> Any:
        return profiling.clock(self.me.device)()

    def settle(self) -> None:
        """Waits until all marks are reached."""
        if self.on_gpu:
            torch.cuda.synchronize(self.me.device)

    def around(self, run: Callable[..., object], *arguments: Any) -> tuple[Any, Any]:
        """The marks before and after `run`, which all ranks start together."""
        self.align()
        start = self.mark()
        run(*arguments)
        return start, self.mark()

    def times_ms(self, run: Callable[[], object], times: int) -> list[float]:
        """ms of so many calls, each of which all ranks start together."""
        pairs = [self.around(run) for _ in range(times)]
        self.settle()
        return [profiling.elapsed_ms(*marks) for marks in pairs]
