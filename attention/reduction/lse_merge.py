"""Partial attention results over disjoint keys, merged by their LSE: `lse = logaddexp(lse1, lse2)`, `out = exp(lse1 -
lse) out1 + exp(lse2 - lse) out2`, computed in fp32 (fp64 for fp64). A part without keys has out 0 and lse -inf, and
never makes a NaN. On CUDA one Triton kernel reads each part once and writes the result once."""

from __future__ import annotations

import torch
from torch import Tensor

from attention.dtypes import accumulation_dtype
from attention.tensors import empty_lse, touch


def merge(out: Tensor, lse: Tensor, a: Tensor, lse_a: Tensor, b: Tensor, lse_b: Tensor) -> None:
    """Write the merge of the parts `(a, lse_a)` and `(b, lse_b)` to `(out, lse)`, which may be either of them.

    out, a, b: `[B, S, H, D]` or `[T, H, D]`, in any dtypes and with any strides, except that the last dim is contiguous.
    lse, lse_a, lse_b: `[B, H, S]` or `[H, T]`, fp32 (fp64 for fp64)."""
    if out.is_cuda:
        from attention.ops.merge import merge_triton

        merge_triton(out, lse, a, lse_a, b, lse_b)
    elif out.is_meta:
        touch(out, a, b)
    else:
        merge_eager(out, lse, a, lse_a, b, lse_b)


def merge_eager(out: Tensor, lse: Tensor, a: Tensor, lse_a: Tensor, b: Tensor, lse_b: Tensor) -> None:
    """`merge` in eager PyTorch, on any device."""
    total = torch.logaddexp(lse_a, lse_b)
    # if both are empty, the weights are exp(-inf - 0) = 0 instead of exp(-inf + inf) = NaN
    safe = total.masked_fill(total == -torch.inf, 0)
    share_a, share_b = ((x - safe).exp().transpose(-1, -2).unsqueeze(-1) for x in (lse_a, lse_b))
    out.copy_(a * share_a + b * share_b)
    lse.copy_(total)


def empty_result(like: Tensor) -> tuple[Tensor, Tensor]:
    """(out of the shape of `like`, lse) of attention over no keys: 0 in the accumulation dtype, and -inf."""
    out = torch.zeros(like.shape, dtype=accumulation_dtype(like.dtype), device=like.device)
    return out, empty_lse(like).fill_(-torch.inf)


def merge_n(parts: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Merges n partial results over disjoint keys. A part without keys has lse -inf and out 0.

    parts: `[n, B, S, H, D]`; lses: `[n, B, H, S]`, fp32 (fp64 for fp64 parts), natural log.
    Returns (out `[B, S, H, D]` in the dtype of `parts`, lse `[B, H, S]` in the dtype of `lses`)."""
    out, lse = parts.new_empty(parts.shape[1:]), lses.new_empty(lses.shape[1:])
    if parts.is_cuda and parts.dtype != torch.float64:
        from attention.ops.merge import merge_n_triton

        merge_n_triton(parts, lses, out, lse)
    elif out.is_meta:
        touch(out, parts)
    else:
        merge_n_eager(parts, lses, out, lse)
    return out, lse


def merge_n_eager(parts: Tensor, lses: Tensor, out: Tensor, lse: Tensor) -> None:
    """Writes `merge_n` to `(out, lse)` in eager PyTorch, on any device."""
    total = torch.logsumexp(lses, 0)
    # if every part is empty, the weights are exp(-inf - 0) = 0 instead of exp(-inf + inf) = NaN
    safe = total.masked_fill(total == -torch.inf, 0)
    weights = (lses - safe).exp().transpose(-1, -2).unsqueeze(-1)
    out.copy_((parts.to(accumulation_dtype(parts.dtype)) * weights).sum(0))
    lse.copy_(total)
