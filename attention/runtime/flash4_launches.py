"""Launches of FlashAttention-4's compiled kernels, which the package caches. While a call of ours is recorded, a kernel
from a cache goes through `submit`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import is_dataclass
from functools import partial
from types import ModuleType
from typing import Any, TypeVar

from torch import Tensor

from attention.runtime.private import flash4_caches
from attention.runtime.submit import recording, refuse_recording, submit

R = TypeVar("R")


_watching = threading.Lock()


class _Kernel:
    """A compiled kernel from the package's cache."""

    def __init__(self, kernel: Callable[..., object], function: str):
        self.kernel, self.function = kernel, function

    def __call__(self, *arguments: Any, **named: Any) -> object:
        if named or any(map(_hides_tensor, arguments)):
            refuse_recording(f"the FlashAttention-4 kernel of {self.function} takes tensors within other arguments")
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
        self.functions = () if isinstance(functions, str) else functions

    def call(self, run: Callable[[], R]) -> R:
        """`run()`, a call of the package. While this thread records, its launches are submitted: for that time alone, the
        package has other caches. A thread that does not record may use them, too."""
        if not recording():
            return run()
        if self.why_not is not None:
            refuse_recording(self.why_not)
        with _watching:
            caches = [function.compile_cache for function in self.functions]
            try:
                for function, cache in zip(self.functions, caches, strict=True):
                    function.compile_cache = _Cache(cache, function.__name__)
                return run()
            finally:
                for function, cache in zip(self.functions, caches, strict=True):
                    function.compile_cache = cache


def _hides_tensor(x: object) -> bool:
    """Whether x contains a tensor."""
    within = x if isinstance(x, (tuple, list)) else vars(x).values() if is_dataclass(x) else ()
    return any(isinstance(each, Tensor) or _hides_tensor(each) for each in within)
