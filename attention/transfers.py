"""Who sends which tokens to whom, read off layouts and schedules. Pure Python: intervals of local tokens on both ends,
in an order that sender and receiver agree on, so that a message carries nothing but the tokens."""

from __future__ import annotations

from dataclasses import dataclass

from attention.layouts import Shard
from attention.masks import Interval
from attention.schedules import SEQUENCE, Problem, length, steps

Intervals = tuple[Interval, ...]


@dataclass(frozen=True)
class Route:
    """The messages of one rank in one exchange: (peer, the local intervals) in the peers' order."""

    sends: tuple[tuple[int, Intervals], ...]
    receives: tuple[tuple[int, Intervals], ...]

    def reversed(self) -> Route:
        """The way back: what was received is sent home."""
        return Route(self.receives, self.sends)

    @property
    def received_tokens(self) -> int:
        return sum(length(intervals) for _, intervals in self.receives)


def step_route(problem: Problem, rank: int, i: int) -> Route:
    """What moves before step `i`: the keys that this rank's step needs come from their owner, and this rank's keys go
    to every rank whose step needs them. The receive intervals are the owner's."""
    step = steps(problem, rank)[i]
    receives = ((step.owner, step.keys),) if step.owner != rank and step.keys else ()
    sends = []
    for peer in range(problem.world):
        theirs = steps(problem, peer)[i]
        if peer != rank and theirs.owner == rank and theirs.keys:
            sends.append((peer, theirs.keys))
    return Route(tuple(sends), receives)


def overlaps(source: Shard, target: Shard) -> list[tuple[Interval, Interval]]:
    """The tokens that two shards share, as (slice of the source, slice of the target), by global position. Both shards
    consist of ranges with step 1."""
    found = []
    at_source = 0
    for s in source:
        at_target = 0
        for t in target:
            a, b = max(s.start, t.start), min(s.stop, t.stop)
            if a < b:
                here, there = at_source + a - s.start, at_target + a - t.start
                found.append((a, (here, here + b - a), (there, there + b - a)))
            at_target += len(t)
        at_source += len(s)
    return [(mine, theirs) for _, mine, theirs in sorted(found)]


@dataclass(frozen=True)
class Move:
    """A redistribution of one rank's tokens: what it sends and receives, and what it only copies locally."""

    route: Route
    local: tuple[tuple[Interval, Interval], ...]


def move(sources: tuple[Shard, ...], targets: tuple[Shard, ...], rank: int) -> Move:
    """From the shards `sources` to the shards `targets`, both lists by rank."""
    sends, receives = [], []
    for peer in range(len(sources)):
        if peer == rank:
            continue
        out = tuple(mine for mine, _ in overlaps(sources[rank], targets[peer]))
        into = tuple(place for _, place in overlaps(sources[peer], targets[rank]))
        if out:
            sends.append((peer, out))
        if into:
            receives.append((peer, into))
    return Move(Route(tuple(sends), tuple(receives)), tuple(overlaps(sources[rank], targets[rank])))


def needed_keys(problem: Problem, rank: int) -> Shard:
    """The global positions of the keys that a gathering rank's blocks need, as ranges in sequence order."""
    (step,) = steps(problem, rank)
    assert step.owner == SEQUENCE
    return tuple(range(*interval) for interval in step.keys)


def gather_move(problem: Problem, rank: int) -> Move:
    """Every rank's shard to the keys that each rank needs."""
    needs = tuple(needed_keys(problem, peer) for peer in range(problem.world))
    return move(problem.layout.shards(problem.cu_seqlens, problem.world), needs, rank)
