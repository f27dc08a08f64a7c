"""Views, copies and new tensors by tokens, and the strides and alignment that kernels need. The token dimension is 1 of `[B, S, H, D]` and 0 of `[T, H, D]`; an LSE
`[B, H, S]` or `[H, T]` has it last."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from attention.dtypes import accumulation_dtype
from attention.geometry.intervals import side_by_side
from attention.gpu.uploads import held, uploaded
from attention.masks.band import Interval

TOKENS = -3  # the token dimension
FEW = 8  # intervals up to which a copy of each is cheaper than one copy by token indices


def tokens(x: Tensor) -> int:
    return x.shape[-3]


def empty_tokens(x: Tensor, n: int) -> Tensor:
    """An uninitialised tensor for n tokens like those of x."""
    return x.new_empty((*x.shape[:-3], n, *x.shape[-2:]))


def empty_pair(pair: tuple[Tensor, Tensor], n: int) -> tuple[Tensor, Tensor]:
    """As `empty_tokens` for each of keys and values. If their shapes are equal they are one allocation, so that one copy can
    fill both."""
    x, y = pair
    if x.shape[-1] != y.shape[-1]:
        return empty_tokens(x, n), empty_tokens(y, n)
    first, second = x.new_empty((2, *x.shape[:-3], n, *x.shape[-2:])).unbind()
    return first, second


def result_like(q: Tensor, v: Tensor) -> Tensor:
    """A tensor of the shape and dtype of the out of queries q over values v, for templates: without memory where the head
    dims differ."""
    return q if q.shape[-1] == v.shape[-1] else q[..., :1].expand(*q.shape[:-1], v.shape[-1])


def empty_lse(q: Tensor) -> Tensor:
    """An uninitialised LSE in the accumulation dtype: `[B, H, S]` for q `[B, S, H, D]`, `[H, T]` for `[T, H, D]`."""
    return q.new_empty((*q.shape[:-3], q.shape[-2], q.shape[-3]), dtype=accumulation_dtype(q.dtype))


def tokens_contiguous(shape: Sequence[int], *strides: Sequence[int]) -> bool:
    """Whether a token's heads are contiguous in tensors `[..., S, H, D]` of each of these strides."""
    if len(shape) not in (3, 4):
        return False
    heads, head_dim = shape[-2:]
    return all(x[-1] == 1 and (heads == 1 or x[-2] == head_dim) for x in strides)


def token_indices(intervals: tuple[Interval, ...], device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """`[n]`: the indices of all tokens of the intervals, in order. Cached, since layers repeat the same call."""
    return held(_token_indices(intervals, device, dtype), device)


@lru_cache(maxsize=128)
def _token_indices(intervals: tuple[Interval, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    return uploaded(tokens_of(intervals, np.int32 if dtype == torch.int32 else np.int64), device)


def tokens_of(intervals: tuple[Interval, ...], dtype: type[np.signedinteger[Any]] = np.int64) -> np.ndarray[Any, Any]:
    """`[n]` on the CPU: the indices of all tokens of the intervals, in order. By NumPy, which uses one thread: where
    ranks share a machine, PyTorch's threads take milliseconds to wake."""
    starts, stops = np.array(intervals, dtype).reshape(-1, 2).T
    lengths = stops - starts
    before = lengths.cumsum(dtype=dtype) - lengths
    return np.repeat(starts - before, lengths) + np.arange(lengths.sum(), dtype=dtype)


def touch(*xs: Tensor) -> None:
    """Stands for a kernel of ours without scratch memory that reads or writes these tensors without data (meta)."""
    torch._foreach_zero_(xs)


def _by_kernel(*xs: Tensor) -> bool:
    """Whether our Triton kernel can copy these tensors' tokens by index."""
    return xs[0].is_cuda and all(x.is_floating_point() and tokens_contiguous(x.shape, x.stride()) for x in xs)


def _copy_by_index(into: Tensor, x: Tensor, to: tuple[Interval, ...], of: tuple[Interval, ...]) -> None:
    """Copy the tokens `of` x to the tokens `to` of `into`, both in order."""
    from attention.ops.rows import sum_rows

    here, there = (token_indices(intervals, x.device, torch.int32) for intervals in (of, to))
    sum_rows([into], there, [[x]], here[None])


def take(x: Tensor, intervals: tuple[Interval, ...], dim: int = TOKENS) -> Tensor:
    """The tokens of `intervals`: x itself if they are all of it, a view if there is one interval, else a copy."""
    if len(intervals) == 1:
        ((start, stop),) = intervals
        n = stop - start
        return x if n == x.shape[dim] else x.narrow(dim, start, n)
    if len(intervals) > FEW:
        if dim == TOKENS and _by_kernel(x):
            n = token_indices(intervals, x.device, torch.int32).numel()
            taken = empty_tokens(x, n)
            _copy_by_index(taken, x, ((0, n),), intervals)
            return taken
        return x.index_select(dim, token_indices(intervals, x.device))
    return torch.cat([x.narrow(dim, start, stop - start) for start, stop in intervals], dim)


def cut(x: Tensor, heads: slice) -> Tensor:
    """These heads of `[..., heads, D]`, or of an LSE: a view, or x itself if they are all."""
    n = heads.stop - heads.start
    return x if n == x.size(-2) else x.narrow(-2, heads.start, n)


def put_(x: Tensor, intervals: tuple[Interval, ...], values: Tensor, dim: int = TOKENS) -> None:
    """Write `values` to the tokens of `intervals`, in order."""
    if len(intervals) > FEW:
        if dim == TOKENS and _by_kernel(x, values):
            _copy_by_index(x, values, intervals, ((0, tokens(values)),))
            return
        x.index_copy_(dim, token_indices(intervals, x.device), values.to(x.dtype))
        return
    for target, source in _pieces(x, intervals, values, dim):
        target.copy_(source)


def add_(x: Tensor, intervals: tuple[Interval, ...], values: Tensor) -> None:
    """Add `values` to the tokens of `intervals`, in order."""
    if len(intervals) > FEW:
        x.index_add_(TOKENS, token_indices(intervals, x.device), values.to(x.dtype))
        return
    for target, source in _pieces(x, intervals, values, TOKENS):
        target.add_(source)


def _pieces(x: Tensor, intervals: tuple[Interval, ...], values: Tensor, dim: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Each interval of x, and the values for it."""
    for place, here in zip(intervals, side_by_side(intervals), strict=True):
        yield take(x, (place,), dim), take(values, (here,), dim)


_read = WeakTensorKeyDictionary()  # by tensor: its state when it was read, and its numbers


def on_host(x: Tensor) -> tuple[int, ...]:
    """The numbers `[n]` of an integer tensor. A GPU tensor is read once, which synchronises, and again only after it
    was written. A write that its `_version` does not count, such as a CUDA graph replay, goes unnoticed. An inference
    tensor has no version and is read each time."""
    if x.device.type == "cpu":
        return tuple(x.tolist())  # does not synchronise, and sees what NumPy wrote
    return read_once(x)


def read_once(x: Tensor) -> tuple[int, ...]:
    """As `on_host` for a GPU tensor, on any device."""
    if x.is_inference():
        return tuple(x.tolist())
    state = (x._version, x.data_ptr(), x.shape)
    if x not in _read or _read[x][0] != state:
        _read[x] = state, tuple(x.tolist())
    return _read[x][1]


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
