"""What jobs compare with."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attention.masks.band import Band
from tests.support.naive import attention as plain
from tests.support.naive import kept


def rel(x: Tensor, reference: Tensor) -> float:
    """Relative L2 error; inf for NaN, which `max` would ignore."""
    error = float((x.detach().double() - reference.double()).norm() / reference.double().norm())
    return math.inf if math.isnan(error) else error


def exact(q: Tensor, k: Tensor, v: Tensor, mask: Band, dout: Tensor | None = None) -> list[Tensor]:
    """[out, lse] of dense `[B, S, H, D]` tensors in fp64, and with dout the gradients of q, k, v."""
    leaves = [x.detach().double().requires_grad_(dout is not None) for x in (q, k, v)]
    out, lse = plain(*leaves, q.shape[-1] ** -0.5, kept(mask, q.shape[1], k.shape[1], q.device))
    gradients = () if dout is None else torch.autograd.grad(out, leaves, dout.double())
    return [out.detach(), lse.detach(), *gradients]


def spoil(device: torch.device) -> None:
    """Fill free memory with NaN: on a CPU, where calls are smaller and filling takes longer, less."""
    for size in (1 << 10, 1 << 14, 1 << 17, 1 << 20, *([1 << 22] if device.type == "cuda" else [])):
        torch.full((size,), torch.nan, device=device)
