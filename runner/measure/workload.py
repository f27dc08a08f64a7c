"""The protocol of measured work, for the modules that time and check it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor

from attention.transports.interface import Transport
from runner.config.experiment import AttentionCall

EVEN = frozenset(
    {"dsinks", "dqkv.weight", "dnorm.weight", "dout.weight"}
)  # outputs that keep their sign when all inputs change theirs


class Passes(Protocol):
    """The timed work. passes: in the order of an iteration, `forward`, then `backward` if it is timed."""

    passes: tuple[str, ...]

    def run(self, which: str) -> None:
        """Runs one pass; `backward` belongs to the last `forward`."""


class Workload(Passes, Protocol):
    """A rank's share of the work: inputs, and passes over them that can be timed and compared with a reference."""

    has_phases: bool  # whether its phases and the bytes that it moves are known
    left: Any  # the last iteration's results; settable, because a CUDA graph writes them in place

    @property
    def inputs(self) -> list[Tensor]: ...

    @property
    def transport(self) -> Transport: ...

    def resolved(self) -> dict[str, Any]:
        """The experiment's options, with values for the open ones."""

    def report(self) -> dict[str, Any]:
        """The kernel, the transport and a note on them, for the result."""

    def mask_build_ms(self) -> float | None:
        """ms to build the mask's rectangles and to cut them for this rank, without caches; None where nothing is cut."""

    def flops(self) -> float:
        """FLOPs of an iteration on the busiest rank."""

    def rate(self) -> float:
        """FLOP/s that this rank is expected to reach."""

    def outputs(self) -> dict[str, Tensor]:
        """The last iteration's results and gradients on this rank by name, `[B, tokens, H, D]` or `[tokens, H, D]` (the gradient of
        parameters of the heads: `[1, H, 1]`); empty after `release`."""

    def repeat(self, which: str, times: int) -> None:
        """Runs one pass `times` times; `backward` can be repeated after one `forward`."""

    def negate(self) -> None:
        """Changes the sign of all inputs, in place: every output but those of `EVEN` changes its sign."""

    def release(self) -> None:
        """Drops the results, so that their memory does not count for what comes next."""

    def layered(self, layers: int, new_packs: bool) -> Passes:
        """The passes of a model with so many layers; with `new_packs` each iteration has another packed batch."""

    def new_pack(self, sign: int) -> AbstractContextManager[AttentionCall]:
        """Within the context the inputs are those of the first other packed batch of `layered`, times the sign. Gives its call."""

    def more(self) -> dict[str, Any]:
        """Further fields of the result, after the timing. Collective."""

    def rows(self, name: str) -> Tensor:
        """The token of each row of this rank's shard of an output, int64 on the CPU."""
