"""The last step of a fused tree reduction: one Triton kernel reads every rank's `[out, lse]` where it lies, through peer
pointers, and merges them. A program does one row of one head."""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from attention.kernels.start import MOST, Start


@triton.jit
def _merge_peers(  # type: ignore[no-untyped-def]
    out, lse, pointers, offset, rows, head_dim, queries, heads, WORLD: tl.constexpr, BLOCK_D: tl.constexpr
):
    row = tl.program_id(0)
    d = tl.arange(0, BLOCK_D)
    live = d < head_dim
    top = tl.full((), float("-inf"), tl.float32)
    den = tl.zeros((), tl.float32)
    acc = tl.zeros((BLOCK_D,), tl.float32)
    table = pointers.to(tl.pointer_type(tl.uint64))
    for peer in range(WORLD):
        base = tl.load(table + peer).to(tl.pointer_type(tl.float32)) + offset
        at = base + row * (head_dim + 1)
        part_lse = tl.load(at + head_dim)
        part = tl.load(at + d, mask=live, other=0.0)
        new = tl.maximum(top, part_lse)
        safe = tl.where(new == float("-inf"), 0.0, new)
        keep = tl.exp(top - safe)
        add = tl.exp(part_lse - safe)
        acc = acc * keep + part * add
        den = den * keep + add
        top = new
    norm = tl.where(den == 0.0, 1.0, den)
    tl.store(out + row * head_dim + d, (acc / norm).to(out.dtype.element_ty), mask=live)
    # rows are [B, Sq, H], the LSE is [B, H, Sq]
    h = row % heads
    i = (row // heads) % queries
    b = row // (heads * queries)
    total = tl.where(den == 0.0, float("-inf"), top + tl.log(norm))
    tl.store(lse + (b * heads + h) * queries + i, total)


def merge_peers(pointers: int, offset: int, world: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """pointers: device address of a table of `world` device addresses, each of fp32 `[..., B, Sq, H, D + 1]`, of which
    the partial results begin `offset` elements on. like: `[B, Sq, H, D]`, the shape and dtype of out. Returns
    (out, fp32 lse `[B, H, Sq]`)."""
    batch, queries, heads, _ = like.shape
    out = torch.empty_like(like, memory_format=torch.contiguous_format)
    lse = torch.empty(batch, heads, queries, dtype=torch.float32, device=like.device)
    _start(like.shape, pointers, offset, world)(out, lse)
    return out, lse


@lru_cache(maxsize=MOST)
def _start(shape: torch.Size, pointers: int, offset: int, world: int) -> Start:
    batch, queries, heads, head_dim = shape
    rows = batch * queries * heads
    numbers = (pointers, offset, rows, head_dim, queries, heads)
    return Start(_merge_peers, (rows,), numbers, WORLD=world, BLOCK_D=triton.next_power_of_2(head_dim))
