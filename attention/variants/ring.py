"""Ring Attention: each rank holds a contiguous shard; keys and values travel round the ring, and partial results are
merged by their LSE.

Step i of rank r is against the keys of rank r - i (mod W). Causal, later ranks do more. A window leaves most steps empty.

Source: Ring Attention with Blockwise Transformers for Near-Infinite Context (Liu et al., 2023)."""

from __future__ import annotations

from dataclasses import replace

from attention.geometry.layouts import CONTIGUOUS
from attention.geometry.options import HeadParts
from attention.geometry.schedules import RING
from attention.variants.base import Variant, register

_RING = register(
    Variant(
        name="ring",
        summary="contiguous shards; keys and values travel round the ring, partial results are merged",
        source="Ring Attention with Blockwise Transformers for Near-Infinite Context (Liu et al., 2023)",
        use="non-causal masks, and windows, which need only the neighbours' keys; imbalanced under a causal mask",
        executor="ring",
        layout=CONTIGUOUS,
        schedule=RING,
        any_mask=True,
        options=HeadParts,
    )
)
register(
    replace(
        _RING,
        name="ring_varlen",
        summary="ring over packed batches: every sequence is cut into contiguous shards",
        source="Ring Attention (Liu et al., 2023), sequence by sequence as in ring-flash-attention (Zhu, 2024)",
        use="packed batches of many short sequences, each a multiple of W; long causal ones are imbalanced",
        alias_of="ring",
    )
)
