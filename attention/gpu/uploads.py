"""Index tables on a device: their upload, and their lifetime where a CUDA graph reads them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from attention.gpu.streams import On, capturing, current

_upload_stream = cache(torch.cuda.Stream)  # by device


def uploaded(x: np.ndarray[Any, Any], device: torch.device) -> Tensor:
    """A copy of x on the device, which any stream may read when this returns.

    The upload has a stream of its own and waits only for itself. `Tensor.to(device)` would wait for all work on the
    current stream. Before the result is freed, the stream that is current now must wait for all other streams that read
    it."""
    here = torch.from_numpy(x)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    if device.type != "cuda" or capturing(device):
        return here.to(device)
    reader, stream = current(device), _upload_stream(device)
    with On(stream):
        pinned = torch.empty(x.shape, dtype=here.dtype, pin_memory=True)
        pinned.numpy()[...] = x
        there = pinned.to(device, non_blocking=True)
        stream.synchronize()
        there.record_stream(reader)
    return there


T = TypeVar("T")

_process: dict[int, object] = {}  # for graphs that are captured around no call of ours
# a thread's objects that CUDA graphs read, by id: those of the graph that is captured, or of all that the caller captures
_holder: ContextVar[dict[int, object]] = ContextVar("holder", default=_process)


def held(x: T, device: torch.device) -> T:
    """x, kept alive if a CUDA graph is being captured: each replay reads x at the same address."""
    if capturing(device):
        _holder.get()[id(x)] = x
    return x


def hold_for_caller(into: dict[int, object]) -> None:
    """From now on, objects that are `held` in this thread, outside `holding`, live as long as `into`."""
    _holder.set(into)


@contextmanager
def holding(into: dict[int, object]) -> Iterator[None]:
    """Objects that are `held` within live as long as `into`."""
    token = _holder.set(into)
    try:
        yield
    finally:
        _holder.reset(token)
