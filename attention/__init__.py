"""Attention, local and context-parallel, as differentiable functions over process groups.

    fn = attention.make("zigzag")
    q, k, v = (fn.shard(x) for x in (q, k, v))
    out = fn.unshard(fn(q, k, v, causal=True))

The layouts, schedules and masks are pure Python and import without torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attention.function import ContextParallel, make, names
    from attention.kernels.interface import UnsupportedCall

__all__ = ["ContextParallel", "UnsupportedCall", "make", "names"]


def __getattr__(name: str) -> Any:
    if name == "UnsupportedCall":
        from attention.kernels.interface import UnsupportedCall

        return UnsupportedCall
    if name in __all__:
        from attention import function

        return getattr(function, name)
    raise AttributeError(f"module 'attention' has no attribute {name!r}")
