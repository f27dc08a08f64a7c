"""`flash3`: FlashAttention-3, the package built from the folder `hopper` of flash-attention. It takes GQA, packed
batches and bands directly, and writes dq, dk and dv (not out) into given tensors."""

from __future__ import annotations

import importlib
from functools import lru_cache
from types import ModuleType, SimpleNamespace

import torch
from torch import Tensor

from attention.errors import UnsupportedCall
from attention.gpu.private import FLASH3
from attention.kernels.aten import half_only, head_dim_rule
from attention.kernels.fit import dense_like
from attention.kernels.flash4 import pack_lengths
from attention.kernels.interface import Call, Into, Kernel, Pair, Shape, Triple
from attention.masks.band import Band

INSTALL = "build it from the folder hopper of github.com/Dao-AILab/flash-attention: python setup.py install"


class Flash3(Kernel):
    name = "flash3"
    summary = "FlashAttention-3 for Hopper, where its package is installed"

    def missing(self, device: str) -> str | None:
        if device != "cuda":
            return super().missing(device)
        module, reason = interface()
        if module is None:
            return reason
        if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9:
            major, minor = torch.cuda.get_device_capability()
            return f"this GPU is sm{major}{minor}: needs sm90 (Hopper)"
        return None

    def refuses(self, shape: Shape, mask: Band) -> str | None:
        return half_only(shape) or head_dim_rule(shape, 256)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call, into: Pair | None) -> Pair:
        out, lse, *_ = _functions().forward(
            q, k, v, **pack_lengths(call), softmax_scale=call.scale, causal=call.mask.causal, **window(call.mask)
        )
        return out, lse

    def gradients(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: Call, into: Into
    ) -> Triple:
        grads = into or (dense_like(q), dense_like(k), dense_like(v))
        _functions().backward(
            dout,
            q,
            k,
            v,
            out,
            lse.contiguous(),
            **pack_lengths(call),
            dq=grads[0],
            dk=grads[1],
            dv=grads[2],
            softmax_scale=call.scale,
            is_causal=call.mask.causal,
            **window(call.mask),
            deterministic=call.deterministic,
        )
        return grads


@lru_cache
def interface() -> tuple[ModuleType | None, str]:
    """The package's low-level functions, or None and the reason."""
    for name in ("flash_attn_interface", "flash_attn_3.flash_attn_interface"):
        try:
            module = importlib.import_module(name)
            wrong = FLASH3.wrong(module)
            return (None, f"{wrong}; {INSTALL}") if wrong else (module, "")
        except ModuleNotFoundError:
            continue
        except Exception as error:
            return None, f"{name} does not import ({type(error).__name__}: {error})"
    return None, f"needs FlashAttention-3: {INSTALL}"


def window(mask: Band) -> dict[str, int]:
    """A band as the kernel's arguments, which mean the same: aligned bottom-right, -1 unbounded."""
    return {"window_size_left": mask.left, "window_size_right": mask.right}


def _functions() -> SimpleNamespace:
    module, reason = interface()
    if module is None:
        raise UnsupportedCall(f"kernel=flash3: {reason}")
    return FLASH3.of(module)
