"""Partial results ("parts") combined. Attention results over disjoint keys are merged by their LSE: `lse = logaddexp(lse1, lse2)`,
`out = exp(lse1 - lse) out1 + exp(lse2 - lse) out2`, computed in fp32 (fp64 for fp64). A part without keys has out 0 and lse -inf,
and never makes a NaN. On CUDA one Triton kernel reads each part once and writes the result once. Gradients are summed. Both may
arrive one by one and cover different tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attention.dtypes import accumulation_dtype
from attention.geometry.merge_plan import MergePlan, Sweep, merge_plan
from attention.masks.band import Intervals
from attention.reduction.grad_sum import sum_all
from attention.tensors import FEW, TOKENS, empty_lse, empty_tokens, put_, take, tokens, touch

Cover = MergePlan | Sequence[Intervals]


def merge(out: Tensor, lse: Tensor, a: Tensor, lse_a: Tensor, b: Tensor, lse_b: Tensor) -> None:
    """Write the merge of the parts `(a, lse_a)` and `(b, lse_b)` to `(out, lse)`, which may be either of them.

    out, a, b: `[B, S, H, D]` or `[T, H, D]`, in any dtypes and with any strides.
    lse, lse_a, lse_b: `[B, H, S]` or `[H, T]`, fp32 (fp64 for fp64)."""
    if out.is_cuda and out.stride(-1) == a.stride(-1) == b.stride(-1) == 1:
        from attention.ops.merge import merge_triton

        merge_triton(out, lse, a, lse_a, b, lse_b)
    elif out.is_meta:
        touch(out, a, b)
    else:
        merge_eager(out, lse, a, lse_a, b, lse_b)


def merge_eager(out: Tensor, lse: Tensor, a: Tensor, lse_a: Tensor, b: Tensor, lse_b: Tensor) -> None:
    """`merge` in eager PyTorch, on any device."""
    total = torch.logaddexp(lse_a, lse_b)
    # if both are empty, the weights are exp(-inf - 0) = 0 instead of exp(-inf + inf) = NaN
    safe = total.masked_fill(total == -torch.inf, 0)
    share_a, share_b = ((x - safe).exp().transpose(-1, -2).unsqueeze(-1) for x in (lse_a, lse_b))
    out.copy_(a * share_a + b * share_b)
    lse.copy_(total)


def empty_result(like: Tensor) -> tuple[Tensor, Tensor]:
    """(out of the shape of `like`, lse) of attention over no keys: 0 in the accumulation dtype, and -inf."""
    out = torch.zeros(like.shape, dtype=accumulation_dtype(like.dtype), device=like.device)
    return out, empty_lse(like).fill_(-torch.inf)


def merge_n(parts: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Merges n partial results over disjoint keys. A part without keys has lse -inf and out 0.

    parts: `[n, B, S, H, D]`; lses: `[n, B, H, S]`, fp32 (fp64 for fp64 parts), natural log.
    Returns (out `[B, S, H, D]` in the dtype of `parts`, lse `[B, H, S]` in the dtype of `lses`)."""
    out, lse = parts.new_empty(parts.shape[1:]), lses.new_empty(lses.shape[1:])
    if parts.is_cuda and parts.dtype != torch.float64:
        from attention.ops.merge import merge_n_triton

        merge_n_triton(parts, lses, out, lse)
    elif out.is_meta:
        touch(out, parts)
    else:
        merge_n_eager(parts, lses, out, lse)
    return out, lse


def merge_n_eager(parts: Tensor, lses: Tensor, out: Tensor, lse: Tensor) -> None:
    """Writes `merge_n` to `(out, lse)` in eager PyTorch, on any device."""
    total = torch.logsumexp(lses, 0)
    # if every part is empty, the weights are exp(-inf - 0) = 0 instead of exp(-inf + inf) = NaN
    safe = total.masked_fill(total == -torch.inf, 0)
    weights = (lses - safe).exp().transpose(-1, -2).unsqueeze(-1)
    out.copy_((parts.to(accumulation_dtype(parts.dtype)) * weights).sum(0))
    lse.copy_(total)


class Sum:
    """The sum of parts; several tensors of one shape, such as dk and dv, are summed together. The parts are declared in advance.
    Takes ownership of them.

    A token's first part is kept as it is; the kernel that combines its last part also rounds the result. Only tokens with
    three parts or more need a buffer in the accumulation dtype. If the first part covers all tokens, its tensors become
    the result. So one part costs nothing, and two parts cost one kernel, which reads two tensors and writes one.

    like: tensors of the shape and dtype of the results. parts: the intervals of each part, in the order in which they will
    be added, or their plan. into: the tensors to write to, by default new ones."""

    def __init__(self, like: Sequence[Tensor], parts: Cover, into: Sequence[Tensor] | None = None):
        self.like, self.outs = like, into
        self.dims: Sequence[int] = (TOKENS,) * len(like)  # the token dimension of each tensor of a part
        self.plan = parts if isinstance(parts, MergePlan) else merge_plan(tokens(like[0]), tuple(parts))
        self.cleared = not self.plan.bare
        self.buffers: dict[int, Tensor] = {}  # by result: the running result of tokens with three parts or more
        self.kept: dict[int, Sequence[Tensor]] = {}  # by number: earlier parts that a later part will be combined with
        self.number = 0  # of the next part

    def new(self) -> Sequence[Tensor]:
        """Uninitialised tensors for the results."""
        return [empty_tokens(x, tokens(x)) for x in self.like]

    def clear(self, *outs: Tensor) -> None:
        """Writes the result of tokens without a part."""
        for out in outs:
            out.zero_()

    def combine(self, into: Sequence[Tensor], a: Sequence[Tensor], b: Sequence[Tensor]) -> None:
        """Writes the combination of two partial results over the same tokens. `into` may be `a`."""
        everything = ((0, tokens(into[0])),)
        sum_all(into, [(a, everything), (b, everything)])

    def target(self) -> Any:
        """The place of the next part in the results, which it may be written to; None where there is none, because tokens of it
        have other parts or are no interval, or because its tensors become the results."""
        plan = self.plan
        if self.outs is None and plan.whole:
            return None
        sweeps = plan.of[self.number]
        if len(sweeps) != 1 or len(sweeps[0].rows) > 1 or not (sweeps[0].first and sweeps[0].last):
            return None
        return [take(out, sweeps[0].rows, dim) for out, dim in zip(self.result(), self.dims, strict=True)]

    def add(self, *part: Tensor, placed: bool = False) -> None:
        """The next part: the tokens of its intervals side by side, in any dtype. placed: whether it lies in `target`."""
        plan, number = self.plan, self.number
        if self.outs is None and plan.whole:
            # a first part with all tokens may become the results; the LSE is never rounded
            fits = all(x.dtype == like.dtype for x, like in zip(part, self.like, strict=False))
            if fits and (len(plan.of) == 1 or all(x.is_contiguous() for x in part[: len(self.like)])):
                self.outs = part
        outs = self.result()
        for sweep in () if placed else plan.of[number]:
            if not sweep.first:
                self._combine(sweep, part, outs)
            elif sweep.last:
                for out, x, dim in zip(outs, part, self.dims, strict=True):
                    if x is not out:
                        put_(out, sweep.rows, take(x, sweep.at, dim), dim)
        self.number += 1
        if plan.until[number] > number:
            self.kept[number] = part
        if self.number == len(plan.of):
            self.kept, self.buffers = {}, {}
        elif self.kept:
            self.kept = {i: x for i, x in self.kept.items() if plan.until[i] > number}

    def _combine(self, sweep: Sweep, part: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
        before, targets, places = [], [], []
        for i, (out, dim) in enumerate(zip(outs, self.dims, strict=True)):
            first, at = (
                (self.kept[sweep.kept[0]][i], sweep.kept[1]) if sweep.kept else self._running(i, out, sweep.rows)
            )
            into, rows = (out, sweep.rows) if sweep.last else self._running(i, out, sweep.rows)
            before.append(take(first, at, dim))
            targets.append(before[i] if first is into and at == rows else take(into, rows, dim))
            places.append((into, rows, targets[i], dim))
        self.combine(targets, before, [take(x, sweep.at, dim) for x, dim in zip(part, self.dims, strict=True)])
        if len(sweep.rows) > 1:  # the targets are copies
            for place in places:
                put_(*place)

    def _running(self, number: int, out: Tensor, rows: Intervals) -> tuple[Tensor, Intervals]:
        """The tensor that holds the running result of the tokens `rows` of out, and their intervals in it. It has the
        accumulation dtype; if that is out's dtype, it is out itself."""
        dtype = accumulation_dtype(out.dtype)
        if out.dtype == dtype:
            return out, rows
        start, stop = self.plan.running
        if number not in self.buffers:
            shape = list(out.shape)
            shape[self.dims[number]] = stop - start
            self.buffers[number] = out.new_empty(shape, dtype=dtype)
        return self.buffers[number], tuple((a - start, b - start) for a, b in rows)

    def result(self) -> Any:
        """The results, complete once all parts were added."""
        if self.outs is None:
            self.outs = self.new()
        if not self.cleared:
            self.cleared, bare = True, self.plan.bare
            for start, stop in bare if len(bare) <= FEW else [(0, self.plan.n)]:
                self.clear(*(x.narrow(dim, start, stop - start) for x, dim in zip(self.outs, self.dims, strict=True)))
        return self.outs


class Accumulator(Sum):
    """The merge of parts (out, lse), otherwise as `Sum`. like: a tensor with the shape and dtype of the whole out. parts: the query
    intervals of each part, or their plan."""

    def __init__(self, like: Tensor, parts: Cover, into: Sequence[Tensor] | None = None):
        super().__init__([like], parts, into)
        self.dims = (TOKENS, -1)

    def new(self) -> Sequence[Tensor]:
        (like,) = self.like
        return empty_tokens(like, tokens(like)), empty_lse(like)

    def clear(self, *outs: Tensor) -> None:
        out, lse = outs
        out.zero_()
        lse.fill_(-torch.inf)

    def combine(self, into: Sequence[Tensor], a: Sequence[Tensor], b: Sequence[Tensor]) -> None:
        merge(*into, *a, *b)


class SumAtOnce:
    """As `Sum`, but keeps all parts and adds them in one sweep. outs: the tensors to write to. first: how many parts come first,
    but are added last."""

    def __init__(self, outs: Sequence[Tensor], parts: Sequence[Intervals], first: int):
        self.outs, self.intervals, self.first = outs, parts, first
        self.parts: list[tuple[Sequence[Tensor], Intervals]] = []
        self.summed = False

    def add(self, *part: Tensor) -> None:
        self.parts.append((part, self.intervals[len(self.parts)]))
        if len(self.parts) == len(self.intervals):
            self.result()

    def result(self) -> Sequence[Tensor]:
        if not self.summed:
            sum_all(self.outs, self.parts[self.first :] + self.parts[: self.first])
            self.parts, self.summed = [], True
        return self.outs
