"""Partial attention results over disjoint keys, merged by their LSE: `lse = logaddexp(lse1, lse2)`, `out = exp(lse1 -
lse) out1 + exp(lse2 - lse) out2`, computed in fp32 (fp64 for fp64). A part without keys has out 0 and lse -inf, and
never makes a NaN. On CUDA one Triton kernel reads each part once and writes the result once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attention.dtypes import accumulation_dtype
from attention.reduction.stepwise import Cover, Stepwise
from attention.tensors import TOKENS, empty_lse, empty_tokens, tokens, touch


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


class Accumulator(Stepwise):
    """The merge of parts (out, lse) that arrive one by one. like: a tensor with the shape and dtype of the whole out. parts:
    the query intervals of each part, or their plan. into: the (out, lse) to write to, by default new ones."""

    def __init__(self, like: Tensor, parts: Cover, into: tuple[Tensor, Tensor] | None = None):
        super().__init__([like], parts, (TOKENS, -1), into)

    def new(self) -> Sequence[Tensor]:
        (like,) = self.like
        return empty_tokens(like, tokens(like)), empty_lse(like)

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


def empty_result(like: Tensor) -> tuple[Tensor, Tensor]:
    """(out of the shape of `like`, lse) of attention over no keys: 0 in the accumulation dtype, and -inf."""
    out = torch.zeros(like.shape, dtype=accumulation_dtype(like.dtype), device=like.device)
    return out, empty_lse(like).fill_(-torch.inf)


def merge_n(
    parts: Tensor, lses: Tensor, dtype: torch.dtype | None = None, out: Tensor | None = None, lse: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Merges n partial results over disjoint keys. A part without keys has lse -inf and out 0.

    parts: `[n, B, S, H, D]`; lses: `[n, B, H, S]`, fp32 (fp64 for fp64 parts), natural log.
    Returns (out `[B, S, H, D]`, lse `[B, H, S]` in the dtype of `lses`). dtype: of a new out, by default that of the
    parts. A given `out` or `lse` is written to instead, and may be `parts[0]` or `lses[0]`.
    Raises ValueError for shapes that do not match."""
    out, lse = result_tensors(parts, lses, dtype, out, lse)
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


def result_tensors(
    parts: Tensor, lses: Tensor, dtype: torch.dtype | None = None, out: Tensor | None = None, lse: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The tensors that `merge_n` writes to: the given ones, or new ones. Raises ValueError as it does."""
    if parts.dim() != 5:
        raise ValueError(f"parts {list(parts.shape)}: must be [n, B, S, H, D]; unsqueeze what is missing")
    n, batch, n_tokens, heads, head_dim = parts.shape
    if lses.shape != (n, batch, heads, n_tokens):
        raise ValueError(
            f"lses {list(lses.shape)}: must be [n, B, H, S] = {[n, batch, heads, n_tokens]} as parts {list(parts.shape)}"
        )
    if out is None:
        out = torch.empty((batch, n_tokens, heads, head_dim), dtype=dtype or parts.dtype, device=parts.device)
    elif dtype not in (None, out.dtype):
        raise ValueError(f"dtype={dtype}: the given out is {out.dtype}; leave dtype out, or let out be made")
    if lse is None:
        lse = torch.empty((batch, heads, n_tokens), dtype=lses.dtype, device=lses.device)
    if out.shape != parts.shape[1:] or lse.shape != lses.shape[1:]:
        raise ValueError(
            f"out {list(out.shape)}, lse {list(lse.shape)}: must be {list(parts.shape[1:])}, {list(lses.shape[1:])}"
        )
    return out, lse
