"""Sums of tokens by index, in one Triton kernel: a token of the result is the sum of one token of each part. One part
is an indexed copy. PyTorch's index operations reach a fraction of the memory bandwidth."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from attention.dtypes import accumulation_dtype
from attention.runtime.triton_launcher import MOST, TritonLauncher

TILE = 4096  # elements per program: 16 per thread with 8 warps
COLUMNS = 2048
MOST_PARTS = 16
Numbered = Sequence[tuple[Tensor, Tensor]]


@triton.jit(do_not_specialize=["n_rows"])
def _sum_rows(  # type: ignore[no-untyped-def]
    out, to, parts, numbers, n_rows, columns, out_b, out_t, parts_b, parts_t,
    N: tl.constexpr, SUM_DTYPE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    b = tl.program_id(2).to(tl.int64)
    live = r < n_rows
    inside = (c < columns)[None, :]
    total = tl.zeros([ROWS, COLUMNS], SUM_DTYPE)
    for i in tl.static_range(N):
        number = tl.load(numbers[i] + r, mask=live, other=-1).to(tl.int64)
        at = parts[i] + b * parts_b[i] + number[:, None] * parts_t[i] + c[None, :]
        total += tl.load(at, mask=(number >= 0)[:, None] & inside, other=0.0).to(SUM_DTYPE)
    tl.debug_barrier()  # a part may lie in out, where other threads read it
    place = tl.load(to + r, mask=live, other=0).to(tl.int64)
    at = out + b * out_b + place[:, None] * out_t + c[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=live[:, None] & inside)


def sum_rows(out: Tensor, to: Tensor, parts: Numbered) -> None:
    """Sets token `to[i]` of `out` to the sum of token `number[i]` of each part; -1 stands for no token.

    out and parts: `[B, S, H, D]` or `[T, H, D]`, floating-point, any strides in which the heads of a token are
    contiguous. to, and each part's numbers: int32 `[n]`, `to` without repetition. A part may lie in out, at the place
    of its tokens. Raises ValueError for no parts."""
    if len(parts) > MOST_PARTS:
        running = torch.empty(out.shape, dtype=accumulation_dtype(out.dtype), device=out.device)
        sum_rows(running, to, parts[:MOST_PARTS])
        sum_rows(out, to, [(running, to), *parts[MOST_PARTS:]])
        return
    if not parts:
        raise ValueError("no parts: give at least one")
    if to.numel() == 0 or out.numel() == 0:
        return
    given, numbers = (tuple([pair[i] for pair in parts]) for i in (0, 1))
    strides = tuple([x.stride() for x in (out, *given)])
    _start(out.shape, to.numel(), strides, out.dtype == torch.float64)(out, to, given, numbers)


@lru_cache(maxsize=MOST)
def _start(shape: torch.Size, n_rows: int, strides: tuple[tuple[int, ...], ...], fp64: bool) -> TritonLauncher:
    """strides: of out and of the parts."""
    batch, columns = (shape[0] if len(shape) == 4 else 1), shape[-2] * shape[-1]
    width = min(triton.next_power_of_2(columns), COLUMNS)
    height = max(1, TILE // width)
    steps = [(x[0] if batch > 1 else 0, x[-3]) for x in strides]
    return TritonLauncher(
        _sum_rows, (triton.cdiv(n_rows, height), triton.cdiv(columns, width), batch),
        (n_rows, columns, *steps[0], *(tuple(x[i] for x in steps[1:]) for i in (0, 1))),
        N=len(steps) - 1, SUM_DTYPE=tl.float64 if fp64 else tl.float32, ROWS=height, COLUMNS=width, num_warps=8,
    )  # fmt: skip
