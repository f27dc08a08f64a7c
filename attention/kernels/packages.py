"""Packages of kernels, which need not be installed."""

from __future__ import annotations

import importlib
from functools import lru_cache
from typing import Any

import torch

from attention.gpu.private import Functions
from attention.kernels.interface import Shape


@lru_cache
def imported(module: str, functions: Functions, install: str) -> tuple[Any, str | None]:
    """(the functions of a package's module, None), or (None, why there are none). Importing takes seconds, so it is done at
    the first use."""
    try:
        package = importlib.import_module(module)
    except Exception as error:  # not only ImportError: a package's compiler has errors of its own
        if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
            return None, f"needs the package: {install}"
        return None, f"{module} does not import ({type(error).__name__}: {error}); {install}"
    wrong = functions.wrong(package)
    return (None, f"{wrong}; {install}") if wrong else (functions.of(package), None)


def wrong_gpu(least: tuple[int, int], most: tuple[int, int], rule: str) -> str | None:
    """Why a kernel does not run on this machine's GPU, or None. least, most: compute capabilities."""
    if torch.cuda.is_available() and not least <= torch.cuda.get_device_capability() <= most:
        return "this GPU is sm{}{}: {}".format(*torch.cuda.get_device_capability(), rule)
    return None


def kv_heads_rule(shape: Shape) -> str | None:
    """Why a backward that has no GQA does not take a shape's heads, or None."""
    if shape.heads == shape.kv_heads:
        return None
    heads = f"{shape.kv_heads} of {shape.heads}"
    return f"v_head_dim={shape.v_head_dim}: its backward needs as many KV heads as heads, not {heads}"
