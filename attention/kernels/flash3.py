"""`flash3`: FlashAttention-3, the package built from the folder `hopper` of flash-attention. It takes GQA, packed
batches and bands directly, and writes dq, dk and dv (not out) into given tensors."""

from __future__ import annotations

from typing import Any

from attention.gpu.private import FLASH3
from attention.kernels.flash4 import pack_lengths
from attention.kernels.interface import Call, Into, Kernel, Pair, Tensors, Triple
from attention.kernels.packages import imported, wrong_gpu
from attention.tensors import dense_like

INSTALL = (
    "build FlashAttention-3 from the folder hopper of github.com/Dao-AILab/flash-attention: python setup.py install"
)
MODULES = "flash_attn_3.flash_attn_interface", "flash_attn_interface"


class Flash3(Kernel):
    name = "flash3"
    summary = "FlashAttention-3 for Hopper, where its package is installed"
    writes = True

    def missing(self, device: str) -> str | None:
        return super().missing(device) or wrong_gpu((9, 0), (9, 9), "needs sm90 (Hopper)") or package()[1]

    def attend(self, tensors: Tensors, call: Call, into: Pair | None = None) -> Pair:
        q, k, v = tensors
        out, lse, *_ = package()[0].forward(q, k, v, causal=call.mask.causal, **_options(call))
        return out, lse

    def gradients(self, tensors: Tensors, call: Call, into: Into = None) -> Triple:
        dout, q, k, v, out, lse = tensors
        dq, dk, dv = grads = into or (dense_like(q), dense_like(k), dense_like(v))
        own = {"dq": dq, "dk": dk, "dv": dv, "is_causal": call.mask.causal, "deterministic": call.deterministic}
        package()[0].backward(dout, q, k, v, out, lse.contiguous(), **own, **_options(call))
        return grads


def package() -> tuple[Any, str | None]:
    """The package's low-level functions, or None and the reason."""
    either = [imported(module, FLASH3, INSTALL) for module in MODULES]
    return next((x for x in either if x[0]), either[1])


def _options(call: Call) -> dict[str, Any]:
    """The arguments of both functions. A band means the same there: aligned bottom-right, -1 unbounded."""
    window = {"window_size_left": call.mask.left, "window_size_right": call.mask.right}
    return {"softmax_scale": call.scale, **window, **pack_lengths(call)}
