"""Merges of partial attention results, and the gradient of attention sinks, in Triton kernels. A program takes a few tokens of
one head.

`_merge` does two parts, in place if asked. Sinks are a part without values. The heads of one token, which are adjacent in memory,
run together. `_merge_n` does n parts, many at once, since a decode has few rows and many parts."""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from attention.gpu.triton_launcher import MOST, TritonLauncher

ROWS = 32  # a cache line of the LSE
# elements per program: 32 per thread with 4 warps, four 16-byte loads of bf16 per part; of `_merge_n` [rows, parts, head dim]
TILE = 4096
TURNS = 16  # tiles that a program of the sinks' gradient adds up


@triton.jit
def tile_at(x, strides, b, t, h, c):  # type: ignore[no-untyped-def]
    """Where the columns c of the tokens t of a head lie. strides: by batch, token and head."""
    return x + b * strides[0] + t[:, None] * strides[1] + h * strides[2] + c[None, :]


@triton.jit
def finite(x):  # type: ignore[no-untyped-def]
    """What to subtract from exponents whose largest is x."""
    return tl.where(x == float("-inf"), 0.0, x)


@triton.jit
def normalised(top, total):  # type: ignore[no-untyped-def]
    """(the divisor, the LSE) of a sum of exponentials relative to `top`."""
    norm = tl.where(total == 0.0, 1.0, total)
    return norm, tl.where(total == 0.0, float("-inf"), top + tl.log(norm))


@triton.jit(do_not_specialize=["n_tokens", "lse_b", "lse_h", "x_lse_b", "x_lse_h", "y_lse_b", "y_lse_h"])
def _merge(  # type: ignore[no-untyped-def]
    out, lse, x, x_lse, y, y_lse, n_tokens, heads, head_dim, out_strides, x_strides, y_strides,
    lse_b, lse_h, lse_t, x_lse_b, x_lse_h, x_lse_t, y_lse_b, y_lse_h, y_lse_t,
    VALUES: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    t = (tl.program_id(0) // heads) * ROWS + tl.arange(0, ROWS)
    h = (tl.program_id(0) % heads).to(tl.int64)
    b = tl.program_id(1).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    live = t < n_tokens
    mask = live[:, None] & (d < head_dim)[None, :]
    t = t.to(tl.int64)
    one = tl.load(tile_at(x, x_strides, b, t, h, d), mask=mask, other=0.0)
    if VALUES:
        other = tl.load(tile_at(y, y_strides, b, t, h, d), mask=mask, other=0.0)
    one_lse = tl.load(x_lse + b * x_lse_b + h * x_lse_h + t * x_lse_t, mask=live, other=float("-inf"))
    other_lse = tl.load(y_lse + b * y_lse_b + h * y_lse_h + t * y_lse_t, mask=live, other=float("-inf")).to(
        one_lse.dtype
    )
    top = finite(tl.maximum(one_lse, other_lse))
    w_one = tl.exp(one_lse - top)
    w_other = tl.exp(other_lse - top)
    norm, total = normalised(top, w_one + w_other)
    merged = one.to(norm.dtype) * (w_one / norm)[:, None]
    if VALUES:
        merged = merged + other.to(norm.dtype) * (w_other / norm)[:, None]
    tl.debug_barrier()  # out may be a part, whose elements other threads read
    tl.store(tile_at(out, out_strides, b, t, h, d), merged.to(out.dtype.element_ty), mask=mask)
    tl.store(lse + b * lse_b + h * lse_h + t * lse_t, total, mask=live)


def merge_triton(out: Tensor, lse: Tensor, a: Tensor, lse_a: Tensor, b: Tensor, lse_b: Tensor) -> None:
    """As `attention.reduction.parts.merge`, on CUDA, or on a CPU under Triton's interpreter. Raises ValueError for
    strides."""
    check_head_dim(out, a, b)
    if out.numel():
        strides = tuple([x.stride() for x in (out, a, b, lse, lse_a, lse_b)])
        _start(out.shape, strides, True)(out, lse, a, lse_a, b, lse_b)


def apply_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> None:
    """Changes out `[B, S, H, Dv]` or `[T, H, Dv]` and its LSE `[B, H, S]` or `[H, T]` in place. out: a contiguous last dim; sinks:
    contiguous `[H]`."""
    of_out, of_lse = out.stride(), lse.stride()
    _start(out.shape, (of_out, of_out, of_out, of_lse, of_lse, (0, 1, 0)), False)(out, lse, out, lse, out, sinks)


@lru_cache(maxsize=MOST)
def _start(shape: torch.Size, strides: tuple[tuple[int, ...], ...], values: bool) -> TritonLauncher:
    """strides: of out, of the two parts, and of their LSEs. values: whether the second part has any."""
    batch, sizes, block_d, rows = _sizes(shape)
    numbers = (
        *sizes,
        *(_steps(batch, x) for x in strides[:3]),
        *(step for x in strides[3:] for step in _steps(batch, x, -2)),
    )
    grid = triton.cdiv(sizes[0], rows) * sizes[1], batch
    return TritonLauncher(_merge, grid, numbers, VALUES=values, ROWS=rows, BLOCK_D=block_d)


def check_head_dim(*tensors: Tensor) -> None:
    for x in tensors:
        if x.stride(-1) != 1 and x.numel():
            raise ValueError(f"strides {x.stride()}: the kernel needs the head dim contiguous; call .contiguous()")


def _sizes(shape: torch.Size) -> tuple[int, tuple[int, int, int], int, int]:
    """(batch, (tokens, heads, head dim), the head dim of a tile, its rows)."""
    n_tokens, heads, head_dim = shape[-3:]
    block_d = triton.next_power_of_2(head_dim)
    return shape[0] if len(shape) == 4 else 1, (n_tokens, heads, head_dim), block_d, min(ROWS, max(1, TILE // block_d))


def _steps(batch: int, strides: tuple[int, ...], first: int = -3) -> tuple[int, ...]:
    """By batch, then token and head; with first=-2, of an LSE, by batch, then head and token."""
    return strides[0] if batch > 1 else 0, *strides[first:][:2]


@triton.jit
def _merge_n(  # type: ignore[no-untyped-def]
    parts, lses, out, lse, n, n_tokens, head_dim, parts_strides, lses_strides, out_strides, lse_strides,
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
    lses_at = lses + b * lses_strides[1] + h * lses_strides[2] + t[:, None] * lses_strides[3]
    parts_at = tile_at(parts, parts_strides[1:], b, t, h, d)[:, None, :]
    for first in range(0, n, PARTS):
        p = first + tl.arange(0, PARTS)
        here = live[:, None] & (p < n)[None, :]
        p = p.to(tl.int64)
        x = tl.load(lses_at + p[None, :] * lses_strides[0], mask=here, other=float("-inf"))
        mask = here[:, :, None] & (d < head_dim)[None, None, :]
        y = tl.load(parts_at + p[None, :, None] * parts_strides[0], mask=mask, other=0.0)
        higher = tl.maximum(top, tl.max(x, 1))
        kept = tl.exp(top - finite(higher))
        w = tl.exp(x - finite(higher)[:, None])
        acc = acc * kept[:, None] + tl.sum(y.to(tl.float32) * w[:, :, None], 1)
        total = total * kept + tl.sum(w, 1)
        top = higher
    norm, merged_lse = normalised(top, total)
    merged = (acc / norm[:, None]).to(out.dtype.element_ty)
    tl.store(tile_at(out, out_strides, b, t, h, d), merged, mask=live[:, None] & (d < head_dim)[None, :])
    tl.store(lse + b * lse_strides[0] + h * lse_strides[1] + t * lse_strides[2], merged_lse, mask=live)


def merge_n_triton(parts: Tensor, lses: Tensor, out: Tensor, lse: Tensor) -> None:
    """Writes `attention.reduction.parts.merge_n` to `(out, lse)`, on CUDA, or on a CPU under Triton's interpreter.
    Sums in fp32. Raises ValueError for strides."""
    check_head_dim(parts, out)
    if out.numel():
        _start_n(parts.shape, (parts.stride(), lses.stride(), out.stride(), lse.stride()))(parts, lses, out, lse)


@lru_cache(maxsize=MOST)
def _start_n(shape: torch.Size, strides: tuple[tuple[int, ...], ...]) -> TritonLauncher:
    n, batch, n_tokens, heads, head_dim = shape
    block_d = triton.next_power_of_2(head_dim)
    at_once = min(triton.next_power_of_2(max(n, 1)), max(1, TILE // block_d))
    rows = min(triton.next_power_of_2(n_tokens), max(1, TILE // (block_d * at_once)))
    grid = triton.cdiv(n_tokens, rows), heads, batch
    numbers = n, n_tokens, head_dim, *strides
    return TritonLauncher(_merge_n, grid, numbers, ROWS=rows, PARTS=at_once, BLOCK_D=block_d)


@triton.jit(do_not_specialize=["n_tokens", "lse_b", "lse_h"])
def _gradient(  # type: ignore[no-untyped-def]
    partial, dout, out, lse, sinks, n_tokens, heads, head_dim, parts, dout_strides, out_strides, lse_b, lse_h, lse_t,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr, TURNS: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0) // heads
    h = (tl.program_id(0) % heads).to(tl.int64)
    b = tl.program_id(1).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    sink = tl.load(sinks + h).to(tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for turn in range(TURNS):
        t = (part * TURNS + turn) * ROWS + tl.arange(0, ROWS)
        live = t < n_tokens
        mask = live[:, None] & (d < head_dim)[None, :]
        t = t.to(tl.int64)
        x = tl.load(tile_at(out, out_strides, b, t, h, d), mask=mask, other=0.0)
        y = tl.load(tile_at(dout, dout_strides, b, t, h, d), mask=mask, other=0.0)
        after = tl.load(lse + b * lse_b + h * lse_h + t * lse_t, mask=live, other=float("inf"))
        share = tl.where(after == float("-inf"), 0.0, tl.exp(sink - after))
        total -= share * tl.sum(x.to(tl.float32) * y.to(tl.float32), 1)
    tl.store(partial + (b * parts + part) * heads + h, tl.sum(total, 0))


def sinks_gradient(dout: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """`[H]` in the dtype of the sinks, summed in fp32 in a fixed order. out and lse: with the sinks; shapes as in `apply_sinks`."""
    start, parts = _gradient_start(out.shape, (dout.stride(), out.stride(), lse.stride()))
    partial = torch.empty(parts, len(sinks), dtype=torch.float32, device=out.device)
    start(partial, dout, out, lse, sinks)
    return partial.sum(0).to(sinks.dtype)


@lru_cache(maxsize=MOST)
def _gradient_start(shape: torch.Size, strides: tuple[tuple[int, ...], ...]) -> tuple[TritonLauncher, int]:
    """(the launch, its partial sums)."""
    batch, sizes, block_d, rows = _sizes(shape)
    parts = triton.cdiv(sizes[0], rows * TURNS)
    numbers = *sizes, parts, *(_steps(batch, x) for x in strides[:2]), *_steps(batch, strides[2], -2)
    grid = parts * sizes[1], batch
    return TritonLauncher(_gradient, grid, numbers, ROWS=rows, BLOCK_D=block_d, TURNS=TURNS), parts * batch
