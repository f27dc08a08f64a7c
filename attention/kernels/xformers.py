"""`xformers`: the FlashAttention-2 operators of the package xformers, which run PyTorch's own kernels.

The operators are called directly. They do not need xformers' C++ extension, which loads beside one version of PyTorch only; where
it does not, xformers' functions for users refuse every call."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from functools import cache
from types import SimpleNamespace
from typing import Any

from attention.errors import UnsupportedCall
from attention.gpu import private
from attention.kernels.aten import Flash2, lengths_of
from attention.kernels.interface import Call, Pair, Tensors, Triple

INSTALL = "pip install xformers==0.0.35"


class Xformers(Flash2):
    name = "xformers"
    summary = "the package xformers: its FlashAttention-2 operators, which run PyTorch's own kernels"
    any_order = "its backward is not deterministic; take flash2 or flash4"

    def missing(self, device: str) -> str | None:
        return super().missing(device) or operators()[1]

    def attend(self, tensors: Tensors, call: Call) -> Pair:
        q, k, v = tensors
        cu_q, cu_k, *longest = lengths_of(q, k, call)
        out, lse, _ = operators()[0].forward(q, k, v, cu_q, cu_k, None, *longest, *_band(call), False, None)
        return out, lse

    def gradients(self, tensors: Tensors, call: Call) -> Triple:
        dout, q, k, v, out, lse = tensors
        if call.deterministic:
            raise UnsupportedCall(f"kernel=xformers: deterministic=True: {self.any_order}")
        tensors = dout.contiguous(), q, k, v, out.contiguous(), lse.contiguous()
        grads: Triple = operators()[0].backward(False, *tensors, *lengths_of(q, k, call), *_band(call), None)
        return grads


def _band(call: Call) -> tuple[float, float, bool, int, int]:
    """No dropout, the scale, and the mask."""
    return 0.0, call.scale, call.mask.causal, call.mask.left, call.mask.right


@cache
def operators() -> tuple[Any, str | None]:
    """xformers' operators `forward` and `backward`, or None and the reason.

    Where flash-attn-4 is installed, xformers finds a package `flash_attn`, imports `flash_attn.flash_attn_interface` from it,
    and fails. So that package is hidden during the import, and xformers takes the FlashAttention-2 inside PyTorch."""
    if importlib.util.find_spec("xformers") is None:
        return None, f"needs the package xformers: {INSTALL}"
    try:
        with private.replaced(sys.modules, {"flash_attn": None}):
            flash = importlib.import_module("xformers.ops.fmha.flash")
        both = [getattr(flash, name) for name in private.XFORMERS]
        for operator, names in zip(both, private.XFORMERS.values(), strict=True):
            if not operator.is_available():
                return None, f"this xformers has no operator {operator.NAME} for this PyTorch; {INSTALL}"
            if other := private.other_arguments(operator.OPERATOR, names):
                return None, f"{other}; {INSTALL}"
    except Exception as error:  # also RuntimeErrors of its extension, built for another PyTorch
        return None, f"xformers does not import ({type(error).__name__}: {error}); {INSTALL}"
    forward, backward = (x.OPERATOR for x in both)
    return SimpleNamespace(forward=forward, backward=backward), None
