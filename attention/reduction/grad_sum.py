"""Sums of partial gradients that cover different tokens, in fp32 (fp64 for fp64), rounded once. `sum_parts` takes all parts
at once, `Sum` takes parts that arrive one by one. On CUDA one Triton kernel reads every part once and writes the
sum once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from attention.dtypes import accumulation_dtype
from attention.geometry.schedules import length
from attention.geometry.sum_ranges import MOST
from attention.geometry.transfers import Intervals
from attention.memo import MOST_PARTS, memo
from attention.reduction.stepwise import Stepwise
from attention.runtime.uploads import held, uploaded
from attention.tensors import add_, empty_tokens, token_dim, token_indices, tokens, tokens_contiguous, tokens_of

MANY = 2 * MOST  # intervals; with more, tokens are added by index
MOST_PROGRAMS = 65535  # the limit of a grid's last dimension, which enumerates sums and heads

Parts = Sequence[tuple[Tensor, Intervals]]
PartsOfAll = Sequence[tuple[Sequence[Tensor], Intervals]]


def sum_parts(out: Tensor, parts: Parts) -> None:
    """Write to every token of `out` the sum over the parts that contain it, or 0.

    out: `[B, S, H, D]` or `[T, H, D]`; a part `(x, intervals)`: x has the tokens `intervals` of out, side by side, in
    any dtype. Strides are arbitrary, except that the last dim is contiguous. A part may be a view of out at its own tokens.

    Raises ValueError for a part whose number of tokens is not that of its intervals, and for a strided last dim."""
    for part, intervals in parts:
        _check(part.shape, intervals, out.shape)
    if not out.is_cuda:
        sum_eager(out, parts)
    elif _few(parts):
        from attention.ops.sum import sum_triton

        sum_triton((out,), [((part,), intervals) for part, intervals in parts])
    elif all(tokens_contiguous(x.shape, x.stride()) for x in (out, *(part for part, _ in parts))):
        sum_numbered(out, parts)
    else:
        sum_eager(out, parts)


def sum_all(outs: Sequence[Tensor], parts: PartsOfAll) -> None:
    """`sum_parts` for each of outs; a part has one tensor for each out, all over the same tokens. No out may be a part of
    another out. On CUDA one launch computes all sums if their shapes, strides and dtypes are equal, as for dk and dv."""
    first = outs[0]
    if len(outs) > 1 and first.is_cuda and _few(parts) and alike(outs, parts):
        from attention.ops.sum import sum_triton

        for of_part, intervals in parts:
            _check(of_part[0].shape, intervals, first.shape)
        sum_triton(outs, parts)
        return
    for i, out in enumerate(outs):
        sum_parts(out, [(of_part[i], intervals) for of_part, intervals in parts])


def alike(outs: Sequence[Tensor], parts: PartsOfAll) -> bool:
    """Whether one kernel launch can compute all sums: equal shapes, strides and dtypes, and a grid that is large
    enough."""
    shape = outs[0].shape
    heads = shape[-2] * (shape[0] if len(shape) == 4 else 1)
    return heads * len(outs) <= MOST_PROGRAMS and all(
        (x.shape, x.stride(), x.dtype) == (xs[0].shape, xs[0].stride(), xs[0].dtype)
        for xs in (outs, *(of_part for of_part, _ in parts))
        for x in xs[1:]
    )


def _few(parts: Sequence[tuple[object, Intervals]]) -> bool:
    return sum([len(intervals) for _, intervals in parts]) <= MANY


@memo(lambda _, part, intervals, out: 1 + len(intervals), subjects=MOST_PARTS)
def _check(part: torch.Size, intervals: Intervals, out: torch.Size) -> None:
    if part[-3] != length(intervals) or len(part) != len(out) or part[-2:] != out[-2:]:
        raise ValueError(
            f"part {list(part)} over the tokens {intervals} of out {list(out)}: give as many tokens as the "
            "intervals have, and the same heads and head dim"
        )


def sum_numbered(out: Tensor, parts: Parts) -> None:
    """`sum_parts` by token index, for many intervals; on CUDA, or on a CPU under Triton's interpreter. The heads of a
    token must be contiguous."""
    from attention.ops.rows import sum_rows

    n = tokens(out)
    to = token_indices(((0, n),), out.device, torch.int32)
    sum_rows(out, to, [(part, held(_numbers(n, intervals, out.device), out.device)) for part, intervals in parts])


@lru_cache(maxsize=128)
def _numbers(n: int, intervals: Intervals, device: torch.device) -> Tensor:
    """int32 `[n]`: for each of n tokens its index in a part over the intervals, -1 where the part lacks it."""
    found = np.full(n, -1, np.int32)
    found[tokens_of(intervals)] = np.arange(length(intervals))
    return uploaded(found, device)


def sum_eager(out: Tensor, parts: Parts) -> None:
    """`sum_parts` in eager PyTorch, on any device."""
    total = out.new_zeros(out.shape, dtype=accumulation_dtype(out.dtype))
    for part, intervals in parts:
        add_(total, intervals, part)
    out.copy_(total)


class Sum(Stepwise):
    """The sum of parts that arrive one by one; several tensors of one shape, such as dk and dv, are summed together.

    into: the tensors to write the sums to, by default new ones."""

    def __init__(self, like: Sequence[Tensor], parts: Sequence[Intervals], into: Sequence[Tensor] | None = None):
        super().__init__(like, parts, [token_dim(x) for x in like], into)

    def new(self) -> Sequence[Tensor]:
        return [empty_tokens(x, tokens(x)) for x in self.like]

    def clear(self, *outs: Tensor) -> None:
        for out in outs:
            out.zero_()

    def combine(self, into: Sequence[Tensor], a: Sequence[Tensor], b: Sequence[Tensor]) -> None:
        everything = ((0, tokens(into[0])),)
        sum_all(into, [(a, everything), (b, everything)])
