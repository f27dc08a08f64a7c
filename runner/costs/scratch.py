"""Scratch memory that kernels take in a backward beside its results, by their sources: FlashAttention accumulates dq in fp32; for GQA
version 2 writes dk and dv for every query head, and version 4 accumulates them in fp32, like 3. Only version 2's was compared with what an H200 allocates. Pure Python."""

from __future__ import annotations

from attention.geometry.counts import Shapes

VERSION_2, VERSION_4 = ("sdpa_flash", "flash2"), ("flash3", "flash4")


def backward_scratch(kernel: str, shapes: Shapes, queries: int, keys: int) -> int:
    """Bytes of one backward call on so many queries and keys of each batch element on a GPU; 0 for a kernel of which nothing is
    known."""
    if kernel not in (*VERSION_2, *VERSION_4):
        return 0
    rows = shapes.batch * shapes.heads * queries
    found = rows * 4 * (shapes.head_dim + (1 if kernel in VERSION_2 else 2))  # dq, and fp32 numbers for each row
    if shapes.heads == shapes.kv_heads:
        return found
    per_token = shapes.batch * keys * (shapes.head_dim + shapes.v_head_dim)
    each = shapes.heads * shapes.itemsize if kernel in VERSION_2 else shapes.kv_heads * 4
    return found + per_token * each
