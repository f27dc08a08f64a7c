"""The form of an executor's costs: bytes, memory, and a timeline of what a rank does step by step, which `auto` turns into time. Pure
Python."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Generic, Literal, TypeVar

from attention.geometry.counts import Shapes
from attention.geometry.options import Options
from attention.geometry.schedules import Problem, length, steps
from attention.geometry.transfers import Route, packed_calls
from attention.masks.band import FULL, Band

Pattern = Literal["one", "all", "gather", "reduce", "slots"]


@dataclass(frozen=True)
class Transfer:
    """Bytes that the rank receives: from `one` rank, from `all` at once, by an all-`gather`, in a `reduce` operation, or written by all
    into `slots` of its memory within a kernel. sources: (rank, bytes from it) of `one` and `all`."""

    pattern: Pattern
    bytes: float
    sources: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Pairs:
    """(query, key) pairs of blocks with one mask: those that are attended, all in the blocks' rectangles, and on how many edges of the
    mask queries lie."""

    attended: int = 0
    rectangle: int = 0
    edges: int = 0

    def computed(self, edge: float) -> int:
        """Pairs that a kernel computes which does `edge` keys too many for a query on an edge."""
        return int(min(self.rectangle, self.attended + self.edges * edge))


@dataclass(frozen=True)
class Work:
    """The blocks of a schedule's step. `stretched_queries`, `stretched_keys`: tokens of packed calls that lie in several intervals, so
    that they are copied together for the call."""

    pairs: tuple[tuple[Band, Pairs], ...]
    calls: int
    packed_calls: int
    queries: int  # of all calls
    keys: int  # of all blocks, so that a key may count twice
    brought: int  # keys that the step brings or has
    stretched_queries: int
    stretched_keys: int


@dataclass(frozen=True)
class TimedStep:
    """Kernel calls on some of the heads: `shapes` has those heads. `copied`: bytes read and written around the calls. The transfers
    in `incoming` must be complete before the step, those in `outgoing` start after it."""

    work: Work
    shapes: Shapes
    calls: int
    copied: float = 0.0
    incoming: tuple[Transfer, ...] = ()
    outgoing: tuple[Transfer, ...] = ()


@dataclass(frozen=True)
class Timeline:
    """`exposed`: transfers that nothing can hide. `merged`: bytes read and written by merges and sums, in `merges` launches.
    `exchanges`: transfers that the CPU issues."""

    steps: tuple[TimedStep, ...]
    exposed: tuple[Transfer, ...] = ()
    merged: float = 0.0
    merges: int = 0
    exchanges: int = 0

    @property
    def calls(self) -> int:
        return sum(step.calls for step in self.steps)


Read = TypeVar("Read", bound=Options)


@dataclass(frozen=True)
class Costs(ABC, Generic[Read]):
    """Of one call; each executor has its own. A rank is any of the problem's, and each method looks at that rank alone. `pulls`: over a
    transport that brings each rank only the keys it needs, where others gather all for every rank unless there is a window. `packed`:
    the tensors are a packed batch."""

    problem: Problem
    shapes: Shapes
    options: Read
    pulls: bool = False
    packed: bool = False

    @abstractmethod
    def bytes_received(self, rank: int, backward: bool) -> dict[str, int]:
        """Bytes that a rank receives in a forward, or in a backward alone, by what moves: `kv`, `dkv`, and by executor `q`, `out`,
        `qkv`, `dout`, `dqkv`, or the tree's reductions."""

    @abstractmethod
    def pass_peak(self, rank: int, backward: bool) -> int:
        """The most bytes that a rank holds beside its inputs in a forward, or in a backward: results, what the backward needs, keys
        in flight and published tensors. Kernels' scratch is not counted. Of a transport that pulls; one that sends holds one more
        copy of gathered keys."""

    @abstractmethod
    def timeline(self, rank: int, backward: bool) -> Timeline:
        """What a rank does in a forward or a backward."""

    def peak_bytes(self, rank: int, backward: bool) -> int:
        """As `pass_peak`, of a forward or with `backward` of a training step."""
        return max(self.pass_peak(rank, which) for which in (False, True)[: 1 + backward])


@lru_cache(maxsize=1024)
def place_work(problem: Problem, place: int) -> tuple[Work, ...]:
    """The work of each step at a place in the schedule."""
    found = []
    for step in steps(problem, place):
        pairs: dict[Band, Pairs] = {}
        for block in step.blocks:
            n, keys = block.q[1] - block.q[0], block.k[1] - block.k[0]
            band = block.mask if isinstance(block.mask, Band) else FULL
            before = pairs.get(band, Pairs())
            pairs[band] = Pairs(
                before.attended + block.pairs, before.rectangle + n * keys, before.edges + block.mask.edges * n
            )
        # full blocks of the same queries are one call
        calls = list({(b.q, None if b.mask.full else b.k): b for b in step.blocks}.values())
        together = packed_calls(step)
        found.append(
            Work(
                tuple(pairs.items()),
                len(calls),
                len(together),
                sum(b.q[1] - b.q[0] for b in calls),
                sum(b.k[1] - b.k[0] for b in step.blocks),
                length(step.keys),
                sum(length(queries) for queries, _ in together if len(queries) > 1),
                sum(length(keys) for _, keys in together if len(keys) > 1),
            )
        )
    return tuple(found)


def timed(work: Work, shapes: Shapes, backward: bool, packed: bool) -> TimedStep:
    """A step of these heads, without its transfers. `packed`: the tensors are a packed batch."""
    if not packed:
        return TimedStep(work, shapes, work.calls)
    # q forward; q, out and dout backward
    token = shapes.q_token + (2 * shapes.out_token if backward else 0)
    copied = 2 * (work.stretched_queries * token + work.stretched_keys * shapes.kv_token)
    return TimedStep(work, shapes, work.packed_calls, copied)


def merged_bytes(parts: Sequence[int], tokens: int, token: int, itemsize: int) -> float:
    """Bytes that merging the parts of a result moves: a merge reads a part, and reads and writes the result so far, in fp32 where
    it has three parts or more. parts: tokens of each. token: bytes of one. The first part of a token is kept as it is."""
    merged = max(0, sum(parts) - tokens)
    result = max(itemsize, 4) / itemsize if sum(parts) > 2 * tokens else 1
    return merged * token * (1 + 2 * result)


Tokens = tuple[tuple[int, int], ...]  # (place of the sender, tokens)


def received(route: Route) -> Tokens:
    """Tokens that come before a step."""
    return tuple((piece.remote, length(piece.target)) for piece in route.receives)


def returned(route: Route) -> Tokens:
    """Tokens whose gradients come home after a step."""
    return tuple((piece.remote, length(piece.source)) for piece in route.sends)


def from_ranks(
    pattern: Pattern, tokens: Tokens, token: float, ulysses: int = 1, within: int = 0
) -> tuple[Transfer, ...]:
    """The transfer of these tokens, of `token` bytes each; none where there are none. ulysses, within: a place is that of so many
    ranks, and the rank at the same position in the sender's place sends."""
    if not any(n for _, n in tokens):
        return ()
    sources = tuple((place * ulysses + within, n * token) for place, n in tokens)
    return (Transfer(pattern, sum(size for _, size in sources), sources),)


def heads_of(shapes: Shapes, kv_heads: int) -> Shapes:
    """So many of the KV heads, with the query heads that they serve."""
    return replace(shapes, kv_heads=kv_heads, heads=shapes.heads // shapes.kv_heads * kv_heads)
