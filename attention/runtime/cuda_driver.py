"""Functions of the CUDA driver, called directly where PyTorch's way to the same takes several times the CPU time or
does not exist."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from attention.runtime.submit import check_submitted


def function(name: str, *arguments: Any) -> Callable[..., int]:
    """The driver's function of that name. It takes `arguments` (ctypes types) and returns a CUDA error, 0 for none. A
    call outside `submit` ends a recording. Raises RuntimeError if the driver lacks it."""
    try:
        found = _driver()[name]
    except (AttributeError, OSError):
        raise RuntimeError(f"the CUDA driver has no {name}") from None
    found.argtypes = arguments

    def call(*given: Any) -> int:
        check_submitted(name)
        error: int = found(*given)
        return error

    return call


@lru_cache(maxsize=1)
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
