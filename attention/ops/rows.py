"""Copies and sums of tokens in one Triton launch. PyTorch's index operations and its copies of strided rows reach a fraction of
the memory bandwidth. A token of a sum is the sum of one token of each part, chosen by index; several sums over the same tokens
(dk and dv) share a launch. A copy is the sum of one part, without indices. A program takes a tile of tokens of one sum: with
all heads if they are adjacent in all tensors, else one. `copy_words` copies contiguous tensors of any sizes; `divide_strided`
divides what lies at a stride of each head's tokens, and clears the rest."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from math import prod

import torch
import triton
import triton.language as tl
from torch import Tensor

from attention.dtypes import accumulation_dtype
from attention.gpu.triton_launcher import MOST, TritonLauncher
from attention.ops.merge import check_head_dim

SUM_TILE = 4096  # elements per program: 16 per thread with 8 warps
COPY_TILE = 8192  # 32 per thread, four 16-byte loads of bf16
COLUMNS = 2048
WORDS = 4096  # int32 per program of `copy_words`
MOST_PARTS = 16  # that one kernel adds up


@triton.jit(do_not_specialize=["n_rows", "numbers_n"])
def _sum_rows(  # type: ignore[no-untyped-def]
    to, numbers, outs, parts, n_rows, numbers_n, heads, columns, out_b, out_t, out_h, parts_b, parts_t, parts_h,
    M: tl.constexpr, N: tl.constexpr, SUM_DTYPE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    # without a dtype of sums, tokens are copied, each to its own place
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    which = tl.program_id(2) % M
    h = (tl.program_id(2) // M % heads).to(tl.int64)
    b = (tl.program_id(2) // M // heads).to(tl.int64)
    out = outs[0]
    for j in tl.static_range(1, M):
        out = tl.where(which == j, outs[j], out)
    live = r < n_rows
    inside = (c < columns)[None, :]
    place = r.to(tl.int64)
    if SUM_DTYPE is not None:
        total = tl.zeros([ROWS, COLUMNS], SUM_DTYPE)
    for i in tl.static_range(N):
        part = parts[i * M]
        for j in tl.static_range(1, M):
            part = tl.where(which == j, parts[i * M + j], part)
        number, mask = place, live
        if SUM_DTYPE is not None:
            number = tl.load(numbers + i * numbers_n + r, mask=live, other=-1).to(tl.int64)
            mask = number >= 0
        at = part + b * parts_b[i] + h * parts_h[i] + number[:, None] * parts_t[i] + c[None, :]
        x = tl.load(at, mask=mask[:, None] & inside, other=0)
        total = x if SUM_DTYPE is None else total + x.to(SUM_DTYPE)
    if SUM_DTYPE is not None:
        tl.debug_barrier()  # a part may lie in out, where other threads read it
        place = tl.load(to + r, mask=live, other=0).to(tl.int64)
    at = out + b * out_b + h * out_h + place[:, None] * out_t + c[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=live[:, None] & inside)


def sum_rows(outs: Sequence[Tensor], to: Tensor, parts: Sequence[Sequence[Tensor]], numbers: Tensor) -> None:
    """Sets token `to[i]` of each out to the sum of token `numbers[j, i]` of its tensor of each part j; -1 stands for no
    token.

    outs and parts: `[B, S, H, D]` or `[T, H, D]`, floating-point, any strides with a contiguous head dim. All outs share
    shape, dtype and strides, and so do the tensors of each part. to: int32 `[n]`, without repetition; numbers: int32
    `[parts, n]`. A part may lie in its out, at the place of its tokens. More than `MOST_PARTS` parts take several sweeps
    over memory, with the running sum in the accumulation dtype. Raises ValueError for a strided head dim."""
    out = outs[0]
    if len(parts) > MOST_PARTS:
        running = [torch.empty(out.shape, dtype=accumulation_dtype(out.dtype), device=out.device) for _ in outs]
        sum_rows(running, to, parts[:MOST_PARTS], numbers[:MOST_PARTS])
        sum_rows(outs, to, [running, *parts[MOST_PARTS:]], torch.cat([to[None], numbers[MOST_PARTS:]]))
        return
    if to.numel() == 0 or out.numel() == 0:
        return
    tensors = (out, *[of_part[0] for of_part in parts])
    check_head_dim(*tensors)
    sizes = to.numel(), numbers.stride(0), len(outs)
    start = _start(out.shape, sizes, tuple([x.stride() for x in tensors]), accumulation_dtype(out.dtype))
    start(to, numbers, tuple(outs), tuple([x for of_part in parts for x in of_part]))


def copy_triton(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copies each pair (target, source). All tensors are `[B, S, H, D]` or `[T, H, D]`, not empty, of one shape and
    dtype. All targets have the same strides, and all sources; the heads of a token are contiguous."""
    targets, sources = zip(*pairs, strict=True)
    target, source = pairs[0]
    start = _start(source.shape, (source.shape[-3], 0, len(pairs)), (target.stride(), source.stride()), None)
    start(target, target, targets, sources)


@lru_cache(maxsize=MOST)
def _start(
    shape: torch.Size, sizes: tuple[int, int, int], strides: tuple[tuple[int, ...], ...], dtype: torch.dtype | None
) -> TritonLauncher:
    """sizes: the tokens, the stride of the numbers by part, and the sums. strides: of an out and of the parts. dtype: of
    sums, None for copies."""
    n_rows, numbers_n, together = sizes
    heads, columns = shape[-2:]
    batch = shape[0] if len(shape) == 4 else 1
    if all(x[-2] == columns for x in strides):
        heads, columns = 1, heads * columns  # all heads of a token side by side
    width = min(triton.next_power_of_2(columns), COLUMNS)
    height = max(1, (SUM_TILE if dtype else COPY_TILE) // width)
    # by batch, token and head
    steps = [(x[0] if batch > 1 else 0, x[-3], x[-2] if heads > 1 else 0) for x in strides]
    return TritonLauncher(
        _sum_rows, (triton.cdiv(n_rows, height), triton.cdiv(columns, width), batch * heads * together),
        (n_rows, numbers_n, heads, columns, *steps[0], *(tuple(x[i] for x in steps[1:]) for i in range(3))),
        M=together, N=len(steps) - 1, SUM_DTYPE=dtype and (tl.float64 if dtype == torch.float64 else tl.float32),
        ROWS=height, COLUMNS=width, num_warps=8,
    )  # fmt: skip


@triton.jit
def _copy_words(first, targets, sources, words, ends, N: tl.constexpr, WORDS: tl.constexpr):  # type: ignore[no-untyped-def]
    p = tl.program_id(0)
    pointer: tl.constexpr = tl.pointer_type(tl.int32)
    target, source = targets[0].to(pointer), sources[0].to(pointer)
    n, before = words[0] >> 1, 0
    for i in tl.static_range(1, N):
        here = p >= ends[i - 1] >> 1
        target = tl.where(here, targets[i].to(pointer), target)
        source = tl.where(here, sources[i].to(pointer), source)
        n = tl.where(here, words[i] >> 1, n)
        before = tl.where(here, ends[i - 1] >> 1, before)
    at = (p - before) * WORDS + tl.arange(0, WORDS)
    x = tl.load(source + at, mask=at < n)
    tl.store(target + at, x, mask=at < n)


def copy_words(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copies each pair (target, source) of contiguous tensors. A pair has one dtype and size: a multiple of 4 bytes,
    above 0 and below 4 GiB."""
    targets, sources = zip(*pairs, strict=True)
    _words(tuple([x.nbytes for x in sources]))(targets[0], targets, sources)


@lru_cache(maxsize=MOST)
def _words(sizes: tuple[int, ...]) -> TritonLauncher:
    words = tuple(size // 4 for size in sizes)
    ends = tuple(accumulate(triton.cdiv(n, WORDS) for n in words))
    # Triton would compile again for each pattern of ones and multiples of 16; 2n + 1 (n > 0) is neither
    odd = tuple(tuple(2 * n + 1 for n in counts) for counts in (words, ends))
    return TritonLauncher(_copy_words, (ends[-1],), odd, N=len(sizes), WORDS=WORDS, num_warps=8)


@triton.jit
def _divide_strided(  # type: ignore[no-untyped-def]
    out, x, strides, tokens, heads, head_dim, N: tl.constexpr, DTYPE: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0)
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside, head = c < heads * head_dim, c // head_dim
    rate = tl.load(strides + head, mask=inside, other=1)
    offset = tl.load(strides + heads + head, mask=inside, other=0)
    at = row.to(tl.int64) * heads * head_dim + c
    chosen = row % tokens % rate == offset
    if N == 1:
        tl.store(out + at, tl.zeros([COLUMNS], out.dtype.element_ty), mask=inside & ~chosen)
    else:
        values = tl.load(x + at, mask=inside & chosen, other=0).to(DTYPE) / N
        tl.store(out + at, values.to(out.dtype.element_ty), mask=inside)


def divide_strided(out: Tensor, x: Tensor, strides: Tensor, n: int) -> None:
    """Sets out to x / n at the tokens `offset, offset + rate, ..` of each head, and to 0 elsewhere.

    out, x: `[B, S, H, D]` or `[T, H, D]`, contiguous, of one dtype; out may be x, and with n = 1 is. strides: int32 `[2, H]`, the rates above the
    offsets; a head with an offset that is not below its rate becomes 0."""
    if x.numel():
        _divide(x.shape, n, accumulation_dtype(x.dtype))(out, x, strides)


@lru_cache(maxsize=MOST)
def _divide(shape: torch.Size, n: int, dtype: torch.dtype) -> TritonLauncher:
    *batch, tokens, heads, head_dim = shape
    width = min(triton.next_power_of_2(heads * head_dim), WORDS)
    return TritonLauncher(
        _divide_strided, (prod(batch) * tokens, triton.cdiv(heads * head_dim, width)), (tokens, heads, head_dim), N=n,
        DTYPE=tl.float64 if dtype == torch.float64 else tl.float32, COLUMNS=width, num_warps=8,
    )  # fmt: skip
