"""`triton`: flash attention by the kernel for nested prefixes (`grouped_forward`) with a single group. So the
experiment that compares one fused call with separate calls compares the same inner loop."""

from __future__ import annotations

from torch import Tensor

from attention.errors import UnsupportedCall
from attention.kernels.aten import FLASH_ATTENTION_2, HALF
from attention.kernels.interface import Call, Into, Kernel, Pair, Shape, Triple
from attention.kernels.math import Math
from attention.kernels.triton_decode import dtype_rule, missing
from attention.kernels.triton_grouped import HEAD_DIMS, Tiling, grouped_forward
from attention.masks.band import Band


class TritonFlash(Kernel):
    name = "triton"
    summary = "our own flash forward in Triton, FlashAttention-2's backward; packed batches go sequence by sequence"

    def missing(self, device: str) -> str | None:
        return missing(device)

    def refuses(self, shape: Shape, mask: Band) -> str | None:
        if mask.windowed:
            return f"window=({mask.left}, {mask.right}): no sliding window"
        if shape.head_dim not in HEAD_DIMS:
            return f"head_dim={shape.head_dim}: 64 and 128 only"
        return dtype_rule(shape.dtype, shape.device)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call, into: Pair | None) -> Pair:
        if call.mask.windowed:
            raise UnsupportedCall(f"kernel=triton: {call.mask.describe()}: no sliding window; take another kernel")
        if call.packed:
            return _Rectangles().attend(q, k, v, call, into)
        return flash_forward(q, k, v, call.scale, call.mask.causal, into=into)

    def gradients(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: Call, into: Into
    ) -> Triple:
        if q.is_cuda and q.dtype in HALF:
            return FLASH_ATTENTION_2.gradients(dout, q, k, v, out, lse, call, into)
        return _Rectangles().gradients(dout, q, k, v, out, lse, call, into)


class _Rectangles(Math):
    """In fp32 and on a CPU the backward is that of `math`."""

    def rectangle(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Pair:
        return flash_forward(q, k, v, call.scale, call.mask.causal)


def flash_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    causal: bool,
    tiles: Tiling | None = None,
    into: Pair | None = None,
) -> Pair:
    """Attention of q `[B, Sq, H, D]` over k and v `[B, Sk, Hk, D]`, any lengths, D 64 or 128; causal is aligned
    bottom-right.

    Returns (out like q, lse fp32 `[B, H, Sq]`); a query without keys gives 0 and -inf. Raises ValueError as
    `grouped_forward`."""
    return grouped_forward(q, k, v, (k.shape[1],), scale, causal, tiles, into)
