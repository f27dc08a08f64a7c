"""Layouts: the tokens of the global sequence, or of each sequence of a packed batch, that each rank holds. Pure Python:
a shard is a list of `range`s of global token positions, in the order in which the rank stores them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import lcm

from attention.masks.band import Intervals
from attention.memo import memo

Shard = tuple[range, ...]
CuSeqlens = tuple[int, ...]  # cumulative sequence lengths, first 0, last the total


@dataclass(frozen=True)
class Chunks:
    """A split into equal chunks: of W ranks, rank r holds the chunks with the numbers `of(r, W)`, in this order."""

    of: Callable[[int, int], tuple[int, ...]]

    def table(self, world: int) -> list[tuple[int, ...]]:
        return [self.of(rank, world) for rank in range(world)]

    def __call__(self, length: int, world: int) -> tuple[Shard, ...]:
        table = self.table(world)
        n = world * len(table[0])
        return tuple(tuple(chunk(length, n, i) for i in numbers) for numbers in table)


@dataclass(frozen=True)
class Layout:
    """`split(length, world)` gives every rank's ranges of one sequence; a length must be a multiple of
    `chunks * world`, unless the shards may be `uneven`.

    per_sequence: each sequence of a packed batch is split by itself; else the whole batch is split like one sequence.
    replicated: every rank holds everything.
    inner: if above 1, the layout is that of groups of so many ranks; a rank holds an equal consecutive piece of its
    group's shard."""

    name: str
    chunks: int
    split: Callable[[int, int], tuple[Shard, ...]]
    per_sequence: bool = True
    replicated: bool = False
    uneven: bool = False  # of one sequence
    inner: int = 1

    def check(self, cu_seqlens: CuSeqlens, world: int) -> None:
        """Raises ValueError when some sequence does not divide."""
        if self.replicated or self.uneven:
            return
        groups = world // self.inner
        lengths = _lengths(cu_seqlens) if self.per_sequence else [cu_seqlens[-1]]
        single = len(cu_seqlens) == 2
        if self.inner > 1 and single:  # the pieces of a group's shard lie within a chunk, which implies the rest
            self._divides(lengths[0], self.chunks * world, "seq_len", self._times("world_size"))
            return
        divisor = self.chunks * groups
        length = next((length for length in lengths if length % divisor), 0)
        what = "seq_len" if single else "a sequence of the packed batch has length"
        if not single and not self.per_sequence:
            what = "the packed batch's total"
        times = "world_size" if self.inner == 1 else f"(world_size / {self.inner})"
        self._divides(length, divisor, what, self._times(times))
        if self.inner > 1:  # the pieces of a group's shard
            self._divides(
                cu_seqlens[-1], world, "the packed batch's total", "world_size", lcm(world, self.chunks * groups)
            )

    def padding(self, cu_seqlens: CuSeqlens, world: int) -> int:
        """The tokens to add at the end, 0 where every sequence divides. With them the whole is split like one sequence."""
        try:
            self.check(cu_seqlens, world)
            return 0
        except ValueError:
            unit = self.chunks * world
            return -cu_seqlens[-1] % unit or unit

    def _times(self, what: str) -> str:
        return f"{self.chunks} * {what}" if self.chunks > 1 else what

    def _divides(self, length: int, divisor: int, what: str, rule: str, unit: int | None = None) -> None:
        """unit: the suggested length must be a multiple of it, where other rules hold, too."""
        if length % divisor:
            unit = unit or divisor
            near = max(unit, round(length / unit) * unit)
            raise ValueError(
                f"{what}={length}: the {self.name} layout needs a multiple of {rule} = {divisor}; {near} would work"
            )

    def shards(self, cu_seqlens: CuSeqlens, world: int) -> tuple[Shard, ...]:
        """For each rank the ranges of global positions it holds."""
        return _shards(self, cu_seqlens, world)


@memo(lambda shards, *_: sum(map(len, shards)))
def _shards(layout: Layout, cu_seqlens: CuSeqlens, world: int) -> tuple[Shard, ...]:
    layout.check(cu_seqlens, world)
    groups = world // layout.inner
    if not layout.per_sequence:
        return layout.split(cu_seqlens[-1], groups)
    per_group: list[list[range]] = [[] for _ in range(groups)]
    for start, stop in pairwise(cu_seqlens):
        for group, shard in enumerate(layout.split(stop - start, groups)):
            per_group[group] += [range(start + r.start, start + r.stop, r.step) for r in shard]
    if layout.inner == 1:
        return tuple(tuple(ranges) for ranges in per_group)
    return tuple(piece for ranges in per_group for piece in _cut(tuple(ranges), layout.inner))


def _cut(shard: Shard, n: int) -> list[Shard]:
    """A shard as n consecutive pieces of equal size."""
    share = size(shard) // n
    pieces = []
    for i in range(n):
        piece = []
        at = 0
        for r in shard:
            a, b = max(i * share - at, 0), min((i + 1) * share - at, len(r))
            if a < b:
                piece.append(r[a:b])
            at += len(r)
        pieces.append(tuple(piece))
    return pieces


def _lengths(cu_seqlens: Sequence[int]) -> list[int]:
    return [b - a for a, b in pairwise(cu_seqlens)]


def beyond(shard: Shard, tokens: int) -> Intervals:
    """Where a shard's tokens lie in it that come after the first `tokens` of the sequence."""
    positions, at = [], 0
    for r in shard:
        before = len(range(r.start, min(r.stop, tokens), r.step))
        if before < len(r):
            positions.append((at + before, at + len(r)))
        at += len(r)
    return tuple(positions)


def size(shard: Shard) -> int:
    """How many tokens a shard holds."""
    return sum(len(r) for r in shard)


@lru_cache(maxsize=256)
def sizes_of(layout: Layout, cu_seqlens: CuSeqlens, world: int) -> tuple[int, ...]:
    """How many tokens each rank holds."""
    if not layout.uneven:
        layout.check(cu_seqlens, world)
        return (cu_seqlens[-1] // (1 if layout.replicated else world),) * world
    return tuple(map(size, layout.split(cu_seqlens[-1], world)))  # a decode's, anew for each token: not kept


def largest(layout: Layout, cu_seqlens: CuSeqlens, world: int) -> int:
    """The most tokens that a rank holds."""
    return max(sizes_of(layout, cu_seqlens, world))


def positions(shard: Shard) -> list[int]:
    """The global position of every local token."""
    return [t for r in shard for t in r]


def chunk(length: int, n: int, i: int) -> range:
    """Chunk i of n."""
    return range(i * length // n, (i + 1) * length // n)


def _replicated(length: int, world: int) -> tuple[Shard, ...]:
    """Every rank: everything, as the queries in Tree Attention (Shyam et al., 2024)."""
    return tuple((range(length),) for _ in range(world))


def _ceiled(length: int, world: int) -> tuple[Shard, ...]:
    """Rank r: piece r of ceil(length / W) tokens, as far as they go. The keys in Tree Attention (Shyam et al.,
    2024)."""
    return tuple((ceiled(length, world, rank),) for rank in range(world))


def ceiled(length: int, world: int, rank: int) -> range:
    """The one piece of a rank."""
    share = -(-length // world)
    return range(min(rank * share, length), min((rank + 1) * share, length))


# Layouts that several variants share; the others stand in their variant's file.
# piece r of W: Ring Attention (Liu et al., 2023); of a whole packed batch ring-flash-attention's llama3 (Zhu, 2024)
IN_ORDER = Chunks(lambda rank, world: (rank,))
CONTIGUOUS = Layout("contiguous", 1, IN_ORDER)
REPLICATED = Layout("replicated", 1, _replicated, replicated=True)
# the keys of a decode: equal shards but for the last ranks', which may be short or empty
DECODE = Layout("decode", 1, _ceiled, uneven=True)
