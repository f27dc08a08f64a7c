"""Any mask, cut to what a rank computes: its rectangles at the rank's queries and at one owner's keys, or at all keys that
were gathered. Every schedule cuts by these functions where the mask is not one band in every sequence."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from attention.geometry.layouts import Shard, size
from attention.masks.band import Band, Interval, Intervals
from attention.masks.mask import built
from attention.masks.pattern import Pattern
from attention.masks.rectangles import (
    HI,
    K0,
    K1,
    LO,
    Q1,
    UNBOUNDED,
    Rectangles,
    intervals_of,
    joined,
    joined_keys,
    pairs,
    placed,
)
from attention.memo import memo

if TYPE_CHECKING:
    from attention.geometry.schedules import Problem

Rows = NDArray[np.int64]
Places = list[tuple[int, int, int]]  # (start, stop, where it lies), sorted by start


def shard_places(shard: Shard) -> Places:
    """A shard's ranges by global position, and where they lie in the shard."""
    found, at = [], 0
    for r in shard:
        assert r.step == 1 or len(r) < 2, "a strided shard cannot be cut into rectangles"
        if r:
            found.append((r.start, r.stop, at))
        at += len(r)
    return sorted(found)


@memo(lambda found, *_: sum(map(len, found)), 1 << 21)
def _rows(problem: Problem) -> tuple[Rectangles, ...]:
    """By rank, the mask's rectangles at its queries: in local query positions and global key positions."""
    shards = problem.q_layout.shards(problem.cu_seqlens, problem.world)
    x = problem.mask.rectangles(problem.cu_seqlens[-1])
    if problem.q_layout.replicated:
        return (x,) * problem.world
    places = sorted((*place, rank) for rank, shard in enumerate(shards) for place in shard_places(shard))
    local, which = placed(x, [place[:3] for place in places], keys=False)
    rank_of = np.array([place[3] for place in places], np.int64)[which]
    order = np.argsort(rank_of, kind="stable")
    return tuple(np.split(local[order], np.searchsorted(rank_of[order], np.arange(1, problem.world))))


@memo(lambda found, *_: sum(map(len, found)), 1 << 20)
def needs_by_rank(problem: Problem) -> tuple[Rows, ...]:
    """By rank, the global positions of all keys that some query of it sees: disjoint, sorted intervals `[n, 2]`."""
    rows = _rows(problem)
    apart = problem.cu_seqlens[-1] + 1  # one sort for all ranks: each rank's positions begin at a multiple of it
    x = np.concatenate(rows)
    x[:, K0:LO] += (np.repeat(np.arange(len(rows)), [len(each) for each in rows]) * apart)[:, None]
    found = joined_keys(x)
    rank = found[:, 0] // apart
    return tuple(np.split(found - (rank * apart)[:, None], np.searchsorted(rank, np.arange(1, len(rows)))))


@memo(lambda found, problem, _: len(found) + len(problem.cu_seqlens), 1 << 20)
def needs(problem: Problem, rank: int) -> Intervals:
    """The global positions of all keys that some query of the rank sees."""
    return intervals_of(needs_by_rank(problem)[rank])


def most_needed(problem: Problem) -> int:
    """The number of keys of the rank that needs the most."""
    return max(int((keys[:, 1] - keys[:, 0]).sum()) for keys in needs_by_rank(problem))


def bands(problem: Problem) -> set[Band]:
    """The bands of all ranks' rectangles, aligned bottom-right in each."""
    x = np.concatenate(_rows(problem))
    shift = x[:, K1] - x[:, Q1]
    left = np.where(x[:, LO] > -UNBOUNDED, shift - x[:, LO], -1)
    right = np.where(x[:, HI] < UNBOUNDED, x[:, HI] - shift, -1)
    return {Band(*sides) for sides in set(zip(left.tolist(), right.tolist(), strict=True))}


@memo(lambda found, *_: sum(map(len, found)), 1 << 20)
def needs_by_owner(problem: Problem, rank: int) -> tuple[Intervals, ...]:
    """By owner, the keys that the rank needs: intervals of the owner's shard, sorted."""
    shards = problem.layout.shards(problem.cu_seqlens, problem.world)
    if problem.layout.replicated:
        return (needs(problem, rank),) * problem.world
    places = sorted((*place, owner) for owner, shard in enumerate(shards) for place in shard_places(shard))
    found: list[list[Interval]] = [[] for _ in shards]
    wanted, i = needs(problem, rank), 0
    for start, stop, at, owner in places:
        while i < len(wanted) and wanted[i][1] <= start:
            i += 1
        j = i
        while j < len(wanted) and wanted[j][0] < stop:
            a, b = max(wanted[j][0], start), min(wanted[j][1], stop)
            found[owner].append((at + a - start, at + b - start))
            j += 1
    return tuple(_sorted(x) for x in found)


def _sorted(x: list[Interval]) -> Intervals:
    """Sorted, neighbours as one."""
    merged: list[Interval] = []
    for start, stop in sorted(x):
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], stop)
        else:
            merged.append((start, stop))
    return tuple(merged)


def forget() -> None:
    """Empties the caches, so that the next cut builds the mask's rectangles again."""
    for kept in (built, _rows, needs_by_rank, needs, needs_by_owner):
        kept.cache_clear()


def rank_pairs(problem: Problem, rank: int) -> int:
    """The (query, key) pairs that a rank computes."""
    return int(pairs(_rows(problem)[rank]).sum())


def on_gathered(problem: Problem, rank: int) -> Pattern:
    """A rank's queries against the keys that it needs, side by side in sequence order."""
    keys = needs(problem, rank)
    starts = np.array([0, *np.cumsum([b - a for a, b in keys])]).tolist()
    return _pattern(problem, rank, [(a, b, at) for (a, b), at in zip(keys, starts, strict=False)], starts[-1])


def on_owner(problem: Problem, rank: int, owner: int) -> Pattern:
    """A rank's queries against an owner's keys: its own shard in place, of another rank the needed keys side by side."""
    shard = problem.layout.shards(problem.cu_seqlens, problem.world)[owner]
    places = shard_places(shard)
    if owner == rank:
        return _pattern(problem, rank, places, size(shard))
    within: Places = []  # the needed keys, by global position
    at = 0
    for a, b in needs_by_owner(problem, rank)[owner]:
        for start, stop, here in places:
            low, high = max(a, here), min(b, here + stop - start)
            if low < high:
                within.append((start + low - here, start + high - here, at + low - a))
        at += b - a
    return _pattern(problem, rank, sorted(within), at)


def _pattern(problem: Problem, rank: int, keys: Places, n_keys: int) -> Pattern:
    n = size(problem.q_layout.shards(problem.cu_seqlens, problem.world)[rank])
    return Pattern(n, n_keys, joined(placed(_rows(problem)[rank], keys, keys=True)[0]))
