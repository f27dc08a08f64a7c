"""The merge of n partial attention results over disjoint keys in one Triton kernel (`merge` does two, in place). A
program takes a few tokens of one head and loads many of their parts at once, since a decode has few rows and many
parts."""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from attention.gpu.triton_launcher import MOST, TritonLauncher

TILE = 4096  # fp32 elements of [rows, parts, head dim] per program: 32 registers per thread with 4 warps


@triton.jit
def _merge_n(  # type: ignore[no-untyped-def]
    parts, lses, out, lse, n, n_tokens, head_dim,
    parts_n, parts_b, parts_t, parts_h, lses_n, lses_b, lses_h, lses_t,
    out_b, out_t, out_h, lse_b, lse_h, lse_t,
    ROWS: tl.constexpr, PARTS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    h = tl.program_id(1).to(tl.int64)
    b = tl.program_id(2).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    live = t < n_tokens
    t = t.to(tl.int64)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
    lses_at = lses + b * lses_b + h * lses_h + t[:, None] * lses_t
    parts_at = parts + b * parts_b + h * parts_h + t[:, None, None] * parts_t + d[None, None, :]
    for first in range(0, n, PARTS):
        p = first + tl.arange(0, PARTS)
        here = live[:, None] & (p < n)[None, :]
        p = p.to(tl.int64)
        x = tl.load(lses_at + p[None, :] * lses_n, mask=here, other=float("-inf"))
        y = tl.load(
            parts_at + p[None, :, None] * parts_n, mask=here[:, :, None] & (d < head_dim)[None, None, :], other=0.0
        )
        higher = tl.maximum(top, tl.max(x, 1))
        safe = tl.where(higher == float("-inf"), 0.0, higher)
        kept = tl.exp(top - safe)
        w = tl.exp(x - safe[:, None])
        acc = acc * kept[:, None] + tl.sum(y.to(tl.float32) * w[:, :, None], 1)
        total = total * kept + tl.sum(w, 1)
        top = higher
    norm = tl.where(total == 0.0, 1.0, total)
    out_at = out + b * out_b + t[:, None] * out_t + h * out_h + d[None, :]
    result = (acc / norm[:, None]).to(out.dtype.element_ty)
    tl.store(out_at, result, mask=live[:, None] & (d < head_dim)[None, :])
    tl.store(lse + b * lse_b + h * lse_h + t * lse_t, tl.where(total == 0.0, top, top + tl.log(norm)), mask=live)


def merge_n_triton(parts: Tensor, lses: Tensor, out: Tensor, lse: Tensor) -> None:
    """Writes `attention.reduction.lse_merge.merge_n` to `(out, lse)`, on CUDA, or on a CPU under Triton's interpreter.
    Sums in fp32. Raises ValueError for strides."""
    if parts.stride(-1) != 1 or out.stride(-1) != 1:
        raise ValueError(
            f"strides {parts.stride()}, {out.stride()}: the merge needs the head dim contiguous; call .contiguous()"
        )
    if out.numel():
        _start(parts.shape, (parts.stride(), lses.stride(), out.stride(), lse.stride()))(parts, lses, out, lse)


@lru_cache(maxsize=MOST)
def _start(shape: torch.Size, strides: tuple[tuple[int, ...], ...]) -> TritonLauncher:
    n, batch, n_tokens, heads, head_dim = shape
    block_d = triton.next_power_of_2(head_dim)
    at_once = min(triton.next_power_of_2(max(n, 1)), max(1, TILE // block_d))
    rows = min(triton.next_power_of_2(n_tokens), max(1, TILE // (block_d * at_once)))
    of_parts, of_lses, of_out, of_lse = strides
    numbers = n, n_tokens, head_dim, *of_parts[:4], *of_lses, *of_out[:3], *of_lse
    grid = triton.cdiv(n_tokens, rows), heads, batch
    return TritonLauncher(_merge_n, grid, numbers, ROWS=rows, PARTS=at_once, BLOCK_D=block_d)
