"""Combining partial attentions over disjoint keys (`lse = logaddexp(lse1, lse2)`,
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


def merge_n(
    parts: Tensor,
    lses: Tensor,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Merge n partial results over disjoint keys; a part without keys has lse -inf and out 0.

    parts: `[n, B, S, H, D]`; lses: `[n, B, H, S]`, fp32 (fp64 for fp64 parts), natural log.
    Gives (out `[B, S, H, D]`, lse `[B, H, S]` in the dtype of `lses`). `dtype` is that of a new out, by default the
    parts'; a given `out` or `lse` is written to instead, and may be `parts[0]` or `lses[0]`.

    Raises ValueError for shapes that do not belong together."""
    if parts.is_cuda and parts.dtype != torch.float64:
        from attention.kernels.triton_merge_n import merge_n_triton

        return merge_n_triton(parts, lses, dtype, out, lse)
    return merge_n_eager(parts, lses, dtype, out, lse)


def merge_n_eager(
    parts: Tensor,
    lses: Tensor,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """As `merge_n`, in plain PyTorch on any device."""
    out, lse = result_tensors(parts, lses, dtype, out, lse)
    total = torch.logsumexp(lses, 0)
    # where every part is empty the weights are exp(-inf - 0) = 0 instead of exp(-inf + inf) = NaN
    safe = total.masked_fill(total == -torch.inf, 0)
    weights = (lses - safe).exp().transpose(-1, -2).unsqueeze(-1)
    out.copy_((parts.to(wide(parts.dtype)) * weights).sum(0))
    lse.copy_(total)
    return out, lse


def result_tensors(
    parts: Tensor, lses: Tensor, dtype: torch.dtype | None, out: Tensor | None, lse: Tensor | None
) -> tuple[Tensor, Tensor]:
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
