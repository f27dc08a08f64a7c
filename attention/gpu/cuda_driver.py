"""Functions of the CUDA driver, called directly where PyTorch's way to the same takes several times the CPU time or
does not exist."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import lru_cache
from typing import Any


def function(name: str, *arguments: Any) -> Callable[..., int]:
    """The driver's function of that name. It takes `arguments` (ctypes types) and returns a CUDA error, 0 for none.
    Raises RuntimeError if the driver lacks it."""
    try:
        found = _driver()[name]
    except (AttributeError, OSError):
        raise RuntimeError(f"the CUDA driver has no {name}") from None
    found.argtypes = arguments
    return found


@lru_cache(maxsize=1)
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
