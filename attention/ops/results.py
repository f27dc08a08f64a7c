"""The result tensors of an n-way merge, for the Triton kernel and for eager PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor


def result_tensors(
    parts: Tensor, lses: Tensor, dtype: torch.dtype | None, out: Tensor | None, lse: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The out and lse that a merge of `parts` `[n, B, S, H, D]` and `lses` `[n, B, H, S]` writes: the given ones, or
    new ones.

    Raises ValueError for shapes that do not belong together."""
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
