"""Attention sinks in Triton kernels: applied to a final result in place, and their gradient. See `attention.reduction.sinks`."""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from attention.gpu.triton_launcher import MOST, TritonLauncher

ROWS = 32  # a cache line of the LSE
TILE = 4096  # elements of out per program
TURNS = 16  # tiles that a program of the gradient adds up


@triton.jit(do_not_specialize=["n_tokens", "lse_b", "lse_h"])
def _apply(  # type: ignore[no-untyped-def]
    out, lse, sinks, n_tokens, heads, head_dim, out_b, out_t, out_h, lse_b, lse_h, lse_t,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    t = (tl.program_id(0) // heads) * ROWS + tl.arange(0, ROWS)
    h = (tl.program_id(0) % heads).to(tl.int64)
    b = tl.program_id(1).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    live = t < n_tokens
    mask = live[:, None] & (d < head_dim)[None, :]
    t = t.to(tl.int64)
    lse_at = lse + b * lse_b + h * lse_h + t * lse_t
    before = tl.load(lse_at, mask=live, other=float("-inf"))
    sink = tl.load(sinks + h).to(before.dtype)
    top = tl.maximum(before, sink)
    safe = tl.where(top == float("-inf"), 0.0, top)
    total = tl.exp(before - safe) + tl.exp(sink - safe)
    after = tl.where(total == 0.0, float("-inf"), safe + tl.log(total))
    share = tl.where(total == 0.0, 0.0, tl.exp(before - safe) / total)
    at = out + b * out_b + h * out_h + t[:, None] * out_t + d[None, :]
    x = tl.load(at, mask=mask, other=0.0)
    tl.store(at, (x.to(before.dtype) * share[:, None]).to(out.dtype.element_ty), mask=mask)
    tl.store(lse_at, after, mask=live)


@triton.jit(do_not_specialize=["n_tokens", "lse_b", "lse_h"])
def _gradient(  # type: ignore[no-untyped-def]
    partial, dout, out, lse, sinks, n_tokens, heads, head_dim, parts,
    dout_b, dout_t, dout_h, out_b, out_t, out_h, lse_b, lse_h, lse_t,
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
        x = tl.load(out + b * out_b + h * out_h + t[:, None] * out_t + d[None, :], mask=mask, other=0.0)
        y = tl.load(dout + b * dout_b + h * dout_h + t[:, None] * dout_t + d[None, :], mask=mask, other=0.0)
        after = tl.load(lse + b * lse_b + h * lse_h + t * lse_t, mask=live, other=float("inf"))
        share = tl.where(after == float("-inf"), 0.0, tl.exp(sink - after))
        total -= share * tl.sum(x.to(tl.float32) * y.to(tl.float32), 1)
    tl.store(partial + (b * parts + part) * heads + h, tl.sum(total, 0))


@triton.jit
def _total(out, partial, parts, heads, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    h = tl.program_id(0)
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, parts, BLOCK):
        p = first + tl.arange(0, BLOCK)
        total += tl.load(partial + p.to(tl.int64) * heads + h, mask=p < parts, other=0.0)
    tl.store(out + h, tl.sum(total, 0).to(out.dtype.element_ty))


def apply_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> None:
    """Changes out `[B, S, H, Dv]` or `[T, H, Dv]` and its LSE `[B, H, S]` or `[H, T]` in place. out: a contiguous last dim; sinks:
    contiguous `[H]`."""
    _apply_start(out.shape, (out.stride(), lse.stride()))(out, lse, sinks)


@lru_cache(maxsize=MOST)
def _apply_start(shape: torch.Size, strides: tuple[tuple[int, ...], ...]) -> TritonLauncher:
    sizes, batch, block_d, rows = _sizes(shape)
    grid = (triton.cdiv(shape[-3], rows) * shape[-2], batch)
    return TritonLauncher(_apply, grid, (*sizes, *_steps(batch, *strides)), ROWS=rows, BLOCK_D=block_d)


def sinks_gradient(dout: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """`[H]` in the dtype of the sinks, summed in fp32 in a fixed order. out and lse: with the sinks; shapes as in `apply_sinks`."""
    found = torch.empty_like(sinks)
    first, second, shape = _gradient_start(out.shape, (dout.stride(), out.stride(), lse.stride()))
    partial = torch.empty(shape, dtype=torch.float32, device=out.device)
    first(partial, dout, out, lse, sinks)
    second(found, partial)
    return found


@lru_cache(maxsize=MOST)
def _gradient_start(
    shape: torch.Size, strides: tuple[tuple[int, ...], ...]
) -> tuple[TritonLauncher, TritonLauncher, tuple[int, int]]:
    sizes, batch, block_d, rows = _sizes(shape)
    heads = shape[-2]
    parts = triton.cdiv(shape[-3], rows * TURNS)
    first = TritonLauncher(
        _gradient, (parts * heads, batch), (*sizes, parts, *_steps(batch, *strides)),
        ROWS=rows, BLOCK_D=block_d, TURNS=TURNS,
    )  # fmt: skip
    return first, TritonLauncher(_total, (heads,), (parts * batch, heads), BLOCK=128), (parts * batch, heads)


def _sizes(shape: torch.Size) -> tuple[tuple[int, int, int], int, int, int]:
    """((tokens, heads, head dim), batch, the head dim of a tile, its rows)."""
    n_tokens, heads, head_dim = shape[-3:]
    block_d = triton.next_power_of_2(head_dim)
    return (n_tokens, heads, head_dim), shape[0] if len(shape) == 4 else 1, block_d, min(ROWS, max(1, TILE // block_d))


def _steps(batch: int, *strides: tuple[int, ...]) -> list[int]:
    """By batch, then token and head of tensors like out, or head and token of the LSE, which comes last."""
    found: list[int] = []
    for i, each in enumerate(strides):
        last = each[-2:] if i == len(strides) - 1 else each[-3:-1]
        found += [each[0] if batch > 1 else 0, *last]
    return found
