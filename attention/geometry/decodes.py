"""Decodes: a few queries on every rank against sharded keys. The queries are the last tokens of the sequence: query i of
Sq lies at position N - Sq + i of N keys, also where there are fewer keys than queries. Pure Python."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import NamedTuple

from attention.geometry.layouts import sizes_of
from attention.geometry.schedules import Block, Buffers, Problem, Schedule, Step
from attention.masks.band import CAUSAL, FULL, Band, Interval, Intervals, tile
from attention.memo import memo

Ends = tuple[int, int]  # the least and the largest number of keys of a batch element


def block(problem: Problem, owner: int, ends: Ends | None = None) -> Block | None:
    """All queries that see some key of `owner`, against the keys that they see; None where no query sees one. ends: of batch
    elements with different numbers of keys. The block then has all queries, the keys that those of some element may see, and
    the mask of the problem, which is aligned to each element's own end."""
    n, end = problem.q_tokens or 0, problem.cu_seqlens[-1]
    keys = _shard(problem, owner)
    if ends is None:
        found = tiles(problem.band, (end - n, end), n - end, (keys.start, keys.stop), -keys.start)
        return found[0] if found else None
    least, most = ends
    seen = tile(problem.band, (least - n, most), (keys.start, min(keys.stop, most)))
    return Block((0, n), (seen[1][0] - keys.start, seen[1][1] - keys.start), problem.band) if seen and n else None


class Tile(NamedTuple):
    """Queries and keys of one batch element at one owner, and their (query, key) pairs."""

    queries: int = 0
    keys: int = 0
    pairs: int = 0


def seen(problem: Problem, owner: int, end: int) -> Tile:
    """What the queries of a batch element with `end` keys see of those that `owner` has."""
    n, keys = problem.q_tokens or 0, _shard(problem, owner)
    if not n or keys.start >= min(keys.stop, end):
        return Tile()
    found = tiles(problem.band, (end - n, end), n - end, (keys.start, min(keys.stop, end)), -keys.start)
    return Tile(found[0].q[1] - found[0].q[0], found[0].k[1] - found[0].k[0], found[0].pairs) if found else Tile()


def first_key(problem: Problem, owner: int) -> int:
    return _shard(problem, owner).start


def _shard(problem: Problem, owner: int) -> range:
    (keys,) = problem.layout.shards(problem.cu_seqlens, problem.world)[owner]
    return keys


def masks(problem: Problem) -> set[Band]:
    """All masks that blocks have, for this number of keys or another: a decode keeps its kernel while the keys grow.
    One query sees all keys that are left to it. Of several, the last ones see more keys of a shard that ends among them."""
    found = {b.mask for blocks in _by_owner(problem) for b in blocks if isinstance(b.mask, Band)}
    if problem.band.full or problem.q_tokens == 1:
        return found | {FULL}
    if problem.band.causal and problem.world == 1:
        return found | {FULL, CAUSAL}
    return found | {FULL, CAUSAL, problem.band, Band(1, 1)}


@memo(lambda found, *_: len(found))
def _by_owner(problem: Problem) -> tuple[tuple[Block, ...], ...]:
    """By owner, its block, the same on every rank, or none."""
    found = (block(problem, owner) for owner in range(problem.world))
    return tuple((each,) if each else () for each in found)


class _Decode(Schedule):
    """The steps of a decode, whose queries are on every rank."""

    def buffers(self, problem: Problem, rank: int) -> Buffers:
        raise NotImplementedError("a decode's blocks are made one by one")

    def steps(self, problem: Problem, rank: int) -> tuple[Step, ...]:
        found = []
        for owner in self.owners(problem, rank):
            blocks = _by_owner(problem)[owner]
            keys = tuple(each.k for each in blocks)
            if owner != rank:  # they arrive from the first on
                blocks = tuple(replace(each, k=(0, each.k[1] - each.k[0])) for each in blocks)
            found.append(Step(owner, keys, partial(tuple, blocks)))
        return tuple(found)

    def owners(self, problem: Problem, rank: int) -> list[int]:
        return [rank]

    def masks(self, problem: Problem) -> set[Band]:
        return masks(problem)


class _Ring(_Decode):
    def owners(self, problem: Problem, rank: int) -> list[int]:
        return [(rank - i) % problem.world for i in range(problem.world)]

    def sends(self, problem: Problem, rank: int, i: int) -> tuple[int, Intervals] | None:
        return ((rank + i) % problem.world, tuple(each.k for each in _by_owner(problem)[rank])) if i else None

    def most_keys(self, problem: Problem) -> tuple[int, ...]:
        return (0, *[most_seen(problem)] * (problem.world - 1))


def most_seen(problem: Problem, ends: Ends | None = None) -> int:
    """The most keys of one rank that queries see. ends: as of `block`."""
    if problem.band.full and problem.q_tokens and ends is None:
        return max(sizes_of(problem.layout, problem.cu_seqlens, problem.world))
    found = _by_owner(problem) if ends is None else [(block(problem, owner, ends),) for owner in range(problem.world)]
    return max((b.k[1] - b.k[0] for blocks in found for b in blocks if b), default=0)


def tiles(band: Band, q: Interval, q_shift: int, k: Interval, k_shift: int) -> list[Block]:
    """The block of queries `q` and keys `k`, trimmed to the pairs that the band allows; no block if there are none. q and k
    are sequence positions; the shifts turn them into local slices."""
    found = tile(band, q, k)
    if found is None:
        return []
    (a, b), (c, d), left_over = found
    return [Block((a + q_shift, b + q_shift), (c + k_shift, d + k_shift), left_over)]


TREE = _Decode()
RING = _Ring()
