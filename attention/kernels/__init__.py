"""Local kernels by name, and `auto`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from attention.errors import UnsupportedCall, nearest
from attention.kernels.aten import Flash2, SdpaCudnn, SdpaEfficient, SdpaFlash
from attention.kernels.cudnn_flex import CudnnFlex
from attention.kernels.flash3 import Flash3
from attention.kernels.flash4 import Flash4
from attention.kernels.flex import Flex
from attention.kernels.interface import Call, Kernel, Pair, Shape, lacks, name_of
from attention.kernels.math import MATH
from attention.kernels.padded_values import PaddedValues
from attention.kernels.patterns import ForPatterns
from attention.kernels.xformers import Xformers
from attention.masks.band import FULL, Band

__all__ = ["KERNELS", "Call", "Kernel", "Shape", "name_of", "names", "select"]


class Absent(Kernel):
    """A kernel whose package is not installed."""

    align = 1

    def __init__(self, name: str, summary: str, reason: str):
        self.name, self.summary, self.reason = name, summary, reason

    def missing(self, device: str) -> str | None:
        return self.reason

    def forward(self, *_: Any, **__: Any) -> Pair:
        raise UnsupportedCall(self.reason)


def _triton_kernels() -> list[Kernel]:
    try:
        from attention.kernels.triton_decode import DecodeKernel
        from attention.kernels.triton_flash import TritonFlash
    except ImportError:
        reason = "needs the package triton: pip install triton"
        return [
            Absent("triton", "our Triton flash attention", reason),
            Absent("decode", "our split-KV Triton kernel for few queries", reason),
        ]
    return [TritonFlash(), DecodeKernel()]


_ALL: list[Kernel] = [
    MATH,
    SdpaFlash(),
    SdpaCudnn(),
    SdpaEfficient(),
    Flash2(),
    Flash3(),
    Flash4(),
    CudnnFlex(),
    Xformers(),
    Flex(),
    *_triton_kernels(),
]
KERNELS: dict[str, Kernel] = {kernel.name: kernel for kernel in _ALL}

# The order of `auto`, fastest first as calibrated on an H200. Without flex, which compiles for each shape, and xformers, which runs
# FlashAttention-2's kernels with additional copies.
FASTEST = {
    "cuda": ("flash4", "sdpa_cudnn", "flash3", "flash2", "sdpa_efficient", "math"),
    "cpu": ("sdpa_flash", "math"),
}
# Packed calls with fewer tokens and at most this head dim take flash4 up to 1.8 times as long as flash2 there.
SHORT, SMALL = 4096, 64
# Kernels that take value heads of another size, but slower on a GPU than faster kernels do with padding.
SLOWER_THAN_PADDING = ("sdpa_efficient", "math")


def names() -> list[str]:
    return ["auto", *KERNELS]


def refusal(kernel: Kernel, shape: Shape, mask: Band) -> str | None:
    """Why a kernel cannot do this call on this machine, or None."""
    return kernel.missing(shape.device) or lacks(kernel, shape) or kernel.refuses(shape, mask)


def preference(shape: Shape, decode: bool = False) -> tuple[str, ...]:
    """The kernels that `auto` tries, in order: those of `FASTEST`. For value heads of another size those that take them come
    first."""
    order = FASTEST.get(shape.device, FASTEST["cpu"])
    if shape.softcap and shape.device == "cuda":
        order = (*order[:-1], "flex", order[-1])  # where flash4 cannot: its compilation is short beside math
    if shape.device == "cuda" and decode:
        order = ("decode", *order)
    elif shape.device == "cuda" and shape.packed and shape.head_dim <= SMALL and (shape.tokens or SHORT) < SHORT:
        order = tuple(dict.fromkeys(["flash2", *order]))
    if shape.v_head_dim == shape.head_dim:
        return order

    def place(name: str) -> int:
        if isinstance(made_for(name, shape), PaddedValues):
            return 1
        return 2 if shape.device == "cuda" and name in SLOWER_THAN_PADDING else 0

    return tuple(sorted(order, key=place))


def made_for(name: str, shape: Shape) -> Kernel:
    """The kernel of that name for calls of a shape: it pads where it does not take value heads of another size by itself."""
    kernel, plain = KERNELS[name], replace(shape, softcap=False)
    if shape.v_head_dim == shape.head_dim or not (lacks(kernel, plain) or kernel.refuses(plain, FULL)):
        return kernel
    padded = PaddedValues(kernel, shape)
    return kernel if padded.refuses(plain, FULL) and not lacks(kernel, plain) else padded


def select(name: str, shape: Shape, masks: tuple[Band, ...], decode: bool = False) -> Kernel:
    """The kernel of that name; for `auto` the fastest that supports all masks of a schedule. A kernel without value heads
    of another size pads (`PaddedValues`). decode: the call has few queries.

    Raises ValueError for an unknown name, and UnsupportedCall, which names other kernels, where the kernel cannot do
    the call."""
    if name == "auto":
        for candidate in preference(shape, decode):
            if _why_not(candidate, shape, masks) is None:
                return made_for(candidate, shape)
    if name not in KERNELS:
        raise ValueError(f"kernel={name!r} is not a kernel; {nearest(name, names())}")
    kernel = made_for(name, shape)
    for mask in masks:
        reason = refusal(kernel, shape, mask)
        if reason:
            can = [each for each in KERNELS if not any(refusal(made_for(each, shape), shape, m) for m in masks)]
            raise UnsupportedCall(f"kernel={name}: {reason}; kernels that can: {', '.join(can)}")
    return kernel


def select_for_patterns(name: str, shape: Shape, masks: tuple[Band, ...], one_each: bool) -> ForPatterns:
    """As `select`, for calls under patterns whose rectangles have bands like `masks`. one_each: no query sees two of the
    mask's rectangles. The same on all ranks, for it looks at the mask as a whole. Raises as `select`."""
    packed = replace(shape, packed=True)
    if name == "auto" and one_each and refusal(KERNELS["cudnn_flex"], packed, FULL) is None:
        name = "cudnn_flex"  # measured as the fastest for documents on an H200
    return ForPatterns(select(name, packed, masks), shape)


def passed_over(taken: str, shape: Shape, masks: tuple[Band, ...], decode: bool = False) -> dict[str, str]:
    """The kernels that `auto` prefers to `taken`, and why each could not be used."""
    order = preference(shape, decode)
    better = order[: order.index(taken)] if taken in order else ()
    return {name: reason for name in better if (reason := _why_not(name, shape, masks))}


def _why_not(name: str, shape: Shape, masks: tuple[Band, ...]) -> str | None:
    """Why `auto` does not take the kernel for these masks, or None."""
    for mask in masks:
        if reason := refusal(made_for(name, shape), shape, mask):
            return reason
    if name == "sdpa_cudnn" and shape.packed:
        return "one call per sequence: slower than a kernel that takes packed batches"
    return None
