"""Functions of the CUDA driver, called directly where PyTorch's way to the same takes several times the CPU time or
does not exist."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

# 64 bits hold every address and size; for a 32-bit argument the calling conventions of x86-64 and Arm take the low half
WORD = ctypes.c_uint64


@cache
def function(name: str, arguments: int) -> Callable[..., None]:
    """The driver's function of that name, which takes so many integers or addresses. A call raises RuntimeError for a CUDA
    error. Raises RuntimeError if the driver lacks the function."""
    try:
        called: Any = _driver()[name]
    except (AttributeError, OSError):
        raise RuntimeError(f"the CUDA driver has no {name}") from None
    called.argtypes = [WORD] * arguments
    called.errcheck = _check
    return called


def _check(error: int, called: Any, arguments: tuple[int, ...]) -> None:
    if error:
        raise RuntimeError(f"{called.__name__} failed with CUDA error {error}")


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
