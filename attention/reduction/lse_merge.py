"""Partial attention results over disjoint keys, merged by their LSE: `lse = logaddexp(lse1, lse2)`, `out = exp(lse1 -
lse) out1 + exp(lse2 - lse) out2`, computed in fp32 (fp64 for fp64). A part without keys has out 0 and lse -inf, and
never makes a NaN. On CUDA one Triton kernel reads each part once and writes the result once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attention.dtypes import accumulation_dtype
from attention.geometry.transfers import Intervals
from attention.ops.results import result_tensors
from attention.reduction.stepwise import Stepwise
from attention.tensors import empty_lse, empty_tokens, token_dim, tokens


def merge(out: Tensor, lse: Tensor, a: Tensor, lse_a: Tensor, b: Tensor, lse_b: Tensor) -> None:
    """Write the merge of the parts `(a, lse_a)` and `(b, lse_b)` to `(out, lse)`, which may be either of them.

    out, a, b: `[B, S, H, D]` or `[T, H, D]`, in any dtypes and any strides, but a contiguous last dim.
    lse, lse_a, lse_b: `[B, H, S]` or `[H, T]`, fp32 (fp64 for fp64)."""
    if out.is_cuda:
        from attention.ops.merge import merge_triton

        merge_triton(out, lse, a, lse_a, b, lse_b)
        return
    merge_eager(out, lse, a, lse_a, b, lse_b)


def merge_eager(out: Tensor, lse: Tensor, a: Tensor, lse_a: Tensor, b: Tensor, lse_b: Tensor) -> None:
    """`merge` in eager PyTorch, on any device."""
    total = torch.logaddexp(lse_a, lse_b)
    # where both are empty the weights are exp(-inf - 0) = 0 instead of exp(-inf + inf) = NaN
    safe = total.masked_fill(total == -torch.inf, 0)
    share_a, share_b = ((x - safe).exp().transpose(-1, -2).unsqueeze(-1) for x in (lse_a, lse_b))
    out.copy_(a * share_a + b * share_b)
    lse.copy_(total)


class Accumulator(Stepwise):
    """The merge of parts (out like q, lse) that arrive one by one. parts: the query intervals of each."""

    def __init__(self, q: Tensor, parts: Sequence[Intervals]):
        super().__init__([q], parts, (token_dim(q), -1))

    def new(self) -> Sequence[Tensor]:
        (q,) = self.like
        return empty_tokens(q, tokens(q)), empty_lse(q)

    def clear(self, *outs: Tensor) -> None:
        out, lse = outs
        out.zero_()
        lse.fill_(-torch.inf)

    def combine(self, into: Sequence[Tensor], a: Sequence[Tensor], b: Sequence[Tensor]) -> None:
        merge(*into, *a, *b)

    def result(self) -> tuple[Tensor, Tensor]:
        """(out in the queries' dtype, lse)."""
        out, lse = super().result()
        return out, lse


def empty_result(q: Tensor) -> tuple[Tensor, Tensor]:
    """(out, lse) of attention over no keys: 0 in the accumulation dtype, and -inf."""
    return torch.zeros(q.shape, dtype=accumulation_dtype(q.dtype), device=q.device), empty_lse(q).fill_(-torch.inf)


def merge_n(
    parts: Tensor,
    lses: Tensor,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Merge n partial results over disjoint keys; a part without keys has lse -inf and out 0.

    parts: `[n, B, S, H, D]`; lses: `[n, B, H, S]`, fp32 (fp64 for fp64 parts), natural log.
    Returns (out `[B, S, H, D]`, lse `[B, H, S]` in the dtype of `lses`). `dtype` is the dtype of a new out, by default
    that of the parts. A given `out` or `lse` is written to instead, and may be `parts[0]` or `lses[0]`.

    Raises ValueError for shapes that do not belong together."""
    if parts.is_cuda and parts.dtype != torch.float64:
        from attention.ops.merge_n import merge_n_triton

        return merge_n_triton(parts, lses, dtype, out, lse)
    return merge_n_eager(parts, lses, dtype, out, lse)


def merge_n_eager(
    parts: Tensor,
    lses: Tensor,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`merge_n` in eager PyTorch, on any device."""
    out, lse = result_tensors(parts, lses, dtype, out, lse)
    total = torch.logsumexp(lses, 0)
    # where every part is empty the weights are exp(-inf - 0) = 0 instead of exp(-inf + inf) = NaN
    safe = total.masked_fill(total == -torch.inf, 0)
    weights = (lses - safe).exp().transpose(-1, -2).unsqueeze(-1)
    out.copy_((parts.to(accumulation_dtype(parts.dtype)) * weights).sum(0))
    lse.copy_(total)
    return out, lse
