"""The merge of two partial attention results in one Triton kernel. A program takes a few tokens of one head. The heads
of one token, which are adjacent in memory, run together."""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from attention.gpu.triton_launcher import MOST, TritonLauncher

ROWS = 32  # a cache line of the LSE
TILE = 4096  # elements per program: 32 per thread with 4 warps, four 16-byte loads of bf16 per part


@triton.jit(do_not_specialize=["n_tokens", "lse_b", "lse_h", "x_lse_b", "x_lse_h", "y_lse_b", "y_lse_h"])
def _merge(  # type: ignore[no-untyped-def]
    out, lse, x, x_lse, y, y_lse, n_tokens, heads, head_dim,
    out_b, out_t, out_h, x_b, x_t, x_h, y_b, y_t, y_h,
    lse_b, lse_h, lse_t, x_lse_b, x_lse_h, x_lse_t, y_lse_b, y_lse_h, y_lse_t,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    t = (tl.program_id(0) // heads) * ROWS + tl.arange(0, ROWS)
    h = (tl.program_id(0) % heads).to(tl.int64)
    b = tl.program_id(1).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    live = t < n_tokens
    mask = live[:, None] & (d < head_dim)[None, :]
    t = t.to(tl.int64)
    one = tl.load(x + b * x_b + h * x_h + t[:, None] * x_t + d[None, :], mask=mask, other=0.0)
    other = tl.load(y + b * y_b + h * y_h + t[:, None] * y_t + d[None, :], mask=mask, other=0.0)
    one_lse = tl.load(x_lse + b * x_lse_b + h * x_lse_h + t * x_lse_t, mask=live, other=float("-inf"))
    other_lse = tl.load(y_lse + b * y_lse_b + h * y_lse_h + t * y_lse_t, mask=live, other=float("-inf"))
    top = tl.maximum(one_lse, other_lse)
    safe = tl.where(top == float("-inf"), 0.0, top)
    w_one = tl.exp(one_lse - safe)
    w_other = tl.exp(other_lse - safe)
    total = w_one + w_other
    norm = tl.where(total == 0.0, 1.0, total)
    merged = one.to(norm.dtype) * (w_one / norm)[:, None] + other.to(norm.dtype) * (w_other / norm)[:, None]
    tl.debug_barrier()  # out may be a part, whose elements other threads read
    out_at = out + b * out_b + h * out_h + t[:, None] * out_t + d[None, :]
    tl.store(out_at, merged.to(out.dtype.element_ty), mask=mask)
    lse_at = lse + b * lse_b + h * lse_h + t * lse_t
    tl.store(lse_at, tl.where(total == 0.0, float("-inf"), safe + tl.log(norm)), mask=live)


def merge_triton(out: Tensor, lse: Tensor, a: Tensor, lse_a: Tensor, b: Tensor, lse_b: Tensor) -> None:
    """As `attention.reduction.lse_merge.merge`, on CUDA, or on a CPU under Triton's interpreter. Raises ValueError for
    strides."""
    if not all(x.stride(-1) == 1 for x in (out, a, b)):
        raise ValueError(
            f"strides {out.stride()}, {a.stride()}, {b.stride()}: the merge needs the head dim contiguous; "
            "call .contiguous()"
        )
    if out.numel() == 0:
        return
    strides = tuple(x.stride() for x in (out, a, b, lse, lse_a, lse_b))
    _start(out.shape, strides)(out, lse, a, lse_a, b, lse_b)


@lru_cache(maxsize=MOST)
def _start(shape: torch.Size, strides: tuple[tuple[int, ...], ...]) -> TritonLauncher:
    """strides: of out, of the two parts, and of their LSEs."""
    n_tokens, heads, head_dim = shape[-3:]
    batch = shape[0] if len(shape) == 4 else 1
    block_d = triton.next_power_of_2(head_dim)
    rows = min(ROWS, max(1, TILE // block_d))
    numbers = [n_tokens, heads, head_dim]
    for each in [x[:-1] for x in strides[:3]] + list(strides[3:]):  # by batch, then token and head, or head and token
        numbers += [each[0] if batch > 1 else 0, *each[-2:]]
    grid = (triton.cdiv(n_tokens, rows) * heads, batch)
    return TritonLauncher(_merge, grid, tuple(numbers), ROWS=rows, BLOCK_D=block_d)
