"""Which tokens each rank sends to which remote rank, derived from layouts and schedules; without torch. Both ranks know
the intervals of local tokens at both ends. So a message contains only tokens, and a receiver can also pull them from
the sender."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attention.geometry.layouts import Shard
from attention.geometry.schedules import (
    SEQUENCE,
    Block,
    GatherSchedule,
    GatherShards,
    Problem,
    Step,
    length,
    steps,
)
from attention.masks.band import Interval, Intervals
from attention.memo import memo


@dataclass(frozen=True)
class Piece:
    """The tokens that one rank sends to another: each interval of the sender's `source` goes to the same entry of the
    receiver's `target`."""

    remote: int  # the rank at the other end
    source: Intervals
    target: Intervals


@dataclass(frozen=True)
class Route:
    """The pieces that one rank sends and receives in one exchange, at most one each way for each remote rank."""

    sends: tuple[Piece, ...]
    receives: tuple[Piece, ...]

    def reversed(self) -> Route:
        """The way back: received tokens return to their senders."""
        return self._back

    @cached_property
    def _back(self) -> Route:
        return Route(_turned(self.receives), _turned(self.sends))

    @cached_property
    def received_tokens(self) -> int:
        return sum([length(piece.target) for piece in self.receives])

    @cached_property
    def sent_tokens(self) -> int:
        """The number of tokens sent, which is also the number that arrives on the way back."""
        return sum([length(piece.source) for piece in self.sends])


def _turned(pieces: tuple[Piece, ...]) -> tuple[Piece, ...]:
    return tuple(Piece(piece.remote, piece.target, piece.source) for piece in pieces)


def side_by_side(intervals: Intervals) -> Intervals:
    """Where the tokens of `intervals` lie when they are put one after another."""
    placed = []
    at = 0
    for start, stop in intervals:
        placed.append((at, at + stop - start))
        at += stop - start
    return tuple(placed)


@memo(lambda found, *_: len(found))
def step_routes(problem: Problem, rank: int) -> tuple[Route, ...]:
    """What moves before each step. This rank receives the keys that its step needs from their owner, placed one
    interval after another. It sends its keys to every rank whose step needs them. The keys of a gather are not
    included: see `gather_move`."""
    routes = []
    placed = lru_cache(side_by_side)  # most steps need the same keys
    for i, step in enumerate(steps(problem, rank)):
        receives = (Piece(step.owner, step.keys, placed(step.keys)),) if step.keys else ()
        remote = problem.schedule.sends(problem, rank, i)
        sends = (Piece(*remote, placed(remote[1])),) if remote and remote[1] else ()
        routes.append(Route(sends, receives if step.owner not in (rank, SEQUENCE) else ()))
    return tuple(routes)


Rows = NDArray[np.int64]  # [n, 3]: ranges as (start, stop, where it lies in the shard), sorted by start


def overlaps(source: Shard, target: Shard) -> list[tuple[Interval, Interval]]:
    """The tokens that two shards share: pairs (slice of the source, slice of the target), in the order of their global
    positions. Pairs that are adjacent in both shards are joined. Both shards must consist of ranges with step 1."""
    rows, _ = _placed((target,))
    (found,) = _shared(_placed((source,))[0], rows, np.zeros(len(rows), np.int64), 1)
    return list(zip(*found, strict=True))


def _placed(shards: Sequence[Shard]) -> tuple[Rows, NDArray[np.int64]]:
    """The ranges of all shards, sorted by shard, then by start; and for each range the index of its shard `[n]`."""
    of = np.repeat(np.arange(len(shards)), [len(shard) for shard in shards])
    ranges = [(r.start, r.stop) for shard in shards for r in shard]
    return _rows(np.array(ranges, np.int64).reshape(-1, 2), of)


def _rows(x: NDArray[np.int64], of: NDArray[np.int64]) -> tuple[Rows, NDArray[np.int64]]:
    """As `_placed`, from intervals `[n, 2]` in the order in which the shards hold them. of: for each interval the index of
    its shard, ascending."""
    lengths = x[:, 1] - x[:, 0]
    before = np.cumsum(lengths) - lengths
    at = before - before[np.searchsorted(of, of)]
    order = np.lexsort((x[:, 0], of))
    order = order[lengths[order] > 0]
    return np.column_stack([x, at])[order], of[order]


def _shared(mine: Rows, theirs: Rows, of: NDArray[np.int64], n: int) -> list[tuple[Intervals, Intervals]]:
    """The tokens that a shard shares with each of `n` other shards: slices of this shard, and of the other one. of: for each
    row of `theirs` the index of its shard."""
    first = np.searchsorted(mine[:, 1], theirs[:, 0], "right")
    many = np.maximum(np.searchsorted(mine[:, 0], theirs[:, 1], "left") - first, 0)
    theirs, of = np.repeat(theirs, many, 0), np.repeat(of, many)
    mine = mine[np.arange(len(of)) - np.repeat(np.cumsum(many) - many, many) + np.repeat(first, many)]
    start, stop = np.maximum(mine[:, 0], theirs[:, 0]), np.minimum(mine[:, 1], theirs[:, 1])
    here, there = start - mine[:, 0] + mine[:, 2], start - theirs[:, 0] + theirs[:, 2]
    here_end, there_end = here + stop - start, there + stop - start
    apart = (here[1:] != here_end[:-1]) | (there[1:] != there_end[:-1]) | (of[1:] != of[:-1])
    begins = np.flatnonzero(np.append(len(of) > 0, apart))
    ends = np.append(begins[1:], len(of))[: len(begins)] - 1
    ours = tuple(zip(here[begins].tolist(), here_end[ends].tolist(), strict=True))
    others = tuple(zip(there[begins].tolist(), there_end[ends].tolist(), strict=True))
    borders = np.searchsorted(of[begins], np.arange(n + 1)).tolist()
    return [(ours[a:b], others[a:b]) for a, b in pairwise(borders)]


@dataclass(frozen=True)
class Move:
    """A redistribution of one rank's tokens: the pieces that it sends and receives, and its local copies."""

    route: Route
    local: tuple[tuple[Interval, Interval], ...]


def move(sources: tuple[Shard, ...], targets: tuple[Shard, ...], rank: int) -> Move:
    """From the shards `sources` to the shards `targets`, both lists by rank."""
    return _move(_placed(sources), _placed(targets), len(sources), rank)


def _move(
    sources: tuple[Rows, NDArray[np.int64]], targets: tuple[Rows, NDArray[np.int64]], world: int, rank: int
) -> Move:
    mine, wanted = (x[slice(*np.searchsorted(of, (rank, rank + 1)))] for x, of in (sources, targets))
    sent = _shared(mine, *targets, world)
    received = _shared(wanted, *sources, world)
    others = [remote for remote in range(world) if remote != rank]
    sends = tuple(Piece(remote, *sent[remote]) for remote in others if sent[remote][0])
    receives = tuple(Piece(remote, *reversed(received[remote])) for remote in others if received[remote][0])
    return Move(Route(sends, receives), tuple(zip(*sent[rank], strict=True)))


def needed_keys(problem: Problem, rank: int) -> Shard:
    """The global positions of the keys that a rank gathers: ranges, in the order of the gathered keys."""
    step = steps(problem, rank)[-1]
    assert step.owner == SEQUENCE
    return _ranges(step.keys)


@memo(lambda found, *_: len(found))
def _ranges(intervals: Intervals) -> Shard:
    return tuple(range(*interval) for interval in intervals)


def _weight(found: Move, *_: object) -> int:
    pieces = (*found.route.sends, *found.route.receives)
    return 1 + len(found.local) + sum([len(piece.source) for piece in pieces])


@memo(_weight)
def gather_move(problem: Problem, rank: int) -> Move:
    """This rank's part in the gather that brings each rank the keys that it needs."""
    schedule = problem.schedule
    assert isinstance(schedule, GatherSchedule)
    if isinstance(schedule, GatherShards):
        return _whole_shards(problem.cu_seqlens[-1] // problem.world, problem.world, rank)
    rows = schedule.gathers(problem)
    return _move(_placed(problem.shards), _rows(rows[:, :2], rows[:, 2]), problem.world, rank)


def _whole_shards(n: int, world: int, rank: int) -> Move:
    """All shards of n tokens, one after another."""
    whole = ((0, n),)
    others = [other for other in range(world) if other != rank]
    sends = tuple(Piece(other, whole, ((rank * n, rank * n + n),)) for other in others)
    receives = tuple(Piece(other, whole, ((other * n, other * n + n),)) for other in others)
    return Move(Route(sends, receives), (((0, n), (rank * n, rank * n + n)),))


def key_places(step: Step, block: Block) -> Intervals:
    """Where a block's keys lie among those of its step."""
    return step.where(block.k) if step.where else (block.k,)


def packed_together(blocks: Iterable[Block]) -> dict[tuple[Any, int], list[Block]]:
    """The blocks of each kernel call of a packed batch: all that have the same mask and group."""
    alike: dict[tuple[Any, int], list[Block]] = {}
    for block in blocks:
        alike.setdefault((block.mask, block.group), []).append(block)
    return alike


def packed_calls(step: Step) -> list[tuple[Intervals, Intervals]]:
    """The kernel calls of a step of a packed batch: for each its queries, as intervals of the rank's queries, and its keys,
    as intervals of the step's keys as they lie for the rank."""
    return [
        (joined(dict.fromkeys(b.q for b in together)), joined(x for b in together for x in key_places(step, b)))
        for together in packed_together(step.blocks).values()
    ]


def joined(intervals: Iterable[Interval]) -> Intervals:
    """The intervals in the given order, each joined with the next one if that starts where it ends."""
    merged: list[Interval] = []
    for start, stop in intervals:
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], stop)
        else:
            merged.append((start, stop))
    return tuple(merged)
