"""Layouts: which tokens of the global sequence, or of every sequence of a pack, each rank holds. Pure Python: a shard is
a list of `range`s of global token positions, in the order in which the rank stores them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

Shard = tuple[range, ...]
CuSeqlens = tuple[int, ...]  # cumulative sequence lengths, first 0, last the total


@dataclass(frozen=True)
class Layout:
    """`split(length, world)` gives every rank's ranges of one sequence; a length must be a multiple of
    `chunks * world`. With `per_sequence` each sequence of a pack is split by itself, without it the packed stream is
    split as if it were one sequence. `replicated` means that every rank holds everything."""

    name: str
    chunks: int
    split: Callable[[int, int], tuple[Shard, ...]]
    per_sequence: bool = True
    replicated: bool = False

    def check(self, cu_seqlens: CuSeqlens, world: int) -> None:
        """Raises ValueError when some sequence does not divide."""
        if self.replicated:
            return
        divisor = self.chunks * world
        lengths = _lengths(cu_seqlens) if self.per_sequence else [cu_seqlens[-1]]
        for length in lengths:
            if length % divisor:
                near = max(divisor, round(length / divisor) * divisor)
                what = "seq_len" if len(cu_seqlens) == 2 else "a sequence of the pack has length"
                if not self.per_sequence and len(cu_seqlens) > 2:
                    what = "the pack's total"
                times = f"{self.chunks} * world_size" if self.chunks > 1 else "world_size"
                raise ValueError(
                    f"{what}={length}: the {self.name} layout needs a multiple of {times} = {divisor}; "
                    f"{near} would work"
                )

    def shards(self, cu_seqlens: CuSeqlens, world: int) -> tuple[Shard, ...]:
        """For each rank the ranges of global positions it holds."""
        return _shards(self, cu_seqlens, world)


@lru_cache(maxsize=256)
def _shards(layout: Layout, cu_seqlens: CuSeqlens, world: int) -> tuple[Shard, ...]:
    layout.check(cu_seqlens, world)
    if not layout.per_sequence:
        return layout.split(cu_seqlens[-1], world)
    per_rank: list[list[range]] = [[] for _ in range(world)]
    for start, stop in itertools.pairwise(cu_seqlens):
        for rank, shard in enumerate(layout.split(stop - start, world)):
            per_rank[rank] += [range(start + r.start, start + r.stop, r.step) for r in shard]
    return tuple(tuple(ranges) for ranges in per_rank)


def _lengths(cu_seqlens: Sequence[int]) -> list[int]:
    return [b - a for a, b in itertools.pairwise(cu_seqlens)]


def size(shard: Shard) -> int:
    """How many tokens a shard holds."""
    return sum(len(r) for r in shard)


def positions(shard: Shard) -> list[int]:
    """The global position of every local token."""
    return [t for r in shard for t in r]


def _chunk(length: int, n: int, i: int) -> range:
    return range(i * length // n, (i + 1) * length // n)


def _contiguous(length: int, world: int) -> tuple[Shard, ...]:
    return tuple((_chunk(length, world, r),) for r in range(world))


def _zigzag(length: int, world: int) -> tuple[Shard, ...]:
    n = 2 * world
    return tuple((_chunk(length, n, r), _chunk(length, n, n - 1 - r)) for r in range(world))


def _stripe(length: int, world: int) -> tuple[Shard, ...]:
    return tuple((range(r, length, world),) for r in range(world))


def _paired(length: int, world: int) -> tuple[Shard, ...]:
    n = 2 * world
    return tuple((_chunk(length, n, 2 * r), _chunk(length, n, n - 1 - 2 * r)) for r in range(world))


def _replicated(length: int, world: int) -> tuple[Shard, ...]:
    return tuple((range(length),) for _ in range(world))


CONTIGUOUS = Layout("contiguous", 1, _contiguous)
PACKED = Layout("packed contiguous", 1, _contiguous, per_sequence=False)
ZIGZAG = Layout("zigzag", 2, _zigzag)
STRIPE = Layout("stripe", 1, _stripe)
# contiguous shards whose second halves are swapped between ranks r and W-1-r: a causal rank's two chunks then cost the
# same on every rank (the inner layout of ring_allgather)
PAIRED = Layout("paired", 2, _paired)
REPLICATED = Layout("replicated", 1, _replicated, replicated=True)
