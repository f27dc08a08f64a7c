"""Copies of tensors of one form as one Triton kernel: a program takes a tile of the tokens of one of them, all heads of a
token side by side."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from attention.kernels.start import MOST, Start

TILE = 8192  # elements of a program: 32 a thread with 8 warps, four 16-byte loads of bf16
COLUMNS = 2048


@triton.jit(do_not_specialize=["n_tokens"])
def _copy(  # type: ignore[no-untyped-def]
    first,
    targets,
    sources,
    n_tokens,
    columns,
    target_b,
    target_t,
    source_b,
    source_t,
    N: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    which = tl.program_id(2) % N
    b = (tl.program_id(2) // N).to(tl.int64)
    target, source = targets[0], sources[0]
    for i in tl.static_range(1, N):
        target = tl.where(which == i, targets[i], target)
        source = tl.where(which == i, sources[i], source)
    t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (t < n_tokens)[:, None] & (c < columns)[None, :]
    t = t.to(tl.int64)
    x = tl.load(source + b * source_b + t[:, None] * source_t + c[None, :], mask=inside)
    tl.store(target + b * target_b + t[:, None] * target_t + c[None, :], x, mask=inside)


def copy_triton(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Each second tensor to its first: `[B, S, H, D]` or `[T, H, D]`, not empty, all of one shape and dtype, all first ones of
    the same strides and all second ones, with a token's heads lying together."""
    targets, sources = (tuple([pair[i] for pair in pairs]) for i in (0, 1))
    target, source = pairs[0]
    _start(source.shape, target.stride(), source.stride(), len(pairs))(target, targets, sources)


@lru_cache(maxsize=MOST)
def _start(shape: torch.Size, target: tuple[int, ...], source: tuple[int, ...], n: int) -> Start:
    n_tokens, heads, head_dim = shape[-3:]
    batch, columns = (shape[0] if len(shape) == 4 else 1), heads * head_dim
    width = min(triton.next_power_of_2(columns), COLUMNS)
    height = max(1, TILE // width)
    strides = [(x[0] if batch > 1 else 0, x[-3]) for x in (target, source)]
    return Start(
        _copy,
        (triton.cdiv(n_tokens, height), triton.cdiv(columns, width), batch * n),
        (n_tokens, columns, *strides[0], *strides[1]),
        N=n,
        ROWS=height,
        COLUMNS=width,
        num_warps=8,
    )
