"""Dense: the whole attention on every rank, nothing sharded."""

from __future__ import annotations

from attention.geometry.layouts import REPLICATED
from attention.geometry.options import RingOptions
from attention.geometry.schedules import LOCAL
from attention.variants.base import Variant, register

register(
    Variant(
        name="dense",
        summary="the whole attention on every rank, nothing sharded",
        source="FlashAttention (Dao et al., 2022), or the kernel's own",
        use="the comparison with one device and the same kernel",
        executor="ring",
        layout=REPLICATED,
        schedule=LOCAL,
        any_mask=True,
        options=RingOptions,
    )
)
