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
from attention.geometry.intervals import length
from attention.gpu.uploads import held, uploaded
from attention.masks.band import Intervals
from attention.memo import MOST_PARTS, memo
from attention.reduction.stepwise import Cover, Stepwise
from attention.tensors import TOKENS, add_, empty_tokens, token_indices, tokens, tokens_of, touch

MOST_PROGRAMS = 65535  # the limit of a grid's last dimension, which enumerates sums and heads

Parts = Sequence[tuple[Tensor, Intervals]]
PartsOfAll = Sequence[tuple[Sequence[Tensor], Intervals]]


def sum_parts(out: Tensor, parts: Parts) -> None:
    """Write to every token of `out` the sum over the parts that contain it, or 0.

    out: `[B, S, H, D]` or `[T, H, D]`; a part `(x, intervals)`: x has the tokens `intervals` of out, side by side, in
    any dtype. Strides are arbitrary, except that the last dim is contiguous. A part may be a view of out at its own tokens.

    Raises ValueError for a part whose number of tokens is not that of its intervals, and for a strided last dim."""
    sum_all((out,), [((part,), intervals) for part, intervals in parts])


def sum_all(outs: Sequence[Tensor], parts: PartsOfAll) -> None:
    """`sum_parts` for each of outs; a part has one tensor for each out, all over the same tokens. No out may be a part of
    another out. On CUDA one launch computes all sums if their shapes, strides and dtypes are equal, as for dk and dv."""
    if outs[0].is_cuda and _one_launch(outs, parts):
        for of_part, intervals in parts:
            _check(of_part[0].shape, intervals, outs[0].shape)
        sum_numbered(outs, parts)
        return
    for i, out in enumerate(outs):
        own = [(of_part[i], intervals) for of_part, intervals in parts]
        for part, intervals in own:
            _check(part.shape, intervals, out.shape)
        if out.is_cuda:
            sum_numbered((out,), [((part,), intervals) for part, intervals in own])
        elif out.is_meta:
            touch(out, *(part for part, _ in own))
        else:
            sum_eager(out, own)


def _one_launch(outs: Sequence[Tensor], parts: PartsOfAll) -> bool:
    """Whether one kernel launch can compute all sums: equal shapes, strides and dtypes, and a grid that is large
    enough."""
    shape = outs[0].shape
    heads = shape[-2] * (shape[0] if len(shape) == 4 else 1)
    return heads * len(outs) <= MOST_PROGRAMS and all(
        (x.shape, x.stride(), x.dtype) == (xs[0].shape, xs[0].stride(), xs[0].dtype)
        for xs in (outs, *(of_part for of_part, _ in parts))
        for x in xs[1:]
    )


@memo(lambda _, part, intervals, out: 1 + len(intervals), subjects=MOST_PARTS)
def _check(part: torch.Size, intervals: Intervals, out: torch.Size) -> None:
    if part[-3] != length(intervals) or len(part) != len(out) or part[-2:] != out[-2:]:
        raise ValueError(
            f"part {list(part)} over the tokens {intervals} of out {list(out)}: give as many tokens as the "
            "intervals have, and the same heads and head dim"
        )


def sum_numbered(outs: Sequence[Tensor], parts: PartsOfAll) -> None:
    """`sum_all` in one launch on CUDA, or on a CPU under Triton's interpreter."""
    from attention.ops.rows import sum_rows

    n, device = tokens(outs[0]), outs[0].device
    to = token_indices(((0, 1 << n.bit_length()),), device, torch.int32)[:n]
    intervals = tuple([x for _, x in parts])
    if all(x == ((0, n),) for x in intervals):
        numbers = to.expand(len(parts), n)
    else:
        numbers = held(_numbers(n, intervals, device), device)
    sum_rows(outs, to, [of_part for of_part, _ in parts], numbers)


@lru_cache(maxsize=64)
def _numbers(n: int, parts: tuple[Intervals, ...], device: torch.device) -> Tensor:
    """int32 `[parts, n]`: for each of n tokens its index in a part over its intervals, -1 where the part lacks it."""
    found = np.full((len(parts), n), -1, np.int32)
    for row, intervals in zip(found, parts, strict=True):
        row[tokens_of(intervals)] = np.arange(length(intervals))
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

    def __init__(self, like: Sequence[Tensor], parts: Cover, into: Sequence[Tensor] | None = None):
        super().__init__(like, parts, (TOKENS,) * len(like), into)

    def new(self) -> Sequence[Tensor]:
        return [empty_tokens(x, tokens(x)) for x in self.like]

    def clear(self, *outs: Tensor) -> None:
        for out in outs:
            out.zero_()

    def combine(self, into: Sequence[Tensor], a: Sequence[Tensor], b: Sequence[Tensor]) -> None:
        everything = ((0, tokens(into[0])),)
        sum_all(into, [(a, everything), (b, everything)])
