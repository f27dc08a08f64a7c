"""Zigzag: a causal ring in which every rank does the same work. A sequence is cut into 2W chunks, and rank r holds
chunks r and 2W-1-r.

Rank r's queries see their local KV causally. All of them see an earlier rank's first chunk of keys, and none its
second. A later rank's keys are seen by the second query chunk only.

Source: ring-flash-attention's zigzag ring (Zhu, 2024); the chunks are those of Llama 3, too (Llama Team, 2024)."""

from __future__ import annotations

from dataclasses import replace

from attention.geometry.layouts import Chunks, Layout
from attention.geometry.options import HeadParts
from attention.geometry.schedules import RING
from attention.variants.base import Variant, register

ZIGZAG = Layout("zigzag", 2, Chunks(lambda rank, world: (rank, 2 * world - 1 - rank)))

_ZIGZAG = register(
    Variant(
        name="zigzag",
        summary="ring over chunks r and 2W-1-r of 2W, so that every rank has the same causal work",
        source="ring-flash-attention's zigzag ring (Zhu, 2024); its chunks are Llama 3's, too (Llama Team, 2024)",
        use="causal sequences where memory is short: a rank holds two KV shards at a time, never the whole KV",
        executor="ring",
        layout=ZIGZAG,
        schedule=RING,
        options=HeadParts,
        causal_only=True,
        any_mask=True,
    )
)
register(
    replace(
        _ZIGZAG,
        name="zigzag_varlen",
        summary="zigzag over packed batches: every sequence is cut into 2W chunks",
        source="ring-flash-attention's zigzag ring over packed batches (Zhu, 2024)",
        use="packed batches of long causal sequences, each a multiple of 2W, where memory is short",
        alias_of="zigzag",
    )
)
