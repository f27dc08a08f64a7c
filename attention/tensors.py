"""The few views that all of the library shares. The token dimension is 1 of `[B, S, H, D]` and 0 of `[T, H, D]`; an LSE
`[B, H, S]` or `[H, T]` has it last."""

from __future__ import annotations

import torch
from torch import Tensor

from attention.masks import Interval


def token_dim(x: Tensor) -> int:
    return x.dim() - 3


def tokens(x: Tensor) -> int:
    return x.shape[-3]


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype that sums are kept in: fp32, or fp64 for fp64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def room(x: Tensor, n: int, dtype: torch.dtype | None = None) -> Tensor:
    """An uninitialised tensor for n tokens like those of x, by default in its dtype."""
    shape = list(x.shape)
    shape[token_dim(x)] = n
    return x.new_empty(shape, dtype=dtype)


def take(x: Tensor, intervals: tuple[Interval, ...], dim: int | None = None) -> Tensor:
    """The tokens of `intervals`: a view when they are one stretch, else a copy."""
    dim = token_dim(x) if dim is None else dim
    parts = [x.narrow(dim, start, stop - start) for start, stop in intervals]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def put_(x: Tensor, intervals: tuple[Interval, ...], values: Tensor, dim: int | None = None) -> None:
    """Write `values` to the tokens of `intervals`, in order."""
    dim = token_dim(x) if dim is None else dim
    at = 0
    for start, stop in intervals:
        x.narrow(dim, start, stop - start).copy_(values.narrow(dim, at, stop - start))
        at += stop - start


def add_(x: Tensor, intervals: tuple[Interval, ...], values: Tensor) -> None:
    """Add `values` to the tokens of `intervals`, in order."""
    dim = token_dim(x)
    at = 0
    for start, stop in intervals:
        x.narrow(dim, start, stop - start).add_(values.narrow(dim, at, stop - start))
        at += stop - start
