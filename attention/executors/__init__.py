"""The executors, by the exchange that a variant names. They need torch, so each is imported when it is first asked for."""

from __future__ import annotations

from importlib import import_module
from typing import Any

MODULES = {"ring": "exchange", "gather": "exchange", "all_to_all": "all_to_all", "tree": "tree", "dilated": "dilated"}
_loaded: dict[str, Any] = {}


def executor(exchange: str) -> Any:
    """The module of one of MODULES. Of q, k and v, this rank's shards, its `forward(q, k, v, plan, sinks)` returns (out, lse, saved);
    sinks `[H]` are applied to both, and saved as the last of a pass's tensors. `backward(dout, saved, plan)` returns (dq, dk, dv), and
    with sinks their gradient from this rank's queries."""
    if exchange not in _loaded:
        _loaded[exchange] = import_module(f"{__name__}.{MODULES[exchange]}")
    return _loaded[exchange]
