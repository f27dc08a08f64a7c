"""Scratch memory that kernels take in a backward beside its results, by their sources: FlashAttention accumulates dq in fp32; for GQA
version 2 writes dk and dv for every query head, and version 4 accumulates them in fp32, like 3. Only version 2's was compared with
what an H200 allocates. By name, since a package need not be installed to know it."""

from __future__ import annotations

from torch import Tensor

VERSION_2, VERSION_4 = ("sdpa_flash", "flash2"), ("flash3", "flash4")


def backward_scratch(kernel: str, q: Tensor, k: Tensor, v: Tensor) -> int:
    """Bytes of one backward call on a GPU, of tensors as in `Call`; 0 for a kernel of which nothing is known."""
    second = kernel in VERSION_2
    if not second and kernel not in VERSION_4:
        return 0
    heads, kv_heads = q.shape[-2], k.shape[-2]
    of_queries = q.shape[:-1].numel() * 4 * (q.shape[-1] + (1 if second else 2))  # dq, and fp32 numbers for each row
    of_keys = (k.numel() + v.numel()) * (q.itemsize * heads // kv_heads if second else 4)
    return of_queries + (of_keys if heads != kv_heads else 0)
