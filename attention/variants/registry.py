"""Every variant by its name: whatever the modules of this folder register. Pure Python, so that the command line can list and
check variants without torch."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules
from typing import Any

import attention.variants as folder
from attention.errors import nearest
from attention.variants.base import REGISTERED, Variant
from attention.variants.external import External

for _module in iter_modules(folder.__path__):
    if _module.name != "registry":
        import_module(f"{folder.__name__}.{_module.name}")

EXTERNAL: dict[str, External[Any]] = {name: v for name, v in REGISTERED.items() if isinstance(v, External)}
VARIANTS: dict[str, Variant[Any]] = {name: v for name, v in REGISTERED.items() if name not in EXTERNAL}


def everything() -> dict[str, Variant[Any]]:
    """Our variants and, after them, the external packages that they are compared with."""
    return {**VARIANTS, **EXTERNAL}


def variant(name: str) -> Variant[Any]:
    """One of ours or an external package. Raises ValueError for an unknown name, with the nearest ones."""
    known = everything()
    if name not in known:
        raise ValueError(f"attention={name!r} is not a variant; {nearest(name, known)}")
    return known[name]
