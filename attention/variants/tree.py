"""Tree Attention, for decode: each rank attends its shard of the keys, and the partial results are reduced over the
ranks.

Source: Tree Attention: Topology-aware Decoding for Long-Context Attention on GPU Clusters (Shyam et al., 2024)."""

from __future__ import annotations

from attention.geometry.decodes import TREE
from attention.geometry.layouts import DECODE
from attention.geometry.options import TreeOptions
from attention.variants.base import register
from attention.variants.ring_decode import Decode

register(
    Decode(
        name="tree",
        summary="decode: each rank attends its shard of the keys, the partial results are reduced over the ranks",
        source="Tree Attention: Topology-aware Decoding for Long-Context Attention on GPU Clusters (Shyam et al., 2024)",
        use="decoding over more keys than one GPU holds, or over about a million keys, where reduce=fused and "
        "packed beat one GPU",
        executor="tree",
        layout=DECODE,
        schedule=TREE,
        options=TreeOptions,
        decode=True,
    )
)
