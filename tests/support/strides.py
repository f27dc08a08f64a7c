"""Tensors that are not dense in memory: `STRIDES` by name."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def _within(x: Tensor) -> Tensor:
    """Heads and tokens in the middle of others', as of a fused projection or of a cache."""
    big = x.new_full((*x.shape[:-3], x.shape[-3] + 5, 3 * x.shape[-2], x.shape[-1]), torch.nan)
    return big[..., 2:-3, x.shape[-2] : 2 * x.shape[-2], :].copy_(x)


def _overlapping(x: Tensor) -> Tensor:
    """Each row begins three elements behind the last."""
    strides = [3]
    for n in reversed(x.shape[1:-1]):
        strides.insert(0, 3 * n if len(strides) == 1 else strides[0] * n)
    return x.flatten().as_strided(x.shape, (*strides, 1))


STRIDES: dict[str, Callable[[Tensor], Tensor]] = {
    "strided_last_dim": lambda x: x.transpose(-1, -2).contiguous().transpose(-1, -2),
    "every_other_element": lambda x: torch.stack((x, torch.full_like(x, torch.nan)), -1).flatten(-2)[..., ::2],
    "heads_first": lambda x: x.transpose(-2, -3).contiguous().transpose(-2, -3),
    "within": _within,
    # dense, but for beginning one element behind a multiple of 16 bytes
    "misaligned": lambda x: x.new_empty(x.numel() + 1)[1:].view(x.shape).copy_(x),
    "odd_rows": lambda x: x.new_empty((*x.shape[:-1], x.shape[-1] + 1))[..., :-1].copy_(x),  # an element longer
    "one_head": lambda x: x[..., :1, :].expand(x.shape),
    "one_token": lambda x: x[..., :1, :, :].expand(x.shape),
    "one_number": lambda x: x.new_full((), 0.5).expand(x.shape),
    "overlapping": _overlapping,
}
WRITABLE = ("strided_last_dim", "every_other_element", "heads_first", "within", "misaligned", "odd_rows")
