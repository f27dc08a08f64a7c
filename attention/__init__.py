"""Attention, local and context-parallel, as differentiable functions over process groups.

    fn = attention.make("zigzag")                # any of attention.names(), over the default process group
    q, k, v = (fn.shard(x) for x in (q, k, v))   # global [B, S, H, D] to this rank's part
    out = fn.unshard(fn(q, k, v, causal=True))

make             makes a variant's function over a process group
names            every variant, with a one-line description
masks            which keys each query sees: masks.chunked(8192), masks.names()
ContextParallel  the function's type: shard, call, unshard
UnsupportedCall  a ValueError: this variant, kernel or machine cannot do the call

The layouts, schedules and masks are pure Python and import without torch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attention import masks
    from attention.api import ContextParallel, make, names
    from attention.errors import UnsupportedCall

__all__ = ["ContextParallel", "UnsupportedCall", "make", "masks", "names"]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name == "UnsupportedCall":
        from attention.errors import UnsupportedCall

        return UnsupportedCall
    if name == "masks":
        return importlib.import_module("attention.masks")
    if name in __all__:
        from attention import api

        return getattr(api, name)
    raise AttributeError(f"module 'attention' has no attribute {name!r}")
