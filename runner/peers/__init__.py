"""Peers: other packages' context-parallel attention, which the program runs beside the library's variants. `runner.peers.function` makes
one a function with the face of `attention.ContextParallel`. Imports without torch."""

from __future__ import annotations

from typing import Any

from attention.errors import nearest
from attention.variants import registry
from attention.variants.base import Variant
from runner.peers.packages import PEERS, Package

__all__ = ["PEERS", "Package", "everything", "missing", "variant"]


def everything() -> dict[str, Variant[Any]]:
    """The library's variants and, after them, the peers."""
    return registry.everything() | PEERS


def variant(name: str) -> Variant[Any]:
    """A variant or a peer. Raises ValueError for an unknown name, with the nearest ones."""
    known = everything()
    if name not in known:
        raise ValueError(f"attention={name!r} is not a variant; {nearest(name, known)}")
    return known[name]


def missing(chosen: Variant[Any], device: str) -> str | None:
    """Why a peer can't run on this machine's `device` ("cpu" or "cuda"), or None; the library's variants run everywhere."""
    return chosen.missing(device) if isinstance(chosen, Package) else None
