"""Every variant by its name: whatever the modules of this folder register. Pure Python, so that the command line can
list and check variants without torch."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules
from typing import Any, get_args

import attention.variants as folder
from attention.errors import nearest
from attention.variants.base import REGISTERED, Executor, Variant
from runner.peers.packages import External

for _module in iter_modules(folder.__path__):
    if _module.name != "registry":
        import_module(f"{folder.__name__}.{_module.name}")

_EXECUTORS = get_args(Executor)
_OURS = [v for v in REGISTERED.values() if not isinstance(v, External)]
EXTERNAL: dict[str, External[Any]] = {name: v for name, v in REGISTERED.items() if isinstance(v, External)}
# in lists those of one executor stand together
_SORTED = {v.name: v for v in sorted(_OURS, key=lambda v: (_EXECUTORS.index(v.executor), v.name))}
# all give the numbers of attention under the call's mask
VARIANTS: dict[str, Variant[Any]] = {name: v for name, v in _SORTED.items() if not v.mixes}
MIXTURES: dict[str, Variant[Any]] = {name: v for name, v in _SORTED.items() if v.mixes}


def everything() -> dict[str, Variant[Any]]:
    """Our variants and, after them, the external packages that they are compared with."""
    return {**VARIANTS, **MIXTURES, **EXTERNAL}


def variant(name: str) -> Variant[Any]:
    """One of ours or an external package. Raises ValueError for an unknown name, with the nearest ones."""
    known = everything()
    if name not in known:
        raise ValueError(f"attention={name!r} is not a variant; {nearest(name, known)}")
    return known[name]
