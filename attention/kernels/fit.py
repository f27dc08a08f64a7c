"""The strides and alignment that kernels need, ensured in one place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, wraps
from typing import Any, TypeVar

import torch
from torch import Tensor

from attention.kernels.interface import Call, Pair, Triple, settle

K = TypeVar("K", bound=type)
R = TypeVar("R")


def fitted(kernel: K) -> K:
    """A class decorator of kernels: `forward`, `backward` and `splits` get q, k, v, dout, out and `into` such that
    `fits` holds with the class's `align`. Other inputs are copied first; results for another `into` are copied into it
    afterwards. Autocast is off inside: the dtype of the inputs decides."""
    align: int = kernel.align  # type: ignore[attr-defined]
    forward, backward, splits = kernel.forward, kernel.backward, getattr(kernel, "splits", None)  # type: ignore[attr-defined]

    def fitted_forward(self: Any, q: Tensor, k: Tensor, v: Tensor, call: Call, into: Pair | None = None) -> Pair:
        q, k, v = fit((q, k, v), align)
        if into is None or fits(into[0], align):
            return forward(self, q, k, v, call, into)
        return settle(forward(self, q, k, v, call, (_dense_like(into[0]), into[1])), into)

    def fitted_backward(
        self: Any,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        call: Call,
        into: Triple | None = None,
    ) -> Triple:
        dout, q, k, v, out = fit((dout, q, k, v, out), align)
        if into is None or all(fits(x, align) for x in into):
            return backward(self, dout, q, k, v, out, lse, call, into)
        dq, dk, dv = (x if fits(x, align) else _dense_like(x) for x in into)
        return settle(backward(self, dout, q, k, v, out, lse, call, (dq, dk, dv)), into)

    kernel.forward = _without_autocast(wraps(forward)(fitted_forward))  # type: ignore[attr-defined]
    kernel.backward = _without_autocast(wraps(backward)(fitted_backward))  # type: ignore[attr-defined]
    if splits is not None:

        @wraps(splits)
        def fitted_splits(self: Any, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Pair:
            return splits(self, *fit((q, k, v), align), call)

        kernel.splits = _without_autocast(fitted_splits)  # type: ignore[attr-defined]
    return kernel


def fit(xs: Sequence[Tensor], align: int = 1) -> Sequence[Tensor]:
    """The tensors, with copies of those that do not fit; differentiable."""
    for x in xs:
        if not ((x.is_contiguous() and x.data_ptr() % align == 0) or fits(x, align)):  # the first holds for most
            return [x if fits(x, align) else _dense_like(x).copy_(x) for x in xs]
    return xs


def fits(x: Tensor, align: int) -> bool:
    """Whether the last dim is contiguous, rows do not overlap (as those of `expand` do), and the first element and, in
    a strided tensor, every row lie on multiples of `align` bytes."""
    if align > 1 and x.data_ptr() % align:
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


def _dense_like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _without_autocast(run: Callable[..., R]) -> Callable[..., R]:
    @wraps(run)
    def inner(self: Any, x: Tensor, *rest: Any, **named: Any) -> R:
        device = x.device.type
        if not torch.is_autocast_enabled(device):
            return run(self, x, *rest, **named)
        with torch.autocast(device, enabled=False):
            return run(self, x, *rest, **named)

    return inner
