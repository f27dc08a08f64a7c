"""`flash3`: FlashAttention-3, the package built from the folder `hopper` of flash-attention. It takes GQA, packed
batches and bands directly, and writes dq, dk and dv (not out) into given tensors."""

from __future__ import annotations

import importlib
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from attention.gpu.private import FLASH3
from attention.kernels.fit import dense_like
from attention.kernels.flash4 import pack_lengths
from attention.kernels.interface import Call, Into, Kernel, Pair, Triple

INSTALL = "build it from the folder hopper of github.com/Dao-AILab/flash-attention: python setup.py install"


class Flash3(Kernel):
    name = "flash3"
    summary = "FlashAttention-3 for Hopper, where its package is installed"

    def missing(self, device: str) -> str | None:
        functions, reason = interface() if device == "cuda" else (None, super().missing(device))
        if functions is not None and torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9:
            return "this GPU is sm{}{}: needs sm90 (Hopper)".format(*torch.cuda.get_device_capability())
        return reason

    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call, into: Pair | None) -> Pair:
        out, lse, *_ = interface()[0].forward(q, k, v, causal=call.mask.causal, **_options(call))
        return out, lse

    def gradients(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: Call, into: Into
    ) -> Triple:
        dq, dk, dv = grads = into or (dense_like(q), dense_like(k), dense_like(v))
        own = {"dq": dq, "dk": dk, "dv": dv, "is_causal": call.mask.causal, "deterministic": call.deterministic}
        interface()[0].backward(dout, q, k, v, out, lse.contiguous(), **own, **_options(call))
        return grads


@lru_cache
def interface() -> tuple[Any, str | None]:
    """The package's low-level functions, or None and the reason."""
    for name in ("flash_attn_interface", "flash_attn_3.flash_attn_interface"):
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError:
            continue
        except Exception as error:
            return None, f"{name} does not import ({type(error).__name__}: {error})"
        wrong = FLASH3.wrong(module)
        return (None, f"{wrong}; {INSTALL}") if wrong else (FLASH3.of(module), None)
    return None, f"needs FlashAttention-3: {INSTALL}"


def _options(call: Call) -> dict[str, Any]:
    """The arguments of both functions. A band means the same there: aligned bottom-right, -1 unbounded."""
    window = {"window_size_left": call.mask.left, "window_size_right": call.mask.right}
    return {"softmax_scale": call.scale, **window, **pack_lengths(call)}
