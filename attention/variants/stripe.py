"""Striped Attention: a causal ring in which rank r holds the tokens t with t mod W = r, so that every step is nearly
causal and the ranks' work is equal to within a token.

Keys of this and earlier ranks are seen up to the query's own index, keys of later ranks up to the index before.

Source: Striped Attention: Faster Ring Attention for Causal Transformers (Brandon et al., 2023)."""

from __future__ import annotations

from attention.geometry.layouts import Layout, Shard
from attention.geometry.options import HeadParts
from attention.geometry.schedules import Block, Problem, RingSchedule, equal_shards, shard_blocks, whole_shard
from attention.masks.band import CAUSAL, Intervals
from attention.memo import memo
from attention.variants.base import Variant, register


def split(length: int, world: int) -> tuple[Shard, ...]:
    return tuple((range(r, length, world),) for r in range(world))


STRIPE = Layout("stripe", 1, split)


def blocks(problem: Problem, rank: int, owner: int) -> tuple[Block, ...]:
    """What `rank` computes against the keys of `owner`."""
    return shard_blocks(problem, CAUSAL) if owner <= rank else _later(problem)


@memo(lambda found, *_: len(found))
def _later(problem: Problem) -> tuple[Block, ...]:
    """Against the keys of any later rank."""
    return tuple(Block((at + 1, at + n), (at, at + n - 1), CAUSAL) for at, n in equal_shards(problem) if n > 1)


def keys(problem: Problem, rank: int, owner: int) -> Intervals:
    """The owner's keys that the rank needs: all, but of later ranks the last of each sequence."""
    if owner <= rank:
        return whole_shard(problem)
    return tuple(block.k for block in _later(problem))


SCHEDULE = RingSchedule(blocks, keys)

register(
    Variant(
        name="stripe",
        summary="ring over tokens t with t mod W = r: balanced to within a token, every step nearly causal",
        source="Striped Attention: Faster Ring Attention for Causal Transformers (Brandon et al., 2023)",
        use="causal sequences that are striped already; zigzag was faster where both were measured",
        executor="ring",
        layout=STRIPE,
        schedule=SCHEDULE,
        options=HeadParts,
        causal_only=True,
        windows=False,
    )
)
