"""Ring Attention: each rank holds a contiguous shard; keys and values travel round the ring, and partial results are
merged by their LSE.

Step i of rank r is against the keys of rank r - i (mod W): the tile of the mask that falls on the two shards. Causal,
later ranks do more. A window leaves most steps empty.

Source: Ring Attention with Blockwise Transformers for Near-Infinite Context (Liu et al., 2023)."""

from __future__ import annotations

from dataclasses import replace

from attention.geometry.layouts import CONTIGUOUS
from attention.geometry.options import HeadParts
from attention.geometry.schedules import Block, Problem, RingSchedule, equal_shards, shard_blocks, tiles, whole_shard
from attention.masks.band import FULL, Intervals
from attention.variants.base import Variant, register


def blocks(problem: Problem, rank: int, owner: int) -> tuple[Block, ...]:
    """What `rank` computes against the keys of `owner`."""
    band = problem.band
    if not band.windowed:
        return _whole(problem, owner - rank)
    found: list[Block] = []
    for at, n in equal_shards(problem):
        q, k = (rank * n, (rank + 1) * n), (owner * n, (owner + 1) * n)
        found += tiles(band, q, at - q[0], k, at - k[0])
    return tuple(found)


def _whole(problem: Problem, ahead: int) -> tuple[Block, ...]:
    """Without a window: the same blocks for all earlier ranks, and for all later ones."""
    if ahead > 0 and problem.band.causal:
        return ()
    return shard_blocks(problem, FULL if ahead else problem.band)


def _outside(problem: Problem, rank: int, owner: int) -> bool:
    """Whether a window ends before the owner's keys, in every sequence."""
    band, shortest = problem.band, min((n for _, n in equal_shards(problem) if n), default=0)
    bound = band.left if owner < rank else band.right
    return owner != rank and 0 <= bound < (abs(owner - rank) - 1) * shortest + 1


def keys(problem: Problem, rank: int, owner: int) -> Intervals | None:
    """The owner's keys that the rank needs, where they are known without the blocks: all of them or, of later ranks and
    outside a window, none."""
    if problem.band.causal and owner > rank:
        return ()
    if problem.band.windowed:
        return () if _outside(problem, rank, owner) else None
    return whole_shard(problem)


SCHEDULE = RingSchedule(blocks, keys)

RING = register(
    Variant(
        name="ring",
        summary="contiguous shards; keys and values travel round the ring, partial results are merged",
        source="Ring Attention with Blockwise Transformers for Near-Infinite Context (Liu et al., 2023)",
        use="non-causal masks, and windows, which need only the neighbours' keys; imbalanced under a causal mask",
        executor="ring",
        layout=CONTIGUOUS,
        schedule=SCHEDULE,
        any_mask=True,
        options=HeadParts,
        twin="ring_varlen",
    )
)
register(
    replace(
        RING,
        name="ring_varlen",
        summary="ring over packed batches: every sequence is cut into contiguous shards",
        source="Ring Attention (Liu et al., 2023), sequence by sequence as in ring-flash-attention (Zhu, 2024)",
        use="packed batches of many short sequences, each a multiple of W; long causal ones are imbalanced",
        packed=True,
        twin="ring",
    )
)
