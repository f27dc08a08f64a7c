"""Balanced: the sequence in chunks, dealt out so that every rank has as many tokens and nearly as many (query, key) pairs
of one given mask; each rank gathers only the keys that its queries see.

No fixed layout balances a mask that is neither full nor causal. The layout is made for a mask, so the mask comes before the
shards: `attention.make("balanced", mask=mask)`.

Source: the dispatch of MagiAttention (SandAI, 2025): chunks by their areas, largest first; the swaps are ours."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from attention.geometry.layouts import CuSeqlens, Layout, Shard, chunk
from attention.geometry.options import GatherOptions, divisors, from_call, option
from attention.geometry.schedules import GATHER
from attention.masks.band import Band
from attention.masks.mask import Banded, Mask
from attention.masks.overlap import both
from attention.masks.padded import Padded
from attention.masks.rectangles import Q0, Q1, pairs, placed
from attention.masks.sequences import of_sequences
from attention.memo import memo
from attention.variants.base import Variant, register

MOST_CHUNKS = 128  # of a rank
EVEN = 1.01  # the most pairs of a rank over the mean at which no other chunks are tried
UNEVEN = 1.05  # above it chunks with very many pairs are cut
MOST_ROWS = 4096  # parts into which chunks with very many pairs are cut
FEW_PARTS = 1 << 14  # whose pairs are counted in some milliseconds
SWAPS = 400
CAUSAL = Banded(-1, 0)


@dataclass(frozen=True)
class BalancedOptions(GatherOptions):
    """`mask`: what the layout is made for, and the mask of every call; None: a layout for calls with causal=True.
    `tokens`: of the whole sequence; None: any number. `chunks`: of each rank; None: the fewest that balance."""

    mask: Mask | None = from_call(None)  # noqa: RUF009
    tokens: int | None = from_call(None)
    chunks: int | None = option(None)

    @property
    def made_for(self) -> Mask:
        return CAUSAL if self.mask is None else self.mask

    def check(self, heads: int, kv_heads: int, world: int) -> None:
        super().check(heads, kv_heads, world)
        check_options(self)


def check_options(options: BalancedOptions) -> None:
    if not isinstance(options.made_for, Mask):
        raise ValueError(f"mask={options.mask!r}: must be one of attention.masks, such as masks.chunked(8192)")
    for name in ("tokens", "chunks"):
        value = getattr(options, name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ValueError(f"{name}={value!r}: must be a whole number of at least 1, or null")


@dataclass(frozen=True)
class MaskSplit:
    """A layout's split for one mask."""

    mask: Mask
    tokens: int | None
    chunks: int | None

    def __call__(self, length: int, world: int) -> tuple[Shard, ...]:
        if self.tokens not in (None, length):
            raise ValueError(f"seq_len={length}: this balanced layout was made for tokens={self.tokens}; make another")
        return assigned(self.mask, length, world, self.chunks)


class _Balanced(Variant[BalancedOptions]):
    def outer(self, options: BalancedOptions) -> Layout:
        check_options(options)
        return Layout("balanced", 1, MaskSplit(options.made_for, options.tokens, options.chunks), per_sequence=False)

    def padded(self, options: BalancedOptions, padding: int) -> BalancedOptions:
        if not padding:
            return options
        tokens = None if options.tokens is None else options.tokens + padding
        return replace(options, mask=Padded(options.made_for, padding), tokens=tokens)

    def mask_of(self, options: BalancedOptions) -> Mask | None:
        return options.mask

    def form(self, mask: Band | Mask, cu_seqlens: CuSeqlens) -> Mask:
        return mask if isinstance(mask, Mask) else of_sequences(mask, cu_seqlens)

    def check_cut(self, options: BalancedOptions, mask: Mask, tokens: int) -> None:
        if mask != options.made_for and not within(mask, options.made_for, tokens):
            raise ValueError(
                f"{mask.asked()}: this balanced layout was made for {options.made_for}; "
                'make another: attention.make("balanced", mask=...)'
            )


def within(mask: Mask, other: Mask, tokens: int) -> bool:
    """Whether the other mask keeps all pairs of a mask."""
    return int(pairs(both(mask.rectangles(tokens), other.rectangles(tokens))).sum()) == mask.pairs(tokens)


@memo(lambda found, *_: sum(map(len, found)))
def assigned(mask: Mask, length: int, world: int, chunks: int | None) -> tuple[Shard, ...]:
    """By rank, its parts of the sequence in order; equally many tokens each. Raises ValueError for chunks that do not
    divide a rank's tokens."""
    each = length // world
    if length == 0 or world == 1:
        return tuple((chunk(length, world, rank),) for rank in range(world))
    if chunks is not None and each % chunks:
        raise ValueError(f"chunks={chunks}: must divide a rank's {each} tokens; it may be {divisors(each)[:16]}")
    able = [chunks] if chunks else [n for n in divisors(each) if n <= MOST_CHUNKS]
    best: Dealt | None = None
    work = ChunkPairs(mask, length, world)
    # where a few rows have very many pairs, whole chunks are tried last; chunks with few pairs show that there are none
    whole = [n for n in able if able[-1] % n == 0]
    cheap = max(FEW_PARTS, len(mask.rectangles(length)))
    first = max((n for n in whole if world * n <= cheap), default=1)
    few_rows = all(work[n].max() > work[n].sum() / world / 4 for n in whole if n >= first)
    for way in (by_chunks_and_rows, by_chunks) if few_rows else (by_chunks, by_chunks_and_rows):
        for n in able if way is by_chunks else reversed(able):
            found = way(mask, length, world, work[n])
            if found is not None and (best is None or found.uneven < best.uneven):
                best = found
            if best is not None and best.uneven <= EVEN:
                return best.shards(world)
        if best is not None and best.uneven <= UNEVEN:
            break
    assert best is not None
    return best.shards(world)


class ChunkPairs(dict[int, NDArray[np.int64]]):
    """By the number of chunks of a rank, the pairs of each chunk; counted when first asked for, since few finer than those
    that balance are needed."""

    def __init__(self, mask: Mask, length: int, world: int):
        self.mask, self.length, self.world = mask, length, world

    def __missing__(self, n: int) -> NDArray[np.int64]:
        chunks = self.world * n
        finer = min((m for m in self if m % n == 0), default=None)
        if finer is None:
            self[n] = pairs_in(self.mask, self.length, equal_parts(0, self.length, chunks))
        else:
            self[n] = self[finer].reshape(chunks, -1).sum(1)
        return self[n]


@dataclass(frozen=True, eq=False)
class Dealt:
    """Parts of the sequence `[n, 2]` in order and the rank of each. uneven: the most pairs of a rank over the mean."""

    parts: NDArray[np.int64]
    owner: NDArray[np.int64]
    uneven: float

    @staticmethod
    def of(parts: NDArray[np.int64], owner: NDArray[np.int64], work: NDArray[np.int64], world: int) -> Dealt:
        loads = np.bincount(owner, work, world)
        return Dealt(parts, owner, float(loads.max() / loads.mean()) if loads.any() else 1.0)

    def shards(self, world: int) -> tuple[Shard, ...]:
        """Neighbouring parts of one rank are one range."""
        found: list[list[range]] = [[] for _ in range(world)]
        for (start, stop), rank in zip(self.parts.tolist(), self.owner.tolist(), strict=True):
            if found[rank] and found[rank][-1].stop == start:
                start = found[rank].pop().start
            found[rank].append(range(start, stop))
        return tuple(map(tuple, found))


def by_chunks(mask: Mask, length: int, world: int, work: NDArray[np.int64]) -> Dealt:
    """Whole chunks, equally many to each rank. work: the pairs of each chunk."""
    return Dealt.of(equal_parts(0, length, len(work)), deal(work, world), work, world)


def by_chunks_and_rows(mask: Mask, length: int, world: int, work: NDArray[np.int64]) -> Dealt | None:
    """As many of the chunks with the most pairs as there are ranks are cut into a few rows each, which are dealt out
    first, then the other chunks: for masks of which a few queries see very many keys. None where chunks cannot be cut."""
    size = length // len(work)
    if size == 1 or len(work) == world:
        return None
    cut = max(m for m in divisors(size) if m * world <= MOST_ROWS or m == 1)
    parts = equal_parts(0, length, len(work))
    most = np.sort(np.argsort(-work, kind="stable")[:world])
    rest = np.setdiff1d(np.arange(len(work)), most)
    rows = np.concatenate([equal_parts(parts[i, 0], parts[i, 1], cut) for i in most])
    of_rows = pairs_in(mask, length, rows)
    rows_owner = deal(of_rows, world)
    owner = deal(work[rest], world, np.bincount(rows_owner, of_rows, world).astype(np.float64))
    parts = np.concatenate([rows, parts[rest]])
    owner, work = np.concatenate([rows_owner, owner]), np.concatenate([of_rows, work[rest]])
    order = np.argsort(parts[:, 0])
    return Dealt.of(parts[order], owner[order], work[order], world)


def equal_parts(start: int, stop: int, n: int) -> NDArray[np.int64]:
    borders = start + np.arange(n + 1) * (stop - start) // n
    return np.stack([borders[:-1], borders[1:]], 1)


def pairs_in(mask: Mask, length: int, parts: NDArray[np.int64]) -> NDArray[np.int64]:
    """The mask's pairs of the queries of each part. parts: `[n, 2]`, disjoint and in order."""
    x = mask.rectangles(length)
    at = np.searchsorted(parts[:, 1], x[:, Q0], "right")  # the first part that ends after the rectangle starts
    low, high = np.append(parts, [[length, length]], 0)[at].T
    within = (x[:, Q0] >= low) & (x[:, Q1] <= high)  # most of a mask of tiles: counted as they are
    cut, which = placed(x[~within], np.pad(parts, ((0, 0), (0, 1))), keys=False)
    whole = x[within]
    work = np.bincount(at[within], pairs(whole), len(parts)) + np.bincount(which, pairs(cut), len(parts))
    return work.astype(np.int64)


def deal(work: NDArray[np.int64], world: int, before: NDArray[np.float64] | None = None) -> NDArray[np.int64]:
    """The rank of each chunk: as many chunks to each, the largest first, each to the rank with the least work so far;
    then swaps between the ranks with the most and the least. before: work that each rank has already."""
    before = np.zeros(world) if before is None else before
    most = len(work) // world
    if most == 1 and not before.any():
        return np.arange(world)
    owner = np.empty(len(work), np.int64)
    ranks = [(float(load), 0, rank) for rank, load in enumerate(before)]  # work, chunks, rank
    heapq.heapify(ranks)
    for number in np.argsort(-work, kind="stable").tolist():
        load, held, rank = heapq.heappop(ranks)
        owner[number] = rank
        if held + 1 < most:
            heapq.heappush(ranks, (load + int(work[number]), held + 1, rank))
    loads = before + np.bincount(owner, work, world)
    for _ in range(SWAPS):
        high, low = int(loads.argmax()), int(loads.argmin())
        gap = loads[high] - loads[low]
        if loads[high] <= loads.mean() * (1 + (EVEN - 1) / 4):
            break
        mine, theirs = np.flatnonzero(owner == high), np.flatnonzero(owner == low)
        moved = work[mine][:, None] - work[theirs][None, :]
        left = np.abs(gap - 2 * moved)
        i, j = np.unravel_index(int(left.argmin()), left.shape)
        if left[i, j] >= gap:
            break
        a, b = mine[i], theirs[j]
        owner[a], owner[b] = low, high
        loads[high] -= moved[i, j]
        loads[low] += moved[i, j]
    return owner


register(
    _Balanced(
        name="balanced",
        summary="chunks dealt out so that all ranks have nearly as many pairs of a given mask; only needed keys gathered",
        source="MagiAttention's dispatch of chunks by area (SandAI, 2025)",
        use="any mask that is neither full nor causal, and packed batches of real lengths: made for one mask",
        executor="gather",
        layout=Layout("balanced", 1, MaskSplit(CAUSAL, None, None), per_sequence=False),
        schedule=GATHER,
        any_mask=True,
        options=BalancedOptions,
        benchmark_only="balanced is made for one mask, which auto does not know before the shards",
    )
)
