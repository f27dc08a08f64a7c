"""Ring decode: few queries, equal on every rank, against sharded keys. Every rank's keys travel round the ring, and
each rank computes everything.

Source: Ring Attention (Liu et al., 2023), as Tree Attention compares with it (Shyam et al., 2024)."""

from __future__ import annotations

from attention.geometry.decodes import RING
from attention.geometry.layouts import DECODE, REPLICATED, CuSeqlens, Layout
from attention.geometry.options import Options, RingOptions
from attention.masks.band import Band
from attention.variants.base import Variant, register


class Decode(Variant[Options]):
    """A variant whose queries are on every rank."""

    def q_layout(self, options: Options, cu_seqlens: CuSeqlens, world: int, mask: Band) -> Layout:
        return REPLICATED


register(
    Decode(
        name="ring_decode",
        summary="decode: every rank's keys travel round the ring, and each rank computes everything",
        source="Ring Attention (Liu et al., 2023), the comparison in Tree Attention (Shyam et al., 2024)",
        use="a comparison with tree, which was faster on 2 and 4 GPUs",
        executor="ring",
        layout=DECODE,
        schedule=RING,
        options=RingOptions,
        decode=True,
    )
)
