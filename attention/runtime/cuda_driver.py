"""The CUDA driver called directly, where PyTorch's way to the same takes the host several times as long or does not exist."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from attention.runtime import launch_trace
from attention.runtime.streams import on_device


def function(name: str, *arguments: Any) -> Callable[..., int]:
    """The driver's function of that name, which takes `arguments` (of ctypes) and gives an error, 0 for none. Raises RuntimeError
    where there is none."""
    try:
        found = _driver()[name]
    except (AttributeError, OSError):
        raise RuntimeError(f"the CUDA driver has no {name}") from None
    found.argtypes = arguments
    return found


@lru_cache(maxsize=1)
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


@lru_cache(maxsize=1)
def _memset() -> Callable[..., int]:
    return function("cuMemsetD8Async", ctypes.c_uint64, ctypes.c_ubyte, ctypes.c_size_t, ctypes.c_void_p)


def _checked_memset(address: int, value: int, size: int, stream: int) -> None:
    error = _memset()(address, value, size, stream)
    if error:
        raise RuntimeError(f"cuMemsetD8Async failed with CUDA error {error}")


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """As `torch.zeros`, on CUDA by the driver."""
    if device.type != "cuda":
        return torch.zeros(shape, dtype=dtype, device=device)
    found = torch.empty(shape, dtype=dtype, device=device)
    with on_device(found.get_device()):
        stream = torch._C._cuda_getCurrentRawStream(found.get_device())
        filled = found.data_ptr(), 0, found.nbytes, stream
        error = _memset()(*filled)
    if error:  # a thread that has done nothing on the GPU yet has no context for the driver
        found.zero_()
    else:
        launch_trace.did(_checked_memset, *filled, addresses=(0, 1), anywhere=True)
    return found
