"""Modules that stand in for others while an external package is imported."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any


@contextmanager
def stand_ins(contents: Mapping[str, Mapping[str, Any]]) -> Iterator[None]:
    """Within the context, importing one of the dotted names gives a module with these contents. A module is an attribute
    of its package where both are given. Afterwards sys.modules is as before."""
    modules = {name: _module(name, names) for name, names in contents.items()}
    for name, module in modules.items():
        package, _, last = name.rpartition(".")
        if package in modules:
            setattr(modules[package], last, module)
    before = {name: sys.modules.get(name) for name in modules}
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name, module_before in before.items():
            if module_before is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module_before


def _module(name: str, contents: Mapping[str, Any]) -> ModuleType:
    module = ModuleType(name)
    module.__dict__.update(contents)
    return module
