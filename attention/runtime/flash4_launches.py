"""Launches of FlashAttention-4's compiled kernels, which the package caches. While a call of ours is recorded, a kernel
from a cache goes through `submit`. A launch in any other way ends the recording."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import is_dataclass
from functools import partial
from types import ModuleType
from typing import Any, TypeVar

from torch import Tensor

from attention.runtime.private import flash4_caches
from attention.runtime.submit import check_submitted, recording, refuse_recording, submit

R = TypeVar("R")


class _Local(threading.local):
    submits = False  # whether the package's launches are submitted


_local = _Local()


class _Kernel:
    """A compiled kernel from the package's cache."""

    def __init__(self, kernel: Callable[..., object], function: str):
        self.kernel, self.function = kernel, function

    def __call__(self, *arguments: Any, **named: Any) -> object:
        name = f"the FlashAttention-4 kernel of {self.function}"
        if not _local.submits:
            check_submitted(name)
            return self.kernel(*arguments, **named)
        if named or any(map(_hides_tensor, arguments)):
            refuse_recording(f"{name} takes tensors within other arguments")
        return submit(partial(self.kernel, **named) if named else self.kernel, *arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.kernel, name)


class _Cache:
    """Replaces a function's cache of compiled kernels."""

    def __init__(self, kernels: Any, function: str):
        self.kernels, self.function = kernels, function

    def __contains__(self, key: object) -> bool:
        return key in self.kernels

    def __setitem__(self, key: object, kernel: Callable[..., object]) -> None:
        self.kernels[key] = kernel

    def __getitem__(self, key: object) -> _Kernel:
        return _Kernel(self.kernels[key], self.function)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.kernels, name)


class Launches:
    """The launches of the module `flash_attn.cute.interface`. why_not: why they cannot be recorded."""

    def __init__(self, module: ModuleType):
        functions = flash4_caches(module)
        self.why_not = functions if isinstance(functions, str) else None
        for function in functions if not isinstance(functions, str) else ():
            if not isinstance(function.compile_cache, _Cache):
                function.compile_cache = _Cache(function.compile_cache, function.__name__)

    def call(self, run: Callable[[], R]) -> R:
        """`run()`, a call of the package. While this thread records, its launches are submitted."""
        if not recording():
            return run()
        if self.why_not is not None:
            refuse_recording(self.why_not)
        _local.submits = True
        try:
            return run()
        finally:
            _local.submits = False


def _hides_tensor(x: object) -> bool:
    """Whether x contains a tensor."""
    within = x if isinstance(x, (tuple, list)) else vars(x).values() if is_dataclass(x) else ()
    return any(isinstance(each, Tensor) or _hides_tensor(each) for each in within)
