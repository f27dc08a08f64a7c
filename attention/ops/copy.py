"""Several copies in one Triton launch: strided tensors of one shape (`copy_triton`), or contiguous ones of any sizes
(`copy_words`)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

import torch
import triton
import triton.language as tl
from torch import Tensor

from attention.gpu.triton_launcher import MOST, TritonLauncher

TILE = 8192  # elements per program: 32 per thread with 8 warps, four 16-byte loads of bf16
COLUMNS = 2048
WORDS = 4096  # int32 per program of `copy_words`


@triton.jit(do_not_specialize=["n_tokens"])
def _copy(  # type: ignore[no-untyped-def]
    first, targets, sources, n_tokens, columns, target_b, target_t, source_b, source_t,
    N: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    # a program copies a tile of tokens of one pair, with all heads of a token side by side
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
    """Copies each pair (target, source). All tensors are `[B, S, H, D]` or `[T, H, D]`, not empty, of one shape and
    dtype. All targets have the same strides, and all sources; the heads of a token are contiguous."""
    targets, sources = (tuple([pair[i] for pair in pairs]) for i in (0, 1))
    target, source = pairs[0]
    _start(source.shape, target.stride(), source.stride(), len(pairs))(target, targets, sources)


@lru_cache(maxsize=MOST)
def _start(shape: torch.Size, target: tuple[int, ...], source: tuple[int, ...], n: int) -> TritonLauncher:
    n_tokens, heads, head_dim = shape[-3:]
    batch, columns = (shape[0] if len(shape) == 4 else 1), heads * head_dim
    width = min(triton.next_power_of_2(columns), COLUMNS)
    height = max(1, TILE // width)
    strides = [(x[0] if batch > 1 else 0, x[-3]) for x in (target, source)]
    grid = triton.cdiv(n_tokens, height), triton.cdiv(columns, width), batch * n
    numbers = n_tokens, columns, *strides[0], *strides[1]
    return TritonLauncher(_copy, grid, numbers, N=n, ROWS=height, COLUMNS=width, num_warps=8)


@triton.jit
def _copy_words(first, targets, sources, words, ends, N: tl.constexpr, WORDS: tl.constexpr):  # type: ignore[no-untyped-def]
    p = tl.program_id(0)
    target, source = targets[0].to(tl.pointer_type(tl.int32)), sources[0].to(tl.pointer_type(tl.int32))
    n, before = words[0] >> 1, 0
    for i in tl.static_range(1, N):
        here = p >= ends[i - 1] >> 1
        target = tl.where(here, targets[i].to(tl.pointer_type(tl.int32)), target)
        source = tl.where(here, sources[i].to(tl.pointer_type(tl.int32)), source)
        n = tl.where(here, words[i] >> 1, n)
        before = tl.where(here, ends[i - 1] >> 1, before)
    at = (p - before) * WORDS + tl.arange(0, WORDS)
    x = tl.load(source + at, mask=at < n)
    tl.store(target + at, x, mask=at < n)


def copy_words(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copies each pair (target, source) of contiguous tensors. A pair has one dtype and size: a multiple of 4 bytes,
    above 0 and below 4 GiB."""
    targets, sources = (tuple([pair[i] for pair in pairs]) for i in (0, 1))
    _words(tuple([x.nbytes for x in sources]))(targets[0], targets, sources)


@lru_cache(maxsize=MOST)
def _words(sizes: tuple[int, ...]) -> TritonLauncher:
    words = tuple(size // 4 for size in sizes)
    ends = tuple(accumulate(triton.cdiv(n, WORDS) for n in words))
    # Triton would compile again for each pattern of ones and multiples of 16; 2n + 1 (n > 0) is neither
    odd = tuple(tuple(2 * n + 1 for n in each) for each in (words, ends))
    return TritonLauncher(_copy_words, (ends[-1],), odd, N=len(sizes), WORDS=WORDS, num_warps=8)
