"""`xformers`: the FlashAttention-2 operators of the package xformers. With "-pt" in their names they run PyTorch's own kernels, else
those of flash-attn.

The operators are called directly. They do not need xformers' C++ extension, which loads beside one version of PyTorch only; where
it does not, xformers' functions for users refuse every call."""

from __future__ import annotations

import importlib
import importlib.util
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from attention.errors import UnsupportedCall
from attention.gpu import private
from attention.kernels.aten import FlashAttention2, flash_attn, lengths_of
from attention.kernels.interface import Call, Pair, Triple

INSTALL = "pip install xformers==0.0.35"


class Xformers(FlashAttention2):
    name = "xformers"
    any_order = "its backward is not deterministic; take flash2 or flash4"

    @property
    def summary(self) -> str:  # type: ignore[override]
        return f"the package xformers, by its FlashAttention-2 operators{f': {self.note}' if self.note else ''}"

    @property
    def note(self) -> str | None:  # type: ignore[override]
        return getattr(operators()[0], "names", None) if torch.cuda.is_available() else None  # importing takes seconds

    def missing(self, device: str) -> str | None:
        return super().missing(device) or operators()[1]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call, into: Pair | None) -> Pair:
        cu_q, cu_k, *longest = lengths_of(q, k, call)
        out, lse, _ = operators()[0].forward(q, k, v, cu_q, cu_k, None, *longest, *_band(call), False, None)
        return out, lse

    def run_backward(self, tensors: tuple[Tensor, ...], call: Call) -> Triple:
        if call.deterministic:
            raise UnsupportedCall(f"kernel=xformers: deterministic=True: {self.any_order}")
        lengths = lengths_of(tensors[1], tensors[2], call)
        grads: Triple = operators()[0].backward(False, *tensors, *lengths, *_band(call), None)
        return grads


def _band(call: Call) -> tuple[float, float, bool, int, int]:
    """No dropout, the scale, and the mask."""
    return 0.0, call.scale, call.mask.causal, call.mask.left, call.mask.right


@cache
def operators() -> tuple[Any, str | None]:
    """xformers' operators `forward` and `backward` and their `names`, or None and the reason.

    Where flash-attn-4 is installed without flash-attn, xformers finds a package `flash_attn`, imports
    `flash_attn.flash_attn_interface` from it, and fails. So that package is hidden during the import, and xformers
    takes the FlashAttention-2 inside PyTorch."""
    if importlib.util.find_spec("xformers") is None:
        return None, f"needs the package xformers: {INSTALL}"
    try:
        with private.replaced_modules({} if flash_attn() else {"flash_attn": None}):
            flash = importlib.import_module("xformers.ops.fmha.flash")
        both = [getattr(flash, name) for name in private.XFORMERS]
        for operator, names in zip(both, private.XFORMERS.values(), strict=True):
            if not operator.is_available():
                return None, f"this xformers has no operator {operator.NAME} for this PyTorch; {INSTALL}"
            if other := private.other_arguments(operator.OPERATOR, names):
                return None, f"{other}; {INSTALL}"
    except Exception as error:  # also RuntimeErrors of its extension, built for another PyTorch
        return None, f"xformers does not import ({type(error).__name__}: {error}); {INSTALL}"
    forward, backward = both
    names = f"{forward.NAME} and {backward.NAME}"
    return SimpleNamespace(forward=forward.OPERATOR, backward=backward.OPERATOR, names=names), None
