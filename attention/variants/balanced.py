"""Balanced: the sequence in chunks, dealt out so that every rank has as many tokens and nearly as many (query, key) pairs
of one given mask; each rank gathers only the keys that its queries see.

No fixed layout balances a mask that is neither full nor causal. The layout is made for a mask, so the mask comes before the
shards: `attention.make("balanced", mask=mask)`.

Source: the dispatch of MagiAttention (SandAI, 2025): chunks by their areas, largest first; the swaps are ours."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from attention.geometry.layouts import CuSeqlens, Layout, Shard, chunk
from attention.geometry.options import GatherOptions, divisors, from_call, option
from attention.geometry.schedules import GATHER
from attention.masks.band import Band
from attention.masks.mask import Banded, Mask
from attention.masks.rectangles import both, pairs, placed
from attention.masks.sequences import of_sequences
from attention.memo import memo
from attention.variants.base import Variant, register

MOST_CHUNKS = 128  # of a rank
EVEN = 1.01  # the most pairs of a rank over the mean at which no smaller chunks are tried
SWAPS = 400
CAUSAL = Banded(-1, 0)


@dataclass(frozen=True)
class BalancedOptions(GatherOptions):
    """`mask`: what the layout is made for, and the mask of every call. `tokens`: of the whole sequence; None: any number.
    `chunks`: of each rank; None: the fewest that balance."""

    mask: Mask = from_call(CAUSAL)  # noqa: RUF009
    tokens: int | None = from_call(None)
    chunks: int | None = option(None)

    def check(self, heads: int, kv_heads: int, world: int) -> None:
        super().check(heads, kv_heads, world)
        check_options(self)


def check_options(options: BalancedOptions) -> None:
    if not isinstance(options.mask, Mask):
        raise ValueError(f"mask={options.mask!r}: must be one of attention.masks, such as masks.chunked(8192)")
    for name in ("tokens", "chunks"):
        value = getattr(options, name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ValueError(f"{name}={value!r}: must be a whole number of at least 1, or null")


@dataclass(frozen=True)
class Split:
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
        return Layout("balanced", 1, Split(options.mask, options.tokens, options.chunks), per_sequence=False)

    def mask_of(self, options: BalancedOptions) -> Mask:
        return options.mask

    def form(self, mask: Band | Mask, cu_seqlens: CuSeqlens) -> Mask:
        return mask if isinstance(mask, Mask) else of_sequences(mask, cu_seqlens)

    def check_cut(self, options: BalancedOptions, mask: Mask, tokens: int) -> None:
        if mask != options.mask and not within(mask, options.mask, tokens):
            raise ValueError(
                f"mask={mask}: this balanced layout was made for {options.mask}; "
                'make another: attention.make("balanced", mask=...)'
            )


def within(mask: Mask, other: Mask, tokens: int) -> bool:
    """Whether the other mask keeps all pairs of a mask."""
    return int(pairs(both(mask.rectangles(tokens), other.rectangles(tokens))).sum()) == mask.pairs(tokens)


@memo(lambda found, *_: sum(map(len, found)))
def assigned(mask: Mask, length: int, world: int, chunks: int | None) -> tuple[Shard, ...]:
    """By rank, its chunks of the sequence in order; equally many tokens each. Raises ValueError for chunks that do not
    divide a rank's tokens."""
    each = length // world
    if length == 0 or world == 1:
        return tuple((chunk(length, world, rank),) for rank in range(world))
    if chunks is not None and each % chunks:
        raise ValueError(f"chunks={chunks}: must divide a rank's {each} tokens; it may be {divisors(each)[:16]}")
    able = [chunks] if chunks else [n for n in divisors(each) if n <= MOST_CHUNKS]
    finest = chunk_pairs(mask, length, world * int(np.lcm.reduce(able)) if chunks else world * able[-1])
    best: tuple[float, NDArray[np.int64]] | None = None
    for n in able:
        work = (
            finest.reshape(world * n, -1).sum(1)
            if len(finest) % (world * n) == 0
            else chunk_pairs(mask, length, world * n)
        )
        owner = deal(work, world)
        uneven = unevenness(work, owner, world)
        if best is None or uneven < best[0]:
            best = uneven, owner
        if uneven <= EVEN:
            break
    assert best is not None
    return _shards(best[1], length, world)


def _shards(owner: NDArray[np.int64], length: int, world: int) -> tuple[Shard, ...]:
    """Neighbouring chunks of one rank are one range."""
    found: list[list[range]] = [[] for _ in range(world)]
    for number, rank in enumerate(owner.tolist()):
        part = chunk(length, len(owner), number)
        if found[rank] and found[rank][-1].stop == part.start:
            part = range(found[rank].pop().start, part.stop)
        found[rank].append(part)
    return tuple(map(tuple, found))


def chunk_pairs(mask: Mask, length: int, n: int) -> NDArray[np.int64]:
    """The mask's pairs in each of n equal chunks of the queries."""
    places = [(i * length // n, (i + 1) * length // n, 0) for i in range(n)]
    parts, which = placed(mask.rectangles(length), places, keys=False)
    return np.bincount(which, pairs(parts), n).astype(np.int64)


def deal(work: NDArray[np.int64], world: int) -> NDArray[np.int64]:
    """The rank of each chunk: as many chunks to each, the largest first, each to the rank with the least work so far;
    then swaps between the ranks with the most and the least."""
    most = len(work) // world
    if most == 1:
        return np.arange(world)
    owner = np.empty(len(work), np.int64)
    ranks = [(0, 0, rank) for rank in range(world)]  # work, chunks, rank
    for number in np.argsort(-work, kind="stable").tolist():
        load, held, rank = heapq.heappop(ranks)
        owner[number] = rank
        if held + 1 < most:
            heapq.heappush(ranks, (load + int(work[number]), held + 1, rank))
    loads = np.bincount(owner, work, world)
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


def unevenness(work: NDArray[np.int64], owner: NDArray[np.int64], world: int) -> float:
    """The most work of a rank over the mean."""
    loads = np.bincount(owner, work, world)
    return float(loads.max() / loads.mean()) if loads.any() else 1.0


register(
    _Balanced(
        name="balanced",
        summary="chunks dealt out so that all ranks have nearly as many pairs of a given mask; only needed keys gathered",
        source="MagiAttention's dispatch of chunks by area (SandAI, 2025)",
        use="any mask that is neither full nor causal, and packed batches of real lengths: made for one mask",
        executor="gather",
        layout=Layout("balanced", 1, Split(CAUSAL, None, None), per_sequence=False),
        schedule=GATHER,
        any_mask=True,
        options=BalancedOptions,
        benchmark_only="balanced is made for one mask, which auto does not know before the shards",
    )
)
