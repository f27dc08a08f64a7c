"""The strides and alignment that kernels need, ensured in one place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from torch import Tensor


def dense_like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def fit(
    xs: Sequence[Tensor], align: int = 1, made: Callable[[Tensor], Tensor] = lambda x: dense_like(x).copy_(x)
) -> Sequence[Tensor]:
    """The tensors, with others made of those that do not fit: copies, differentiable. An LSE, which has fewer dims than the
    first tensor, fits as it is."""
    for x in xs:
        if not ((x.is_contiguous() and x.data_ptr() % align == 0) or fits(x, align)):  # the first holds for most
            dims = xs[0].dim()
            return [x if x.dim() < dims or fits(x, align) else made(x) for x in xs]
    return xs


def fits(x: Tensor, align: int) -> bool:
    """Whether the last dim is contiguous, rows do not overlap (as those of `expand` do), and the first element and, in
    a strided tensor, every row lie on multiples of `align` bytes."""
    if x.data_ptr() % align:
        return False
    return x.is_contiguous() or _rows_fit(x.shape, x.stride(), x.element_size(), align)


@lru_cache(maxsize=4096)
def _rows_fit(shape: torch.Size, strides: tuple[int, ...], itemsize: int, align: int) -> bool:
    head_dim = shape[-1]
    if strides[-1] != 1 and head_dim > 1:
        return False
    return all(
        stride * itemsize % align == 0 and (n == 1 or stride >= head_dim)
        for n, stride in zip(shape[:-1], strides[:-1], strict=True)
    )
