"""Sums of parts that cover different tokens, in one Triton kernel. Several sums over the same tokens (dk and dv) share
a launch. A program takes a tile of tokens of one sum: with all heads if they are adjacent in all tensors, else one."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from attention.dtypes import accumulation_dtype
from attention.geometry.sum_ranges import MOST, ranges
from attention.geometry.transfers import Intervals
from attention.runtime.triton_launcher import MOST as MOST_STARTS
from attention.runtime.triton_launcher import TritonLauncher

TILE = 2048  # elements per program: 16 per thread with 4 warps, two 16-byte loads of bf16 per part
COLUMNS = 1024
UNIT = 16  # factor of numbers in tuples: Triton compiles again if one becomes, or stops being, a multiple of 16


@triton.jit(do_not_specialize=["first", "last"])
def _sum(  # type: ignore[no-untyped-def]
    lead, outs, parts, out_b, out_t, out_h, starts, stops, places, parts_b, parts_t, parts_h, first, last, heads, columns,
    M: tl.constexpr, N: tl.constexpr, SUM_DTYPE: tl.constexpr, UNIT: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    t = first + tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    which = tl.program_id(2) % M
    h = (tl.program_id(2) // M % heads).to(tl.int64)
    b = (tl.program_id(2) // M // heads).to(tl.int64)
    out = outs[0]
    for j in tl.static_range(1, M):
        out = tl.where(which == j, outs[j], out)
    inside = (c < columns)[None, :]
    total = tl.zeros([ROWS, COLUMNS], SUM_DTYPE)
    for i in tl.static_range(N):
        here = (t >= starts[i] // UNIT) & (t < stops[i] // UNIT) & (t < last)
        row = (t - starts[i] // UNIT + places[i] // UNIT).to(tl.int64)
        part = parts[i * M]
        for j in tl.static_range(1, M):
            part = tl.where(which == j, parts[i * M + j], part)
        at = part + b * parts_b[i] + h * parts_h[i] + row[:, None] * parts_t[i] + c[None, :]
        total += tl.load(at, mask=here[:, None] & inside, other=0.0).to(SUM_DTYPE)
    tl.debug_barrier()  # a part may lie in out, where other threads read it
    at = out + b * out_b + h * out_h + t.to(tl.int64)[:, None] * out_t + c[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=(t < last)[:, None] & inside)


def sum_triton(outs: Sequence[Tensor], parts: Sequence[tuple[Sequence[Tensor], Intervals]]) -> None:
    """As `attention.reduction.grad_sum.sum_all`, on CUDA, or on a CPU under Triton's interpreter. All outs share shape,
    dtype and strides, and so do the tensors of each part. More than `MOST` parts take several sweeps over memory, with
    the running sum in the accumulation dtype. Raises ValueError for a strided head dim."""
    out = outs[0]
    if len(parts) > MOST:
        running = [torch.empty(out.shape, dtype=accumulation_dtype(out.dtype), device=out.device) for _ in outs]
        sum_triton(running, parts[:MOST])
        sum_triton(outs, [(running, ((0, out.shape[-3]),)), *parts[MOST:]])
        return
    if out.numel() == 0:
        return
    tensors = (out, *[of_part[0] for of_part, _ in parts])
    for x in tensors:
        if x.stride(-1) != 1 and x.numel():
            raise ValueError(f"strides {x.stride()}: the sum needs the head dim contiguous; call .contiguous()")
    strides = tuple([x.stride() for x in tensors])
    intervals = tuple([x for _, x in parts])
    for start, numbers in _pieces(out.shape, strides, intervals, out.dtype == torch.float64, len(outs)):
        start(out, tuple(outs), tuple([x for i in numbers for x in parts[i][0]]))


@lru_cache(maxsize=MOST_STARTS)
def _pieces(
    shape: torch.Size, strides: tuple[tuple[int, ...], ...], parts: tuple[Intervals, ...], fp64: bool, together: int
) -> tuple[tuple[TritonLauncher, tuple[int, ...]], ...]:
    """The launches of a sum, each with the numbers of the parts that it adds. strides: of out and of the parts.
    together: the number of sums."""
    heads, head_dim = shape[-2:]
    batch, columns = (shape[0] if len(shape) == 4 else 1), head_dim
    if all(x[-2] == head_dim for x in strides):
        heads, columns = 1, heads * head_dim  # all heads of a token side by side
    width = min(triton.next_power_of_2(columns), COLUMNS)
    rows = max(1, TILE // width)
    # by batch, token and head
    steps = [((x[0] if batch > 1 else 0), x[-3], (x[-2] if heads > 1 else 0)) for x in strides]
    pieces = []
    for found in ranges(shape[-3], parts):
        entries = found.entries
        # padded to a power of two, so that few numbers of parts are compiled
        n = triton.next_power_of_2(len(entries)) if entries else 0
        numbers = [e.part for e in entries] + [entries[0].part] * (n - len(entries)) if entries else []
        spare = (0,) * (n - len(entries))
        grid = triton.cdiv(found.stop - found.start, rows), triton.cdiv(columns, width), batch * heads * together
        places = (tuple(UNIT * getattr(e, x) for e in entries) + spare for x in ("start", "stop", "at"))
        strides_of = (tuple(steps[1 + i][k] for i in numbers) for k in range(3))
        sum_dtype = tl.float64 if fp64 else tl.float32
        start = TritonLauncher(
            _sum, grid, (*steps[0], *places, *strides_of, found.start, found.stop, heads, columns),
            M=together, N=n, SUM_DTYPE=sum_dtype, UNIT=UNIT, ROWS=rows, COLUMNS=width,
        )  # fmt: skip
        pieces.append((start, tuple(numbers)))
    return tuple(pieces)
