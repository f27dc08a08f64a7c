"""Sums of partial gradients that cover different tokens, in fp32 (fp64 for fp64), rounded once. `sum_parts` takes parts
that are all there, `Sum` takes parts that come one by one. On CUDA one Triton kernel reads every part once and writes
the sum once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from attention.dtypes import accumulation_dtype
from attention.geometry.merge_plan import Bundle, merge_plan
from attention.geometry.schedules import length
from attention.geometry.sum_ranges import MOST
from attention.geometry.transfers import Intervals
from attention.masks.band import Interval
from attention.memo import memo
from attention.runtime.submit import outside_recording
from attention.runtime.uploads import held, uploaded
from attention.tensors import (
    FEW,
    add_,
    empty_tokens,
    put_,
    take,
    token_dim,
    token_indices,
    tokens,
    tokens_contiguous,
    tokens_of,
)

MANY = 2 * MOST  # intervals; above that, tokens are added by index
MOST_PROGRAMS = 65535  # the limit of a grid's last dimension, in which the kernel has sums and heads

Parts = Sequence[tuple[Tensor, Intervals]]
PartsOfAll = Sequence[tuple[Sequence[Tensor], Intervals]]


def sum_parts(out: Tensor, parts: Parts) -> None:
    """Write to every token of `out` the sum over the parts that have it, or 0.

    out: `[B, S, H, D]` or `[T, H, D]`; a part `(x, intervals)`: x has the tokens `intervals` of out, side by side, in
    any dtype. Any strides, but a contiguous last dim. A part may lie in out itself, at the place of its tokens.

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
    """`sum_parts` for each of outs; a part has one tensor for each of them, all over the same tokens. No out is read
    for another out. On CUDA one launch does all of them if their shapes, strides and dtypes are equal, as those of dk
    and dv are."""
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


@memo(lambda _, part, intervals, out: 1 + len(intervals))
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
    with outside_recording():
        return uploaded(found, device)


def sum_eager(out: Tensor, parts: Parts) -> None:
    """`sum_parts` in eager PyTorch, on any device."""
    total = out.new_zeros(out.shape, dtype=accumulation_dtype(out.dtype))
    for part, intervals in parts:
        add_(total, intervals, part)
    out.copy_(total)


class Sum:
    """The sum of parts that come one by one. Their intervals are declared in advance. Several tensors of one shape,
    such as dk and dv, are summed together. Takes ownership of the parts.

    A token's first part is kept as it is, and its last part is added by the kernel that rounds the sum. Only tokens
    with three parts or more need a buffer in the accumulation dtype. If the first part covers all tokens, its tensors
    become the result.

    like: tensors of the shape and dtype of each sum; parts: the intervals of each part, in the order in which they will
    be added; into: the tensors to write the sums to, by default new ones."""

    def __init__(self, like: Sequence[Tensor], parts: Sequence[Intervals], into: Sequence[Tensor] | None = None):
        self.like, self.parts, self.outs = like, tuple(parts), into
        self.plan = merge_plan(tokens(like[0]), self.parts)
        self.running = [Running(self.plan.running) for _ in like]
        self.kept: dict[int, Sequence[Tensor]] = {}  # by number, the parts that a later part will be added to
        self.number = 0  # of the next part

    def add(self, *part: Tensor) -> None:
        """The next part: one tensor for each sum."""
        if self.outs is None:
            pairs = zip(part, self.like, strict=True)
            if all(may_be_result(x, like, self.parts) for x, like in pairs):
                self.outs = part
        outs = self._begun()
        self.kept[self.number] = part
        for each in self.plan.bundles[self.number]:
            if not each.first:
                self._add(each, part, outs)
            elif each.last:
                for out, x in zip(outs, part, strict=True):
                    if x is not out:
                        put_(out, each.rows, take(x, each.at))
        self.kept = {i: x for i, x in self.kept.items() if self.plan.until[i] > self.number}
        self.number += 1

    def _add(self, each: Bundle, part: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
        everything = ((0, length(each.rows)),)
        before, targets, places = [], [], []
        for i, (out, running) in enumerate(zip(outs, self.running, strict=True)):
            first, at = (self.kept[each.kept[0]][i], each.kept[1]) if each.kept else running.place(out, each.rows)
            into, rows = (out, each.rows) if each.last else running.place(out, each.rows)
            source, target = source_and_target(first, at, into, rows)
            before.append(source)
            targets.append(target)
            places.append((into, rows))
        sum_all(targets, [(before, everything), ([take(x, each.at) for x in part], everything)])
        if len(each.rows) > 1:  # the targets are copies
            for target, (into, rows) in zip(targets, places, strict=True):
                put_(into, rows, target)

    def result(self) -> Sequence[Tensor]:
        assert self.number == len(self.parts), f"{self.number} of {len(self.parts)} parts were added"
        self.running = [Running(self.plan.running) for _ in self.like]  # frees the buffers
        return self._begun()

    def _begun(self) -> Sequence[Tensor]:
        if self.outs is None:
            self.outs = [empty_tokens(x, tokens(x)) for x in self.like]
        if self.number == 0:
            for out in self.outs:
                for start, stop in self.plan.bare if len(self.plan.bare) <= FEW else [(0, tokens(out))]:
                    cut(out, start, stop - start).zero_()
        return self.outs


class Running:
    """Partial results of the tokens with three parts or more, in the accumulation dtype: in the result itself if it has
    that dtype, else in a buffer over the tokens `span`, which is allocated at its first use."""

    def __init__(self, span: Interval):
        self.span = span
        self.buffer: Tensor | None = None

    def place(self, out: Tensor, rows: Intervals) -> tuple[Tensor, Intervals]:
        """The tensor and the intervals in it that hold the partial results of the tokens `rows` of out."""
        if out.dtype == accumulation_dtype(out.dtype):
            return out, rows
        start, stop = self.span
        if self.buffer is None:
            self.buffer = empty_tokens(out, stop - start, accumulation_dtype(out.dtype))
        return self.buffer, tuple((a - start, b - start) for a, b in rows)


def source_and_target(
    first: Tensor, places: Intervals, into: Tensor, rows: Intervals, dim: int | None = None
) -> tuple[Tensor, Tensor]:
    """(`take(first, places)`, `take(into, rows)`), the same tensor twice if both are the same tokens."""
    source = take(first, places, dim)
    return source, source if first is into and places == rows else take(into, rows, dim)


def cut(x: Tensor, start: int, n: int) -> Tensor:
    """n tokens of x from `start` on: a view."""
    return x.narrow(token_dim(x), start, n)


def may_be_result(part: Tensor, like: Tensor, parts: tuple[Intervals, ...]) -> bool:
    """Whether the first part can become the result, to be completed in place: it has all tokens and, if later parts
    will read it, it is contiguous."""
    return parts[0] == ((0, tokens(like)),) and part.dtype == like.dtype and (len(parts) == 1 or part.is_contiguous())
