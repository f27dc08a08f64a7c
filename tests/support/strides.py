"""Tensors that are not dense in memory: `STRIDES` by name."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def _strided_last_dim(x: Tensor) -> Tensor:
    return x.transpose(-1, -2).contiguous().transpose(-1, -2)


def _every_other_element(x: Tensor) -> Tensor:
    return torch.stack((x, torch.full_like(x, torch.nan)), -1).flatten(-2)[..., ::2]


def _heads_first(x: Tensor) -> Tensor:
    return x.transpose(-2, -3).contiguous().transpose(-2, -3)


def _within(x: Tensor) -> Tensor:
    """Heads and tokens in the middle of others', as of a fused projection or of a cache."""
    big = x.new_full((*x.shape[:-3], x.shape[-3] + 5, 3 * x.shape[-2], x.shape[-1]), torch.nan)
    return big[..., 2:-3, x.shape[-2] : 2 * x.shape[-2], :].copy_(x)


def _misaligned(x: Tensor) -> Tensor:
    """Dense, but for beginning one element behind a multiple of 16 bytes."""
    return x.new_empty(x.numel() + 1)[1:].view(x.shape).copy_(x)


def _odd_rows(x: Tensor) -> Tensor:
    """Of rows that are an element longer."""
    return x.new_empty((*x.shape[:-1], x.shape[-1] + 1))[..., :-1].copy_(x)


def _one_head(x: Tensor) -> Tensor:
    return x[..., :1, :].expand(x.shape)


def _one_token(x: Tensor) -> Tensor:
    return x[..., :1, :, :].expand(x.shape)


def _one_number(x: Tensor) -> Tensor:
    return x.new_full((), 0.5).expand(x.shape)


def _overlapping(x: Tensor) -> Tensor:
    """Each row begins three elements behind the last."""
    numbers = x.flatten()
    strides = [3]
    for n in reversed(x.shape[1:-1]):
        strides.insert(0, 3 * n if len(strides) == 1 else strides[0] * n)
    return numbers.as_strided(x.shape, (*strides, 1))


STRIDES: dict[str, Callable[[Tensor], Tensor]] = {
    f.__name__[1:]: f
    for f in (
        _strided_last_dim,
        _every_other_element,
        _heads_first,
        _within,
        _misaligned,
        _odd_rows,
        _one_head,
        _one_token,
        _one_number,
        _overlapping,
    )
}
WRITABLE = ("strided_last_dim", "every_other_element", "heads_first", "within", "misaligned", "odd_rows")
