"""Which tokens each rank sends to which remote rank, derived from layouts and schedules; without torch. Both ranks know
the intervals of local tokens at both ends. So a message contains only tokens, and a receiver can also pull them from
the sender."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from attention.geometry.cuts import Places
from attention.geometry.intervals import by_number, side_by_side
from attention.geometry.schedules import GatherSchedule, Problem, steps
from attention.geometry.steps import SEQUENCE
from attention.masks.band import Interval, Intervals


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

    @cached_property
    def reversed(self) -> Route:
        """The way back: received tokens return to their senders."""
        return Route(*(tuple(Piece(x.remote, x.target, x.source) for x in way) for way in (self.receives, self.sends)))


def step_routes(problem: Problem, rank: int) -> tuple[Route, ...]:
    """What moves before each step. This rank receives the keys that its step needs from their owner, placed one
    interval after another. It sends its keys to every rank whose step needs them. The keys of a gather are not
    included: see `gather_move`."""
    sends, routes = problem.schedule.sends(problem, rank), []

    def pieces(remote: int, keys: Intervals) -> tuple[Piece, ...]:
        return (Piece(remote, keys, _placed(keys)),) if keys else ()

    for i, step in enumerate(steps(problem, rank)):
        sent = pieces((rank + i) % problem.world, sends[i]) if sends else ()
        received = () if step.owner in (rank, SEQUENCE) else pieces(step.owner, step.keys)
        routes.append(Route(sent, received))
    return tuple(routes)


_placed = lru_cache(maxsize=64)(side_by_side)  # most steps need the same keys


def shared(mine: Places, theirs: Places, world: int) -> list[tuple[Intervals, Intervals]]:
    """The tokens that one shard shares with each of `world` shards or buffers: intervals of the first, and of the other one."""
    theirs = theirs.where(np.lexsort((theirs.start, theirs.of)))
    row, parts = mine.within(theirs.start, theirs.stop)
    shared = by_number(theirs.of[row], world, parts.lengths, parts.at, parts.start - (theirs.start - theirs.at)[row])
    return [(ours, others) for ours, others in shared]


@dataclass(frozen=True)
class Move:
    """A redistribution of one rank's tokens: the pieces that it sends and receives, and its local copies."""

    route: Route
    local: tuple[tuple[Interval, Interval], ...]

    def reversed(self) -> Move:
        return Move(self.route.reversed, tuple((target, source) for source, target in self.local))


def move(sources: Places, targets: Places, world: int, rank: int) -> Move:
    """From the shards `sources` to the shards or buffers `targets`, of all ranks."""
    sent = shared(sources.only(rank), targets, world)
    received = shared(targets.only(rank), sources, world)
    others = [remote for remote in range(world) if remote != rank]
    sends = tuple(Piece(remote, *sent[remote]) for remote in others if sent[remote][0])
    receives = tuple(Piece(remote, *reversed(received[remote])) for remote in others if received[remote][0])
    return Move(Route(sends, receives), tuple(zip(*sent[rank], strict=True)))


def query_move(problem: Problem, rank: int) -> Move:
    """This rank's part in moving queries from the shards' layout to that for computing."""
    return move(problem.held, problem.queries, problem.world, rank)


def gather_move(problem: Problem, rank: int) -> Move:
    """This rank's part in the gather that brings each rank the keys that it needs."""
    schedule = problem.schedule
    assert isinstance(schedule, GatherSchedule)
    return move(*schedule.transfer(problem), problem.world, rank)


def gathered(problem: Problem, rank: int) -> list[tuple[Intervals, Intervals]]:
    """For each owner, where the keys that this rank gathers lie in its shard, and among the gathered ones."""
    schedule = problem.schedule
    assert isinstance(schedule, GatherSchedule)
    held, wanted = schedule.transfer(problem)
    return [(theirs, mine) for mine, theirs in shared(wanted.only(rank), held, problem.world)]
