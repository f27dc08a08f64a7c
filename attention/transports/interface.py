"""The interface of transports. A rank *publishes* tensors, and remote ranks *pull* tokens of them. Both ends
list what moves, so a transport may send the data or let the receiver read it.

Every operation is asynchronous and returns a `Handle`. `wait` makes the caller's stream (on a CPU, the calling thread)
wait for it. The transfer is recorded as the phase `comm_*`, waiting for it as `wait_*`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from attention.agreement import Calls
from attention.gpu.streams import Inline, PriorityStream
from attention.masks.band import Intervals


@dataclass(frozen=True)
class Message:
    """Tokens that move between this rank and the rank `remote`: the intervals `source` of the published tensor
    number `tensor` go to the intervals `target`, one to one, of the receiver's tensor number `into`. A sender need not
    know `into`."""

    remote: int
    tensor: int
    source: Intervals
    target: Intervals
    into: int = 0


@dataclass(eq=False)
class Messages:
    """The messages of one pull; both ends list them in the same order. `known` caches what a transport derives from
    them, as long as the object is reused."""

    sends: Sequence[Message]
    receives: Sequence[Message]
    known: dict[Any, Any] = field(default_factory=dict)


class Handle:
    """An operation that was started; this one moves nothing."""

    def wait(self) -> None:
        """The caller's stream (on a CPU, the calling thread) waits for it. Raises what it raised."""


class Publication:
    """Tensors from which remote ranks may pull; this one has nobody who does."""

    def pull(self, messages: Messages, into: Sequence[Tensor], step: int, early: bool = False) -> Handle:
        """Starts to bring the messages' tokens into the tensors `into`. early: `into` was allocated before this rank's
        own publication was (`buffers`), so remote data may arrive while this rank still fills its publication."""
        return Handle()

    def close(self) -> None:
        """This rank pulls nothing more from the matching publications of remote ranks."""


class Transport:
    """How tokens move between the ranks of a group. This one is that of a world of one rank, where nothing moves."""

    name = "none"
    note: str | None = None  # why it replaces the transport that was asked for
    calls = Calls()  # in which it moves tokens
    pulls = False  # whether ranks read only what they need from remote memory
    # the high-priority stream, where transfers leave the multiprocessors free
    priority_stream: PriorityStream = Inline()

    def __init__(self) -> None:
        self.bytes_received: dict[str, int] = {}  # by phase, the bytes moved into this rank by eager calls
        self.captured: dict[int, object] = {}  # what CUDA graphs read that the caller captured around calls

    def counted(self, what: str, size: int) -> None:
        """Counts bytes that were moved into this rank."""
        self.bytes_received[what] = self.bytes_received.get(what, 0) + size

    def follow(self, calls: Calls) -> None:
        """From now on, moves the tokens of these calls."""
        self.calls = calls

    def begin(self) -> None:
        """Called at the beginning of a forward or backward, on the caller's stream."""

    def join(self) -> None:
        """Called at its end: a CUDA graph that is being captured then includes all that was started."""

    def buffers(self, what: str, shapes: Sequence[Sequence[int]], like: Tensor, tokens: int) -> list[Tensor]:
        """Tensors of these shapes, to be filled and then published as `what`. Where possible they lie in the memory that
        remote ranks read, so that publishing copies nothing. tokens: as in `publish`."""
        return [like.new_empty(tuple(shape)) for shape in shapes]

    def publish(
        self, what: str, tensors: Sequence[Tensor], tokens: int | None = None, pulled: Intervals | None = None
    ) -> Publication:
        """Publishes tensors `[B, S, H, D]` or `[T, H, D]`; tensor i has the same heads on every rank.

        what: the name of the phases, `comm_<what>` and `wait_<what>`.
        tokens: the most tokens that any rank publishes in one tensor, where ranks differ.
        pulled: the tokens that remote ranks pull; None: any."""
        return Publication()

    def all_gather(self, into: Tensor, x: Tensor, what: str, step: int) -> Handle:
        """Gathers x (contiguous, of one shape on all ranks) into `into`, contiguous `[world, *x.shape]`."""
        into[0].copy_(x)
        return Handle()

    def all_reduce(self, x: Tensor, op: str, what: str, step: int) -> Handle:
        """Reduces x in place over all ranks; op: "max" or "sum"."""
        return Handle()
