"""`triton`: flash attention by the kernel for nested prefixes (`grouped_forward`) with a single group. So the
experiment that compares one fused call with separate calls compares the same inner loop."""

from __future__ import annotations

from torch import Tensor

from attention.errors import UnsupportedCall
from attention.kernels.aten import FLASH2
from attention.kernels.interface import HALF, Call, Into, Kernel, Pair, Shape, Tensors, Triple
from attention.kernels.math import MATH
from attention.kernels.triton_decode import dtype_rule, missing
from attention.kernels.triton_grouped import HEAD_DIMS, grouped_forward
from attention.masks.band import Band


class TritonFlash(Kernel):
    name = "triton"
    summary = "our own flash forward in Triton, FlashAttention-2's backward; packed batches go sequence by sequence"
    writes = True

    def missing(self, device: str) -> str | None:
        return missing(device)

    def refuses(self, shape: Shape, mask: Band) -> str | None:
        if mask.windowed:
            return f"window=({mask.left}, {mask.right}): no sliding window"
        if shape.head_dim not in HEAD_DIMS:
            return f"head_dim={shape.head_dim}: 64 and 128 only"
        return dtype_rule(shape.dtype, shape.device)

    def squares(self, x: Tensor, y: Tensor, call: Call) -> bool:
        return call.packed

    def attend(self, tensors: Tensors, call: Call, into: Pair | None = None) -> Pair:
        q, k, v = tensors
        if call.mask.windowed:
            raise UnsupportedCall(f"kernel=triton: {call.mask.describe()}: no sliding window; take another kernel")
        return grouped_forward(q, k, v, (k.shape[1],), call.scale, call.mask.causal, into=into)

    def gradients(self, tensors: Tensors, call: Call, into: Into = None) -> Triple:
        """In fp32 and on a CPU those of `math`."""
        dout, q, k, v, out, lse = tensors
        kernel: Kernel = FLASH2 if q.is_cuda and q.dtype in HALF else MATH
        return kernel.backward(dout, q, k, v, out, lse, call, into)
