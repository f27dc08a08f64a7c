"""Striped Attention: a causal ring in which rank r holds the tokens t with t mod W = r, so that every step is nearly
causal and the ranks' work is equal to within a token.

Keys of this and earlier ranks are seen up to the query's own index, keys of later ranks up to the index before.

Source: Striped Attention: Faster Ring Attention for Causal Transformers (Brandon et al., 2023)."""

from __future__ import annotations

from attention.geometry.layouts import Layout, Shard
from attention.geometry.options import HeadParts
from attention.geometry.schedules import RING
from attention.variants.base import Variant, register


def split(length: int, world: int) -> tuple[Shard, ...]:
    return tuple((range(r, length, world),) for r in range(world))


STRIPE = Layout("stripe", 1, split)


register(
    Variant(
        name="stripe",
        summary="ring over tokens t with t mod W = r: balanced to within a token, every step nearly causal",
        source="Striped Attention: Faster Ring Attention for Causal Transformers (Brandon et al., 2023)",
        use="causal sequences that are striped already; zigzag was faster where both were measured",
        executor="ring",
        layout=STRIPE,
        schedule=RING,
        options=HeadParts,
        causal_only=True,
        any_mask=True,
    )
)
