"""The few views that all of the library shares. The token dimension is 1 of `[B, S, H, D]` and 0 of `[T, H, D]`; an LSE
`[B, H, S]` or `[H, T]` has it last."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from attention.masks.band import Interval
from attention.runtime import launch_trace
from attention.runtime.streams import On, capturing, current

_read = WeakTensorKeyDictionary()  # by tensor, when it was read and what stood there


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


def rooms(x: Tensor, n: int, count: int = 2) -> list[Tensor]:
    """Several as of `room`, in one piece of memory: what is copied to all of them is one copy."""
    shape = list(x.shape)
    shape[token_dim(x)] = n
    return list(x.new_empty((count, *shape)).unbind())  # iterating over the tensor would be the same by way of Python


def lse_room(q: Tensor) -> Tensor:
    """An uninitialised LSE in the wide dtype, `[B, H, S]` of q `[B, S, H, D]`, or `[H, T]` of `[T, H, D]`."""
    return q.new_empty((*q.shape[:-3], q.shape[-2], q.shape[-3]), dtype=wide(q.dtype))


FEW = 8  # stretches that are cheaper to copy one by one


def rows(shape: Sequence[int], *strides: Sequence[int]) -> bool:
    """Whether tensors `[..., S, H, D]` are rows, a token's heads lying together, in each of these strides."""
    if len(shape) not in (3, 4):
        return False
    heads, head_dim = shape[-2:]
    return all(x[-1] == 1 and (heads == 1 or x[-2] == head_dim) for x in strides)


def index(intervals: tuple[Interval, ...], device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """`[n]`: the places of all tokens of the intervals; kept, as a repeated call wants them again."""
    return held(_index(intervals, device, dtype), device)


@lru_cache(maxsize=128)
def _index(intervals: tuple[Interval, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    with launch_trace.unseen():
        return uploaded(tokens_of(intervals, np.int32 if dtype == torch.int32 else np.int64), device)


def tokens_of(intervals: tuple[Interval, ...], dtype: type[np.signedinteger[Any]] = np.int64) -> np.ndarray[Any, Any]:
    """`[n]` on the host: the tokens of the intervals, in order. By NumPy, which is one thread: where ranks share a machine, PyTorch's
    threads take milliseconds to wake."""
    starts, stops = np.array(intervals, dtype).reshape(-1, 2).T
    lengths = stops - starts
    before = lengths.cumsum(dtype=dtype) - lengths
    return np.repeat(starts - before, lengths) + np.arange(lengths.sum(), dtype=dtype)


_uploads: dict[int, torch.cuda.Stream] = {}  # by device


def uploaded(x: np.ndarray[Any, Any], device: torch.device) -> Tensor:
    """x on the device, where any stream may read it when this returns. That waits for nothing that streams were given before, unlike
    `Tensor.to(device)`, for which the current stream's work has to end. Before the result is let go of, the stream that is current
    now has to follow what else read it."""
    here = torch.from_numpy(x)
    if device.type != "cuda":
        return here.to(device)
    if device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    if capturing(device):
        return here.to(device)
    if device.index not in _uploads:
        _uploads[device.index] = torch.cuda.Stream(device)
    reader, stream = current(device), _uploads[device.index]
    with On(stream):
        pinned = torch.empty(x.shape, dtype=here.dtype, pin_memory=True)
        pinned.numpy()[...] = x
        found = pinned.to(device, non_blocking=True)
        stream.synchronize()
        found.record_stream(reader)
    return found


T = TypeVar("T")
_captured: dict[int, object] = {}  # what callers' own graphs know


class _Holders(threading.local):
    """Of a thread, where what is held goes, the innermost last."""

    def __init__(self) -> None:
        self.stack: list[dict[int, object]] = [_captured]


_holders = _Holders()


def held(x: T, device: torch.device) -> T:
    """x, whose memory lives on where a CUDA graph is being captured: its replays know where it is."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        _holders.stack[-1][id(x)] = x
    return x


@contextmanager
def holding(into: dict[int, object]) -> Iterator[None]:
    """What is `held` within lives as long as `into`."""
    _holders.stack.append(into)
    try:
        yield
    finally:
        _holders.stack.pop()


def _by_kernel(*given: Tensor) -> bool:
    """Whether our kernel does these tensors' tokens by number."""
    return given[0].is_cuda and all(x.is_floating_point() and rows(x.shape, x.stride()) for x in given)


def _numbered(into: Tensor, x: Tensor, to: tuple[Interval, ...], of: tuple[Interval, ...]) -> None:
    """Tokens `of` x to tokens `to` of `into`, both in order."""
    from attention.kernels.ops.rows import sum_rows

    here, there = (index(each, x.device, torch.int32) for each in (of, to))
    if here.numel() != there.numel():
        raise ValueError(f"{here.numel()} tokens for {there.numel()} places: give as many")
    sum_rows(into, there, [(x, here)])


def take(x: Tensor, intervals: tuple[Interval, ...], dim: int | None = None) -> Tensor:
    """The tokens of `intervals`: x itself when they are all of it, a view when they are one stretch, else a copy."""
    dim = x.dim() - 3 if dim is None else dim
    if len(intervals) == 1:
        start, stop = intervals[0]
        return x if stop - start == x.size(dim) else x.narrow(dim, start, stop - start)
    if len(intervals) > FEW:
        if dim == x.dim() - 3 and _by_kernel(x):
            n = index(intervals, x.device, torch.int32).numel()
            found = room(x, n)
            _numbered(found, x, ((0, n),), intervals)
            return found
        return x.index_select(dim, index(intervals, x.device))
    return torch.cat([x.narrow(dim, start, stop - start) for start, stop in intervals], dim)


def put_(x: Tensor, intervals: tuple[Interval, ...], values: Tensor, dim: int | None = None) -> None:
    """Write `values` to the tokens of `intervals`, in order."""
    dim = token_dim(x) if dim is None else dim
    if len(intervals) > FEW:
        if dim == x.dim() - 3 and _by_kernel(x, values):
            _numbered(x, values, intervals, ((0, tokens(values)),))
            return
        x.index_copy_(dim, index(intervals, x.device), values.to(x.dtype))
        return
    at = 0
    for start, stop in intervals:
        x.narrow(dim, start, stop - start).copy_(values.narrow(dim, at, stop - start))
        at += stop - start


def add_(x: Tensor, intervals: tuple[Interval, ...], values: Tensor) -> None:
    """Add `values` to the tokens of `intervals`, in order."""
    dim = token_dim(x)
    if len(intervals) > FEW:
        x.index_add_(dim, index(intervals, x.device), values.to(x.dtype))
        return
    at = 0
    for start, stop in intervals:
        x.narrow(dim, start, stop - start).add_(values.narrow(dim, at, stop - start))
        at += stop - start


def on_host(x: Tensor) -> tuple[int, ...]:
    """The numbers `[n]` of an integer tensor. A device's tensor is read once, which waits for the device, and again only when
    it was written. A write that its `_version` does not count, as a CUDA graph's replay, is not noticed; an inference tensor
    has no version and is read each time."""
    if x.device.type == "cpu":
        return tuple(x.tolist())  # waits for nothing, and sees what NumPy wrote
    return kept(x)


def kept(x: Tensor) -> tuple[int, ...]:
    if x.is_inference():
        return tuple(x.tolist())
    state = (x._version, x.data_ptr(), x.shape)
    found = _read.get(x)
    if found is None or found[0] != state:
        found = _read[x] = (state, tuple(x.tolist()))
    return found[1]
