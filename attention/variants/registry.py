"""Every variant by its name: whatever the modules of this folder register. Pure Python, so that the command line can
list and check variants without torch."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules
from typing import Any, get_args

import attention.variants as folder
from attention.errors import nearest
from attention.geometry.layouts import CuSeqlens
from attention.geometry.options import check_heads
from attention.masks.band import Band
from attention.variants.base import REGISTERED, Executor, Variant

for _module in iter_modules(folder.__path__):
    if _module.name != "registry":
        import_module(f"{folder.__name__}.{_module.name}")

_EXECUTORS = get_args(Executor)
# external packages, once variants here
MOVED = (
    "rfa_llama3", "rfa_ring", "rfa_stripe", "rfa_zigzag", "rm_usp", "rm_zigzag", "torch_cp", "torch_flex_cp", "transformer_engine", "usp_yunchang",
)  # fmt: skip
# in lists those of one executor stand together
_SORTED = {v.name: v for v in sorted(REGISTERED.values(), key=lambda v: (_EXECUTORS.index(v.executor), v.name))}
# all give the numbers of attention under the call's mask
VARIANTS: dict[str, Variant[Any]] = {name: v for name, v in _SORTED.items() if not v.mixes}
MIXTURES: dict[str, Variant[Any]] = {name: v for name, v in _SORTED.items() if v.mixes}

AUTO = "auto"
SUMMARY = "the fastest of a few variants, by trials of this call"
# What `auto` chooses among, with default options. Over the results of this repository the fastest of these is on average 2.5% slower
# than the fastest of all variants and options.
SHORTLIST = ("dense", "ulysses", "zigzag_llama3", "zigzag", "llama3", "ring_allgather", "tree")


def everything() -> dict[str, Variant[Any]]:
    """The variants in the order of the lists."""
    return VARIANTS | MIXTURES


def variant(name: str) -> Variant[Any]:
    """The variant of this name. Raises ValueError for an unknown name, with the nearest ones, and for what the program alone runs."""
    known = everything()
    if name in MOVED:
        raise ValueError(
            f"attention={name!r} is an external package: the program runs it, python -m runner attention={name} or runner.peers"
        )
    if name not in known:
        raise ValueError(f"attention={name!r} is not a variant; {nearest(name, known)}")
    return known[name]


def shortlist(
    cu_seqlens: CuSeqlens, world: int, mask: Band, heads: int, kv_heads: int, q_tokens: int | None
) -> tuple[list[str], dict[str, str]]:
    """The variants of `SHORTLIST` that can do a call, and by name the reasons of the others. q_tokens: the queries of a decode, else None. Raises ValueError if no variant can do the call."""
    check_heads(heads, kv_heads)
    able: list[str] = []
    unsuitable: dict[str, str] = {}
    refusals: dict[str, str] = {}
    for name in SHORTLIST:
        if reason := VARIANTS[name].unsuitable(world, q_tokens is not None):
            unsuitable[name] = reason
            continue
        try:
            VARIANTS[name].problem(cu_seqlens, world, mask, q_tokens=q_tokens)
            VARIANTS[name].parse().check(heads, kv_heads, world)
            able.append(name)
        except ValueError as error:
            refusals[name] = str(error)
    if not able:
        raise ValueError(f"attention={AUTO}: no variant can do this: {'; '.join(dict.fromkeys(refusals.values()))}")
    return able, unsuitable | refusals
