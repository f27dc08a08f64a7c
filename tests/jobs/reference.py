"""What jobs compare with."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from attention.kernels import KERNELS, Call
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


DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}


KNOWN = 64  # calls whose results are kept


def inputs(case: dict[str, Any], dtype: str, device: torch.device) -> list[torch.Tensor]:
    """q, k, v and dout of a case, the same on every rank."""
    lead = (case["tokens"],) if case.get("packs") else (case.get("batch", 2), case["tokens"])
    heads = (case["heads"], case["kv_heads"], case["kv_heads"], case["heads"])
    generator = torch.Generator().manual_seed(crc32(json.dumps(case, sort_keys=True).encode()))
    return [torch.randn(*lead, h, case["head_dim"], generator=generator).to(device, DTYPES[dtype]) for h in heads]


_known: dict[tuple[Any, ...], Any] = {}


def by_kernel(
    name: str, case: dict[str, Any], dtype: str, computed_in: torch.dtype, device: torch.device
) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """(out, dq, dk, dv) and lse of one kernel call on the global inputs. They are kept, since all variants share their
    cases and the reference takes longer than the variants."""
    key = (name, json.dumps(case, sort_keys=True), dtype, computed_in, device)
    if key not in _known:
        if len(_known) == KNOWN:
            _known.pop(next(iter(_known)))
        q, k, v, dout = (x.to(computed_in) for x in inputs(case, dtype, device))
        mask = Band.of(case["causal"], tuple(case.get("window", (-1, -1))))
        call = call_of(mask, case.get("packs"), case["head_dim"], device, case.get("scale"))
        kernel = KERNELS[name]
        out, lse = kernel.forward(q, k, v, call)
        _known[key] = (out, *kernel.backward(dout, q, k, v, out, lse, call)), lse
    return _known[key]


def call_of(mask: Band, packs: list[int] | None, dim: int, device: torch.device, scale: float | None = None) -> Call:
    scale = dim**-0.5 if scale is None else scale
    if packs is None:
        return Call(scale, mask)
    lengths = [b - a for a, b in pairwise(packs)]
    return Call(scale).of_packed(mask, lengths, lengths, device)
