"""Llama 3's context parallelism on packed batches: each rank holds an equal slice of the packed stream, whatever the
borders of the sequences; keys are gathered and each rank makes one call.

Source: The Llama 3 Herd of Models, section 3.3.2 (Llama Team, 2024); packed batches as in ring-flash-attention (Zhu,
2024)."""

from __future__ import annotations

from attention.geometry.layouts import IN_ORDER, Layout
from attention.geometry.options import GatherOptions
from attention.geometry.schedules import GATHER
from attention.variants.base import Variant, register

PACKED = Layout("packed contiguous", 1, IN_ORDER, per_sequence=False)

register(
    Variant(
        name="llama3",
        summary="an equal slice of the packed stream on each rank, across sequence borders; keys gathered, one call",
        source="The Llama 3 Herd of Models, section 3.3.2 (Llama Team, 2024); packed batches as in "
        "ring-flash-attention (Zhu, 2024)",
        use="packed batches whose total length is a multiple of W, where memory holds the gathered KV heads; long "
        "causal sequences are imbalanced",
        executor="gather",
        layout=PACKED,
        schedule=GATHER,
        any_mask=True,
        options=GatherOptions,
    )
)
