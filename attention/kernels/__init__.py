"""Local kernels by name, and `auto`."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from attention.kernels.aten import Flash2, SdpaCudnn, SdpaEfficient, SdpaFlash, name_of
from attention.kernels.flash3 import Flash3
from attention.kernels.flash4 import Flash4
from attention.kernels.flex import Flex
from attention.kernels.interface import Call, Kernel, Pair, Shape, Triple, UnsupportedCall
from attention.kernels.math import Math
from attention.kernels.xformers import Xformers
from attention.masks.band import Mask
from attention.measured import rates
from attention.variants.registry import nearest

__all__ = ["KERNELS", "Call", "Kernel", "Shape", "UnsupportedCall", "name_of", "names", "select"]


class Absent:
    """A kernel whose package is not installed."""

    align = 1

    def __init__(self, name: str, summary: str, reason: str):
        self.name, self.summary, self.reason = name, summary, reason

    def missing(self, device: str) -> str | None:
        return self.reason

    def refuses(self, shape: Shape, mask: Mask) -> str | None:
        return self.reason

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: Call, into: Pair | None = None) -> Pair:
        raise UnsupportedCall(self.reason)

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        call: Call,
        into: Triple | None = None,
    ) -> Triple:
        raise UnsupportedCall(self.reason)


def _ours() -> list[Kernel]:
    try:
        from attention.kernels.triton_decode import Decode
        from attention.kernels.triton_flash import TritonFlash
    except ImportError:
        reason = "needs the package triton: pip install triton"
        return [
            Absent("triton", "our Triton flash attention", reason),
            Absent("decode", "our split-KV Triton kernel for few queries", reason),
        ]
    return [TritonFlash(), Decode()]


_ALL: list[Kernel] = [
    Math(),
    SdpaFlash(),
    SdpaCudnn(),
    SdpaEfficient(),
    Flash2(),
    Flash3(),
    Flash4(),
    Xformers(),
    Flex(),
    *_ours(),
]
KERNELS: dict[str, Kernel] = {kernel.name: kernel for kernel in _ALL}

# what `auto` takes, fastest first, where the table of measured rates does not know the GPU. Not flex, which compiles for
# each shape, nor xformers, which has FlashAttention-2's kernels and copies.
FASTEST = {
    "cuda": ("flash4", "sdpa_cudnn", "flash3", "flash2", "sdpa_efficient", "math"),
    "cpu": ("sdpa_flash", "math"),
}


def names() -> list[str]:
    return ["auto", *KERNELS]


def refusal(kernel: Kernel, shape: Shape, mask: Mask) -> str | None:
    """Why a kernel does not do this call here, or None."""
    return kernel.missing(shape.device) or kernel.refuses(shape, mask)


def preference(shape: Shape, masks: tuple[Mask, ...], decode: bool = False) -> tuple[str, ...]:
    """The kernels that `auto` tries, in order: those measured for such calls on this GPU, then the rest of `FASTEST`."""
    fastest = FASTEST.get(shape.device, FASTEST["cpu"])
    if shape.device != "cuda":
        return fastest
    call = rates.class_of(shape, masks)
    measured = rates.order(rates.table(), gpu_name(), call, shape.backward) if call else []
    first = ("decode",) if decode else ()
    return tuple(dict.fromkeys([*first, *(name for name in measured if name in fastest), *fastest]))


@cache
def gpu_name() -> str:
    """As the table of rates calls this machine's GPU; empty where there is none."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else ""


def select(name: str, shape: Shape, masks: tuple[Mask, ...], decode: bool = False) -> Kernel:
    """The kernel of that name, or for `auto` the fastest that does all of a schedule's masks; `decode`: with few queries.

    Raises ValueError for an unknown name, UnsupportedCall when the kernel can't do the call, naming those that can."""
    if name == "auto":
        for candidate in preference(shape, masks, decode):
            if _why_not(candidate, shape, masks) is None:
                return KERNELS[candidate]
    if name not in KERNELS:
        raise ValueError(f"kernel={name!r} is not a kernel; {nearest(name, names())}")
    for mask in masks:
        reason = refusal(KERNELS[name], shape, mask)
        if reason:
            can = [k.name for k in KERNELS.values() if not any(refusal(k, shape, m) for m in masks)]
            raise UnsupportedCall(f"kernel={name}: {reason}; kernels that can: {', '.join(can)}")
    return KERNELS[name]


def passed_over(taken: str, shape: Shape, masks: tuple[Mask, ...], decode: bool = False) -> dict[str, str]:
    """The kernels that `auto` would rather have taken than `taken`, and why it could not."""
    order = preference(shape, masks, decode)
    better = order[: order.index(taken)] if taken in order else ()
    return {name: reason for name in better if (reason := _why_not(name, shape, masks))}


def _why_not(name: str, shape: Shape, masks: tuple[Mask, ...]) -> str | None:
    """Why `auto` does not take the kernel for all of the masks, or None."""
    for mask in masks:
        if reason := refusal(KERNELS[name], shape, mask):
            return reason
    if name == "sdpa_cudnn" and shape.packed:
        return "one call a sequence: slower than a kernel that takes the pack"
    return None
