"""Which tokens each rank sends to which other rank, derived from layouts and schedules. Pure Python. Both ranks know
the intervals of local tokens at both ends, so a message contains nothing but tokens, and a receiver can also pull them
from the sender."""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

from attention.geometry.layouts import Shard
from attention.geometry.schedules import SEQUENCE, Block, GatherSchedule, Problem, Step, length, steps
from attention.masks.band import Band, Interval, Intervals
from attention.masks.pattern import Pattern
from attention.memo import memo

Place = Callable[[Interval], Intervals]


@dataclass(frozen=True)
class Piece:
    """The tokens that one rank sends to another: each interval of the sender's `source` goes to the same entry of the
    receiver's `target`."""

    peer: int  # at the other end
    source: Intervals
    target: Intervals


@dataclass(frozen=True)
class Route:
    """What one rank sends and receives in one exchange, at most one piece for each other rank."""

    sends: tuple[Piece, ...]
    receives: tuple[Piece, ...]

    def reversed(self) -> Route:
        """The way back: what was received is sent home."""
        return self._back

    @cached_property
    def _back(self) -> Route:
        return Route(_turned(self.receives), _turned(self.sends))

    @cached_property
    def received_tokens(self) -> int:
        return sum([length(piece.target) for piece in self.receives])

    @cached_property
    def sent_tokens(self) -> int:
        """Also the number of tokens that arrive on the way back."""
        return sum([length(piece.source) for piece in self.sends])


def _turned(pieces: tuple[Piece, ...]) -> tuple[Piece, ...]:
    return tuple(Piece(piece.peer, piece.target, piece.source) for piece in pieces)


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
    interval after another. It sends its own keys to every rank whose step needs them. The keys of a gather are not
    included: see `gather_move`."""
    routes = []
    for i, step in enumerate(steps(problem, rank)):
        receives: tuple[Piece, ...] = ()
        if step.owner not in (rank, SEQUENCE) and step.keys:
            receives = (_side_by_side(step.owner, step.keys),)
        sends = []
        for reader in problem.schedule.readers(problem, rank, i):
            if keys := problem.schedule.received(problem, reader, i):
                sends.append(_side_by_side(reader, keys))
        routes.append(Route(tuple(sends), receives))
    return tuple(routes)


def step_route(problem: Problem, rank: int, i: int) -> Route:
    """What moves before step `i`: see `step_routes`."""
    return step_routes(problem, rank)[i]


def _side_by_side(other: int, keys: Intervals) -> Piece:
    return Piece(other, keys, side_by_side(keys))


Placed = list[tuple[int, int, int]]  # each range of a shard as (start, stop, its index in the shard), sorted


def overlaps(source: Shard, target: Shard) -> list[tuple[Interval, Interval]]:
    """The tokens that two shards share: pairs (slice of the source, slice of the target), in the order of their global
    positions. Pairs that are adjacent in both shards are joined. Both shards must consist of ranges with step 1."""
    return _shared(_placed(source), _placed(target))


def _shared(ours: Placed, theirs: Placed) -> list[tuple[Interval, Interval]]:
    found: list[tuple[Interval, Interval]] = []
    i = j = 0
    while i < len(ours) and j < len(theirs):
        (a, a_stop, here), (b, b_stop, there) = ours[i], theirs[j]
        if a_stop <= b:
            i = _not_before(ours, b, i + 1)
            continue
        if b_stop <= a:
            j = _not_before(theirs, a, j + 1)
            continue
        start, stop = max(a, b), min(a_stop, b_stop)
        at, to, n = here + start - a, there + start - b, stop - start
        if found and (found[-1][0][1], found[-1][1][1]) == (at, to):
            (at, _), (to, _) = found.pop()
            n = here + stop - a - at
        found.append(((at, at + n), (to, to + n)))
        i, j = (i + 1, j) if a_stop <= b_stop else (i, j + 1)
    return found


def _not_before(places: Placed, position: int, low: int) -> int:
    """The index, from `low` on, of the first place that may contain the position. A binary search, since most of
    thousands of places may have to be skipped."""
    return max(low, bisect_right(places, (position, sys.maxsize), low) - 1)


def _placed(shard: Shard) -> Placed:
    found = []
    at = 0
    for r in shard:
        if r:
            found.append((r.start, r.stop, at))
        at += len(r)
    return sorted(found)


@dataclass(frozen=True)
class Move:
    """A redistribution of one rank's tokens: what it sends and receives, and what it only copies locally."""

    route: Route
    local: tuple[tuple[Interval, Interval], ...]


def move(sources: tuple[Shard, ...], targets: tuple[Shard, ...], rank: int) -> Move:
    """From the shards `sources` to the shards `targets`, both lists by rank."""
    sends: list[Piece] = []
    receives: list[Piece] = []
    mine, wanted = _placed(sources[rank]), _placed(targets[rank])
    local = _shared(mine, wanted)
    sent = {id(targets[rank]): local}  # by the target's identity: often all ranks want the same tokens
    for peer in range(len(sources)):
        if peer == rank:
            continue
        target = targets[peer]
        if id(target) not in sent:
            sent[id(target)] = _shared(mine, _placed(target))
        for pieces, found in ((sends, sent[id(target)]), (receives, _shared(_placed(sources[peer]), wanted))):
            if found:
                pieces.append(Piece(peer, tuple(here for here, _ in found), tuple(there for _, there in found)))
    return Move(Route(tuple(sends), tuple(receives)), tuple(local))


def needed_keys(problem: Problem, rank: int) -> Shard:
    """The global positions of the keys that a rank gathers: ranges, in the order in which the gathered keys lie."""
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
    if schedule.pieces(problem, rank, rank) is None:
        needs = tuple(needed_keys(problem, other) for other in range(problem.world))
        return move(problem.layout.shards(problem.cu_seqlens, problem.world), needs, rank)
    sends: list[Piece] = []
    receives: list[Piece] = []
    for other in range(problem.world):
        if other != rank:
            for pieces, found in (
                (sends, schedule.pieces(problem, other, rank)),
                (receives, schedule.pieces(problem, rank, other)),
            ):
                if found:
                    pieces.append(Piece(other, tuple(here for here, _ in found), tuple(there for _, there in found)))
    return Move(Route(tuple(sends), tuple(receives)), tuple(schedule.pieces(problem, rank, rank) or ()))


def within(keys: Intervals) -> Place:
    """A function that says where an interval of the owner's tokens lies after the intervals `keys` were put side by
    side."""
    if len(keys) == 1:
        ((first, end),) = keys

        def moved(interval: Interval) -> Intervals:
            if interval[0] == interval[1]:
                return ()
            assert first <= interval[0] and interval[1] <= end, f"{interval} is not within {keys}"
            return ((interval[0] - first, interval[1] - first),)

        return moved
    places = sorted((start, stop, at) for (start, stop), (at, _) in zip(keys, side_by_side(keys), strict=True))
    starts = [start for start, *_ in places]

    def place(interval: Interval) -> Intervals:
        found, at = [], interval[0]
        for i in range(max(bisect_right(starts, at) - 1, 0), len(places)):
            start, stop, here = places[i]
            if not start <= at < min(stop, interval[1]):
                break
            found.append((here + at - start, here + min(stop, interval[1]) - start))
            at = min(stop, interval[1])
        assert at == interval[1], f"{interval} is not within {keys}"
        return joined(found)

    return place


def where(step: Step, rank: int) -> Place:
    """A function that says where the keys of a step's blocks lie for this rank. Its own keys are used in place, remote
    ones arrive side by side. A pattern already numbers its keys as they lie."""
    if step.owner == rank or any(isinstance(block.mask, Pattern) for block in step.blocks):
        return lambda interval: (interval,)
    return within(step.keys)


def packed_calls(step: Step, rank: int) -> list[tuple[Intervals, Intervals]]:
    """The kernel calls of a step of a packed batch: one for all blocks with the same mask and group. For each call its
    queries, as intervals of the rank's queries, and its keys, as intervals of the step's keys as they lie for the
    rank."""
    place = where(step, rank)
    alike: dict[tuple[Band | Pattern, int], list[Block]] = {}
    for block in step.blocks:
        alike.setdefault((block.mask, block.group), []).append(block)
    return [
        (
            joined(dict.fromkeys(block.q for block in found)),
            joined(x for block in found for x in place(block.k)),
        )
        for found in alike.values()
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
