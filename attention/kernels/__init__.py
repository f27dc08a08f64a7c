"""Local kernels by name, and `auto`."""

from __future__ import annotations

from dataclasses import replace

from attention.errors import UnsupportedCall, nearest
from attention.kernels.aten import FLASH2, SdpaCudnn, SdpaEfficient, SdpaFlash
from attention.kernels.cudnn_flex import CudnnFlex
from attention.kernels.flash3 import Flash3
from attention.kernels.flash4 import Flash4
from attention.kernels.flex import Flex
from attention.kernels.interface import Call, Kernel, Shape, lacks, name_of
from attention.kernels.math import MATH
from attention.kernels.padded_values import PaddedValues
from attention.kernels.patterns import ForPatterns
from attention.kernels.xformers import Xformers
from attention.masks.band import FULL, Band

__all__ = ["KERNELS", "Call", "Kernel", "Shape", "name_of", "names", "select"]


class Absent(Kernel):
    """A kernel of ours where Triton is not installed."""

    summary = "a Triton kernel of ours"

    def __init__(self, name: str):
        self.name = name

    def missing(self, device: str) -> str | None:
        return "needs the package triton: pip install triton"


def _triton_kernels() -> list[Kernel]:
    try:
        from attention.kernels.triton_decode import DecodeKernel
        from attention.kernels.triton_flash import TritonFlash
    except ImportError:
        return [Absent("triton"), Absent("decode")]
    return [TritonFlash(), DecodeKernel()]


_EVERY = (MATH, SdpaFlash(), SdpaCudnn(), SdpaEfficient(), FLASH2, Flash3(), Flash4(), CudnnFlex(), Xformers(), Flex())
KERNELS: dict[str, Kernel] = {kernel.name: kernel for kernel in (*_EVERY, *_triton_kernels())}

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
    on_gpu = shape.device == "cuda"
    order = FASTEST["cuda" if on_gpu else "cpu"]
    if on_gpu and shape.softcap:
        order = (*order[:-1], "flex", order[-1])  # where flash4 cannot: its compilation is short beside math
    if on_gpu and decode:
        order = ("decode", *order)
    elif on_gpu and shape.packed:
        first = ["flash2"] if shape.head_dim <= SMALL and (shape.tokens or SHORT) < SHORT else []
        # one call per sequence is slower than a kernel that takes packed batches
        order = tuple(name for name in dict.fromkeys([*first, *order]) if name != "sdpa_cudnn")
    if shape.v_head_dim == shape.head_dim:
        return order

    def place(name: str) -> int:
        return 1 if isinstance(made_for(name, shape), PaddedValues) else 2 * (on_gpu and name in SLOWER_THAN_PADDING)

    return tuple(sorted(order, key=place))


def made_for(name: str, shape: Shape) -> Kernel:
    """The kernel of that name for calls of a shape: it pads where it does not take value heads of another size by itself."""
    kernel, plain = KERNELS[name], replace(shape, softcap=False)
    if shape.v_head_dim == shape.head_dim:
        return kernel
    padded = PaddedValues(kernel, shape)
    helps = kernel.refuses(plain, FULL) and not padded.refuses(plain, FULL)
    return padded if lacks(kernel, plain) or helps else kernel


def why_not(name: str, shape: Shape, masks: tuple[Band, ...]) -> str | None:
    """Why the kernel of that name cannot do a call under these masks, or None."""
    kernel = made_for(name, shape)
    return next(filter(None, (refusal(kernel, shape, mask) for mask in masks)), None)


def select(name: str, shape: Shape, masks: tuple[Band, ...], decode: bool = False) -> Kernel:
    """The kernel of that name; for `auto` the fastest that supports all masks of a schedule. A kernel without value heads
    of another size pads (`PaddedValues`). decode: the call has few queries.

    Raises ValueError for an unknown name, and UnsupportedCall, which names other kernels, where the kernel cannot do
    the call."""
    if name == "auto":
        name = next(x for x in preference(shape, decode) if not why_not(x, shape, masks))  # math does every call
    if name not in KERNELS:
        raise ValueError(f"kernel={name!r} is not a kernel; {nearest(name, names())}")
    if reason := why_not(name, shape, masks):
        able = [x for x in KERNELS if not why_not(x, shape, masks)]
        raise UnsupportedCall(f"kernel={name}: {reason}; kernels that can: {', '.join(able)}")
    return made_for(name, shape)


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
    return {name: reason for name in better if (reason := why_not(name, shape, masks))}
