"""Sums of partial gradients that cover different tokens, in fp32 (fp64 for fp64), rounded once. On CUDA one Triton kernel reads
every part once and writes the sum once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from attention.dtypes import accumulation_dtype
from attention.geometry.intervals import length
from attention.gpu.uploads import held, uploaded
from attention.masks.band import Intervals
from attention.tensors import TOKENS, add_, token_indices, tokens, tokens_of, touch

MOST_PROGRAMS = 65535  # the limit of a grid's last dimension, which enumerates sums and heads

Parts = Sequence[tuple[Sequence[Tensor], Intervals]]


def sum_all(outs: Sequence[Tensor], parts: Parts) -> None:
    """Write to every token of each of outs the sum over the parts that contain it, or 0.

    outs: `[B, S, H, D]` or `[T, H, D]`. A part has one tensor for each out: the tokens of its intervals, side by side, in any
    dtype and with any strides. A part may be a view of its out at its own tokens, but of no other out. On CUDA one launch
    computes all sums if their shapes, strides and dtypes are equal, as for dk and dv."""
    tensors = (outs, *[of_part for of_part, _ in parts])
    by_kernel = outs[0].is_cuda and all(x.stride(-1) == 1 for xs in tensors for x in xs)
    if by_kernel and _one_launch(outs, parts):
        sum_numbered(outs, parts)
        return
    for i, out in enumerate(outs):
        if by_kernel:
            sum_numbered((out,), [(tensors[i : i + 1], intervals) for tensors, intervals in parts])
        elif out.is_meta:
            touch(out, *(tensors[i] for tensors, _ in parts))
        else:
            sum_eager(out, [(tensors[i], intervals) for tensors, intervals in parts])


def _one_launch(outs: Sequence[Tensor], parts: Parts) -> bool:
    """Whether one kernel launch can compute all sums: equal shapes, strides and dtypes, and a grid that is large
    enough."""
    shape = outs[0].shape
    heads = shape[-2] * (shape[0] if len(shape) == 4 else 1)
    return heads * len(outs) <= MOST_PROGRAMS and all(
        (x.shape, x.stride(), x.dtype) == (xs[0].shape, xs[0].stride(), xs[0].dtype)
        for xs in (outs, *(tensors for tensors, _ in parts))
        for x in xs[1:]
    )


def sum_numbered(outs: Sequence[Tensor], parts: Parts) -> None:
    """`sum_all` in one launch on CUDA, or on a CPU under Triton's interpreter."""
    from attention.ops.rows import sum_rows

    n, device = tokens(outs[0]), outs[0].device
    to = token_indices(((0, 1 << n.bit_length()),), device, torch.int32)[:n]
    intervals = tuple([x for _, x in parts])
    if all(x == ((0, n),) for x in intervals):
        numbers = to.expand(len(parts), n)
    else:
        numbers = held(_numbers(n, intervals, device), device)
    sum_rows(outs, to, [tensors for tensors, _ in parts], numbers)


@lru_cache(maxsize=64)
def _numbers(n: int, parts: tuple[Intervals, ...], device: torch.device) -> Tensor:
    """int32 `[parts, n]`: for each of n tokens its index in a part over its intervals, -1 where the part lacks it."""
    numbers = np.full((len(parts), n), -1, np.int32)
    for row, intervals in zip(numbers, parts, strict=True):
        row[tokens_of(intervals)] = np.arange(length(intervals))
    return uploaded(numbers, device)


def sum_eager(out: Tensor, parts: Sequence[tuple[Tensor, Intervals]]) -> None:
    """`sum_all` of one out in eager PyTorch, on any device."""
    total = out.new_zeros(out.shape, dtype=accumulation_dtype(out.dtype))
    for part, intervals in parts:
        add_(total, intervals, part)
    out.copy_(total)


class OverlappingSum:
    """The sum of parts that arrive one by one, of which one may have a token several times, in the accumulation dtype.
    deterministic: in the same order each time."""

    def __init__(self, like: Sequence[Tensor], parts: Sequence[Intervals], deterministic: bool):
        self.like, self.parts, self.dims = like, iter(parts), (TOKENS,) * len(like)
        self.in_order = deterministic and like[0].is_cuda  # where index_add_ adds in any order
        self.totals = [x.new_zeros(x.shape, dtype=accumulation_dtype(x.dtype)) for x in like]

    def add(self, *part: Tensor) -> None:
        intervals = next(self.parts)
        for total, x in zip(self.totals, part, strict=True):
            if self.in_order:
                at = token_indices(intervals, total.device)
                total.transpose(0, 1).index_put_((at,), x.transpose(0, 1).to(total.dtype), accumulate=True)
            else:
                add_(total, intervals, x)

    def result(self) -> Sequence[Tensor]:
        return [total.to(x.dtype) for total, x in zip(self.totals, self.like, strict=True)]
