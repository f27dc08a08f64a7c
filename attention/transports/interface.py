"""What a transport is. A rank *offers* tensors; its peers *fetch* tokens of them. Both ends say what moves, so that a
transport may send it or have it read: the receiver's end alone is enough where memory can be read directly.

Every operation is started and hands back a `Handle`; `wait` makes the caller's stream (on a CPU the caller) wait for it.
The transfer itself is recorded as the phase `comm_*` where it runs, the standing still as `wait_*` where that happens, so
that the two are never confused."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from attention.geometry.transfers import Intervals
from attention.runtime.priority_stream import Front, Inline


@dataclass(frozen=True)
class Message:
    """Tokens of the offered tensor number `tensor`: the intervals `source` of it, in the offering rank's tokens, go to the
    intervals `target`, one to one, of number `into` of the tensors that the receiver fetches into, which the sender need not
    know. `peer` is the rank at the other end."""

    peer: int
    tensor: int
    source: Intervals
    target: Intervals
    into: int = 0


class Messages:
    """The messages of one fetch, which both ends list in the same order. Where they are kept for the next one, so is what a
    transport found out about them, in `known`."""

    def __init__(self, sends: Iterable[Message], receives: Iterable[Message]):
        self.sends, self.receives = tuple(sends), tuple(receives)
        self.known: dict[int, Any] = {}


class Handle(Protocol):
    def wait(self) -> None: ...


class Offer(Protocol):
    def fetch(self, messages: Messages, into: Sequence[Tensor], step: int, early: bool = False) -> Handle:
        """`early`: the tensors of `into` were there before the room of this offer was, so that what peers offer may come while this
        rank still fills its own."""

    def close(self) -> None:
        """Nothing more will be fetched by this rank from its peers' offers of the same turn."""


class Transport(Protocol):
    name: str
    note: str | None  # why it stands in for the one that was asked for
    pulls: bool  # whether a rank reads from its peers what it needs, and no more
    bytes_received: dict[str, int]  # by phase, what the operations of passes that were run really moved into this rank
    front: Front  # of a pass whose transfers leave the multiprocessors alone

    def counted(self, what: str, size: int) -> None:
        """So many bytes were moved into this rank by something else."""

    def begin(self) -> None:
        """The beginning of a pass, on the caller's stream."""

    def join(self) -> None:
        """The end of a pass: a CUDA graph that is being captured holds all that was started."""

    def state(self) -> Hashable:
        """All that what a pass launches depends on here, beside its plan; None where it may depend on more, or can't be played
        (`tape`)."""

    def room(self, what: str, shapes: Sequence[Sequence[int]], like: Tensor, tokens: int) -> list[Tensor]:
        """Tensors to fill and then to offer as `what`, where a transport can hand out memory that needs no further
        copy."""

    def offer(self, what: str, tensors: Sequence[Tensor], tokens: int | None = None) -> Offer:
        """tensors: `[B, S, H, D]` or `[T, H, D]`, those of one number with the same heads on every rank. `tokens`: the most
        that any rank offers in one tensor, where ranks differ. `what` names the phases: `comm_<what>`, `wait_<what>`."""

    def all_gather(self, into: Tensor, x: Tensor, what: str, step: int) -> Handle:
        """into: `[world, *x.shape]`, contiguous; x: contiguous, the same shape on every rank."""

    def all_reduce(self, x: Tensor, op: str, what: str, step: int) -> Handle:
        """In place over all ranks; op: "max" or "sum"."""


class Done:
    """Of what moves nothing."""

    def wait(self) -> None: ...


class Nothing:
    """A world of one: nothing ever moves."""

    name = "none"
    note: str | None = None
    pulls = False
    front: Front = Inline()

    def __init__(self) -> None:
        self.bytes_received: dict[str, int] = {}

    def counted(self, what: str, size: int) -> None: ...

    def begin(self) -> None: ...

    def join(self) -> None: ...

    def state(self) -> None: ...

    def room(self, what: str, shapes: Sequence[Sequence[int]], like: Tensor, tokens: int) -> list[Tensor]:
        return [like.new_empty(tuple(shape)) for shape in shapes]

    def offer(self, what: str, tensors: Sequence[Tensor], tokens: int | None = None) -> Offer:
        return _NoOffer()

    def all_gather(self, into: Tensor, x: Tensor, what: str, step: int) -> Handle:
        into[0].copy_(x)
        return Done()

    def all_reduce(self, x: Tensor, op: str, what: str, step: int) -> Handle:
        return Done()


class _NoOffer:
    def fetch(self, messages: Messages, into: Sequence[Tensor], step: int, early: bool = False) -> Handle:
        assert not messages.sends and not messages.receives, "a world of one has no peers"
        return Done()

    def close(self) -> None: ...
