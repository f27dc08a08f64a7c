"""Sums of partial gradients that cover different tokens, in fp32 (fp64 for fp64), rounded once: of parts that are all there,
and of parts that come one by one. On CUDA one Triton kernel reads every part once and writes the sum once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from attention.geometry.merge_plan import Bundle, passes
from attention.geometry.schedules import length
from attention.geometry.transfers import Intervals, side_by_side
from attention.geometry.weighted_lru import memo
from attention.masks.band import Interval
from attention.runtime import launch_trace
from attention.tensors import (
    FEW,
    add_,
    held,
    index,
    put_,
    room,
    rows,
    take,
    token_dim,
    tokens,
    tokens_of,
    uploaded,
    wide,
)

MOST = 16  # stretches of parts that one kernel adds up
MANY = 2 * MOST  # of more the tokens are added by their numbers
MOST_PROGRAMS = 65535  # of a grid, in its last dimension, in which a kernel has the sums and their heads

Parts = Sequence[tuple[Tensor, Intervals]]
PartsOfAll = Sequence[tuple[Sequence[Tensor], Intervals]]


def sum_parts(out: Tensor, parts: Parts) -> None:
    """Write to every token of `out` the sum over the parts that have it, or 0.

    out: `[B, S, H, D]` or `[T, H, D]`; each part: the tokens of its intervals of out's tokens, side by side, in any dtype.
    Any strides, but for a contiguous last dim. A part may lie in out itself, at the place of its tokens.

    Raises ValueError for a part that has not as many tokens as its intervals, or a strided last dim."""
    for part, intervals in parts:
        _check(part.shape, intervals, out.shape)
    if not out.is_cuda:
        sum_eager(out, parts)
    elif _few(parts):
        from attention.kernels.ops.sum import sum_triton

        sum_triton((out,), [((part,), intervals) for part, intervals in parts])
    elif all(rows(x.shape, x.stride()) for x in (out, *(part for part, _ in parts))):
        sum_numbered(out, parts)
    else:
        sum_eager(out, parts)


def sum_all(outs: Sequence[Tensor], parts: PartsOfAll) -> None:
    """As `sum_parts` of each of outs, none of which is read for another; a part is a tensor for each of them, over the same tokens.
    On CUDA in one launch where they are alike, as dk and dv are."""
    first = outs[0]
    if len(outs) > 1 and first.is_cuda and _few(parts) and alike(outs, parts):
        from attention.kernels.ops.sum import sum_triton

        for of_part, intervals in parts:
            _check(of_part[0].shape, intervals, first.shape)
        sum_triton(outs, parts)
        return
    for i, out in enumerate(outs):
        sum_parts(out, [(of_part[i], intervals) for of_part, intervals in parts])


def alike(outs: Sequence[Tensor], parts: PartsOfAll) -> bool:
    """Whether one kernel can do them."""
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
    """As `sum_parts`, by the tokens' numbers, on CUDA or on a CPU under Triton's interpreter. A token's heads must lie
    together."""
    from attention.kernels.ops.rows import sum_rows

    n = tokens(out)
    to = index(((0, n),), out.device, torch.int32)
    sum_rows(out, to, [(part, held(_numbers(n, intervals, out.device), out.device)) for part, intervals in parts])


@lru_cache(maxsize=128)
def _numbers(n: int, intervals: Intervals, device: torch.device) -> Tensor:
    """int32 `[n]`: which token of a part over the intervals each of n tokens is, -1 where it is none."""
    found = np.full(n, -1, np.int32)
    found[tokens_of(intervals)] = np.arange(length(intervals))
    with launch_trace.unseen():
        return uploaded(found, device)


def sum_eager(out: Tensor, parts: Parts) -> None:
    """As `sum_parts`, in plain PyTorch on any device."""
    total = out.new_zeros(out.shape, dtype=wide(out.dtype))
    for part, intervals in parts:
        add_(total, intervals, part)
    out.copy_(total)


class Sum:
    """The sum of parts that come one by one, each over tokens that were said beforehand; of several tensors alike, as dk and dv
    are, whose parts come together. It takes the parts over: the first is kept as it is, and becomes the sum itself where it
    has all tokens (of all tensors, or none does); tokens of three parts or more are summed in a wide buffer, and a token's
    last part is added in the pass that rounds it.

    like: of each sum the shape and dtype, the same shape; parts: the intervals of each part to come, in order; into: where the
    sums are wanted."""

    def __init__(self, like: Sequence[Tensor], parts: Sequence[Intervals], into: Sequence[Tensor] | None = None):
        self.like, self.parts, self.outs = like, tuple(parts), into
        self.passes = passes(tokens(like[0]), self.parts)
        self.running = [Running(self.passes.running) for _ in like]
        self.kept: dict[int, Sequence[Tensor]] = {}
        self.number = 0  # of the part to come

    def add(self, *part: Tensor) -> None:
        """A tensor for each sum."""
        if self.outs is None:
            ends = zip(part, self.like, strict=True)
            if all(may_be_result(x, like, self.parts) for x, like in ends):
                self.outs = part
        outs = self._begun()
        self.kept[self.number] = part
        for each in self.passes.bundles[self.number]:
            if not each.first:
                self._add(each, part, outs)
            elif each.last:
                for out, x in zip(outs, part, strict=True):
                    if x is not out:
                        put_(out, each.rows, take(x, each.at))
        self.kept = {i: x for i, x in self.kept.items() if self.passes.until[i] > self.number}
        self.number += 1

    def _add(self, each: Bundle, part: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
        everything = ((0, length(each.rows)),)
        before, targets, places = [], [], []
        for i, (out, running) in enumerate(zip(outs, self.running, strict=True)):
            first, at = (self.kept[each.kept[0]][i], each.kept[1]) if each.kept else running.place(out, each.rows)
            into, rows = (out, each.rows) if each.last else running.place(out, each.rows)
            ends = both_ends(first, at, into, rows)
            before.append(ends[0])
            targets.append(ends[1])
            places.append((into, rows))
        sum_all(targets, [(before, everything), ([take(x, each.at) for x in part], everything)])
        if len(each.rows) > 1:  # the targets are copies
            for target, (into, rows) in zip(targets, places, strict=True):
                put_(into, rows, target)

    def result(self) -> Sequence[Tensor]:
        assert self.number == len(self.parts), f"{self.number} of {len(self.parts)} parts were added"
        self.running = [Running(self.passes.running) for _ in self.like]  # their memory is not needed any more
        return self._begun()

    def _begun(self) -> Sequence[Tensor]:
        if self.outs is None:
            self.outs = [room(x, tokens(x)) for x in self.like]
        if self.number == 0:
            for out in self.outs:
                for start, stop in self.passes.bare if len(self.passes.bare) <= FEW else [(0, tokens(out))]:
                    cut(out, start, stop - start).zero_()
        return self.outs


class Running:
    """What the tokens of three parts or more have so far, in the wide dtype: in the result itself where that is wide, else
    in a buffer over `span`, made when it is first needed."""

    def __init__(self, span: Interval):
        self.span = span
        self.buffer: Tensor | None = None

    def place(self, out: Tensor, rows: Intervals) -> tuple[Tensor, Intervals]:
        """Where the result's rows are kept so far."""
        if out.dtype == wide(out.dtype):
            return out, rows
        start, stop = self.span
        if self.buffer is None:
            self.buffer = room(out, stop - start, wide(out.dtype))
        return self.buffer, tuple((a - start, b - start) for a, b in rows)


def both_ends(
    first: Tensor, places: Intervals, into: Tensor, rows: Intervals, dim: int | None = None
) -> tuple[Tensor, Tensor]:
    """As `take` of each, but one for both where they are the same."""
    before = take(first, places, dim)
    return before, before if first is into and places == rows else take(into, rows, dim)


def cut(x: Tensor, start: int, n: int) -> Tensor:
    return x.narrow(token_dim(x), start, n)


def may_be_result(part: Tensor, like: Tensor, parts: tuple[Intervals, ...]) -> bool:
    """Whether the first part can become the result, to be completed in place: it has all tokens, and the strides that a
    result should have if anything is still to be read from it."""
    return parts[0] == ((0, tokens(like)),) and part.dtype == like.dtype and (len(parts) == 1 or part.is_contiguous())


@dataclass(frozen=True)
class Entry:
    """Tokens `[start, stop)` of the sum are those from `at` on of part number `part`."""

    part: int
    start: int
    stop: int
    at: int


@dataclass(frozen=True)
class Range:
    """Tokens `[start, stop)` of the sum, and the few stretches that meet them."""

    start: int
    stop: int
    entries: tuple[Entry, ...]


@memo(lambda found, *_: 1 + sum([len(each.entries) for each in found]))
def ranges(n: int, parts: tuple[Intervals, ...], most: int = MOST) -> tuple[Range, ...]:
    """`[0, n)` in as few ranges as meet at most `most` stretches each; a token has at most as many parts."""
    entries = []
    for number, intervals in enumerate(parts):
        for (start, stop), (at, _) in zip(intervals, side_by_side(intervals), strict=True):
            if stop > start:
                entries.append(Entry(number, start, stop, at))
    if len(entries) <= most:
        return (Range(0, n, tuple(entries)),)
    found: list[Range] = []
    begin, held = 0, dict.fromkeys(e for e in entries if e.start <= 0)
    for cut in sorted({e.start for e in entries} | {e.stop for e in entries} | {n}):
        if not 0 < cut < n:
            continue
        alive = [e for e in held if e.stop > cut]
        new = [e for e in entries if e.start == cut]
        if len(held) + len(new) > most:
            found.append(Range(begin, cut, tuple(held)))
            begin, held = cut, dict.fromkeys(alive)
        held |= dict.fromkeys(new)
    found.append(Range(begin, n, tuple(held)))
    return tuple(found)
