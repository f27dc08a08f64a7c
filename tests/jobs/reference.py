"""What jobs share: equal inputs on every rank, what results are compared with, and refusals."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from attention.masks.band import Band
from runner.launch.rank import Rank
from tests.support.naive import attention as plain
from tests.support.naive import kept


def drawn(me: Rank, *shapes: Sequence[int], seed: int = 0, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Random tensors, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(me.device, dtype) for shape in shapes]


def rel(x: Tensor, reference: Tensor) -> float:
    """Relative L2 error; inf for NaN, which `max` would ignore."""
    error = float((x.detach().double() - reference.double()).norm() / reference.double().norm())
    return math.inf if math.isnan(error) else error


def exact(q: Tensor, k: Tensor, v: Tensor, mask: Band) -> Tensor:
    """out of dense `[B, S, H, D]` tensors in fp64."""
    keep = kept(mask, q.shape[1], k.shape[1], q.device)
    return plain(q.detach().double(), k.detach().double(), v.detach().double(), q.shape[-1] ** -0.5, keep)[0]


def refusal(call: Callable[[], object]) -> str:
    """The message with which a call is refused; empty where it is not."""
    try:
        call()
    except (ValueError, RuntimeError) as error:
        return str(error)
    return ""


def give_kernel(fn: Any, kernel: Any) -> None:
    """Put a kernel into all plans of a function."""
    for plan in fn.plans.values():
        object.__setattr__(plan, "kernel", kernel)


def spoil(device: torch.device) -> None:
    """Fill free memory with NaN: on a CPU, where calls are smaller and filling takes longer, less."""
    for size in (1 << 10, 1 << 14, 1 << 17, 1 << 20, *([1 << 22] if device.type == "cuda" else [])):
        torch.full((size,), torch.nan, device=device)
