"""Combining partial attentions over disjoint keys (ALGORITHMS: `lse = logaddexp(lse1, lse2)`,
`o = exp(lse1-lse) o1 + exp(lse2-lse) o2`), accumulated in fp32 (fp64 for fp64). A part without keys has `o = 0`,
`lse = -inf` and never makes a NaN. On CUDA one in-place Triton kernel does it."""

from __future__ import annotations

import torch
from torch import Tensor

from attention.tensors import tokens, wide


def merge_(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merge `(part, part_lse)` into `(out, lse)` in place.

    out: `[B, S, H, D]` or `[T, H, D]`, wide dtype; part: the same shape, any dtype.
    lse, part_lse: fp32 `[B, H, S]` or `[H, T]`."""
    if out.is_cuda:
        from attention.kernels.triton_merge import merge_cuda_

        merge_cuda_(out, lse, part, part_lse)
        return
    merge_eager_(out, lse, part, part_lse)


def merge_eager_(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    total = torch.logaddexp(lse, part_lse)
    # where both are empty the weights are exp(-inf - 0) = 0 instead of exp(-inf + inf) = NaN
    safe = torch.where(total == -torch.inf, torch.zeros_like(total), total)
    keep = (lse - safe).exp().transpose(-1, -2).unsqueeze(-1)
    add = (part_lse - safe).exp().transpose(-1, -2).unsqueeze(-1)
    out.mul_(keep).add_(part.to(out.dtype) * add)
    lse.copy_(total)


class Accumulator:
    """The running merge over one rank's queries, which takes over the parts it is given. A first part that covers all
    queries is kept as it is; only a second one makes it wide, so a single call costs nothing."""

    def __init__(self, q: Tensor, dtype: torch.dtype | None = None):
        self.q = q
        self.dtype = dtype or q.dtype
        self.out: Tensor | None = None
        self.lse: Tensor | None = None

    def add(self, start: int, stop: int, out: Tensor, lse: Tensor) -> None:
        """Merge a part over the queries `[start, stop)`."""
        if self.out is None and stop - start == tokens(self.q):
            self.out, self.lse = out, lse
            return
        if self.out is None or self.lse is None:
            self.out, self.lse = empty_result(self.q)
        elif self.out.dtype != wide(self.q.dtype):
            self.out = self.out.to(wide(self.q.dtype))
        dim = self.out.dim() - 3
        merge_(
            self.out.narrow(dim, start, stop - start),
            self.lse.narrow(-1, start, stop - start),
            out,
            lse,
        )

    def result(self) -> tuple[Tensor, Tensor]:
        """(out in the queries' dtype, lse)."""
        if self.out is None or self.lse is None:
            self.out, self.lse = empty_result(self.q)
        return self.out.to(self.dtype), self.lse


def empty_result(q: Tensor) -> tuple[Tensor, Tensor]:
    """What attention over no keys is: out 0 in the wide dtype, lse -inf."""
    out = torch.zeros(q.shape, dtype=wide(q.dtype), device=q.device)
    shape = (*q.shape[:-3], q.shape[-2], q.shape[-3])
    return out, torch.full(shape, -torch.inf, dtype=wide(q.dtype), device=q.device)


def merge_n(parts: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """The merge of n partial results over disjoint keys, at once.

    parts: `[n, B, S, H, D]`; lses: fp32 (fp64 for fp64) `[n, B, H, S]`. Returns out `[B, S, H, D]` in the parts' dtype and
    lse `[B, H, S]`. A part without keys has lse -inf."""
    if parts.is_cuda and parts.dtype != torch.float64:
        from attention.kernels.triton_merge_n import merge_n_triton

        return merge_n_triton(parts, lses)
    return merge_n_eager(parts, lses)


def merge_n_eager(parts: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    total = torch.logsumexp(lses, 0)
    safe = total.masked_fill(total == -torch.inf, 0)
    weights = (lses - safe).exp().transpose(-1, -2).unsqueeze(-1)
    return (parts.to(wide(parts.dtype)) * weights).sum(0).to(parts.dtype), total
