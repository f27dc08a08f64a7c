"""Partial attention results over disjoint keys, merged by their LSE: `lse = logaddexp(lse1, lse2)`, `out = exp(lse1 -
lse) out1 + exp(lse2 - lse) out2`, computed in fp32 (fp64 for fp64). A part without keys has out 0 and lse -inf, and
never makes a NaN. On CUDA one Triton kernel reads each part once and writes the result once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attention.dtypes import accumulation_dtype
from attention.geometry.merge_plan import Bundle, merge_plan
from attention.geometry.transfers import Intervals
from attention.ops.results import result_tensors
from attention.reduction.grad_sum import Running, cut, may_be_result, source_and_target
from attention.tensors import FEW, empty_lse, empty_tokens, put_, take, tokens


def merge(out: Tensor, lse: Tensor, a: Tensor, lse_a: Tensor, b: Tensor, lse_b: Tensor) -> None:
    """Write the merge of the parts `(a, lse_a)` and `(b, lse_b)` to `(out, lse)`, which may be either of them.

    out, a, b: `[B, S, H, D]` or `[T, H, D]`, in any dtypes and any strides, but a contiguous last dim.
    lse, lse_a, lse_b: `[B, H, S]` or `[H, T]`, fp32 (fp64 for fp64)."""
    if out.is_cuda:
        from attention.ops.merge import merge_triton

        merge_triton(out, lse, a, lse_a, b, lse_b)
        return
    merge_eager(out, lse, a, lse_a, b, lse_b)


def merge_eager(out: Tensor, lse: Tensor, a: Tensor, lse_a: Tensor, b: Tensor, lse_b: Tensor) -> None:
    """`merge` in eager PyTorch, on any device."""
    total = torch.logaddexp(lse_a, lse_b)
    # where both are empty the weights are exp(-inf - 0) = 0 instead of exp(-inf + inf) = NaN
    safe = total.masked_fill(total == -torch.inf, 0)
    share_a, share_b = ((x - safe).exp().transpose(-1, -2).unsqueeze(-1) for x in (lse_a, lse_b))
    out.copy_(a * share_a + b * share_b)
    lse.copy_(total)


class Accumulator:
    """The merge of parts that come one by one. The queries of each part are declared in advance. Takes ownership of the
    parts.

    A query's first part is kept as it is, and its last part is merged by the kernel that rounds the result. Only
    queries with three parts or more need a buffer in the accumulation dtype. If the first part covers all queries, it
    becomes the result. So one part costs nothing; two parts cost one kernel, which reads two and writes one.

    parts: the query intervals of each part, in the order in which they will be added."""

    def __init__(self, q: Tensor, parts: Sequence[Intervals]):
        self.q, self.parts = q, tuple(parts)
        self.plan = merge_plan(tokens(q), self.parts)
        self.running = Running(self.plan.running)
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}
        self.number = 0  # of the next part
        self.out: Tensor | None = None
        self.lse: Tensor | None = None  # merged in place: it always has the accumulation dtype

    def add(self, part: Tensor, part_lse: Tensor) -> None:
        """Add the next part. part: like q, but only the tokens of the part's intervals, one after another; any dtype.
        part_lse: the LSE of these tokens."""
        if self.out is None and may_be_result(part, self.q, self.parts):
            self.out, self.lse = part, part_lse
        out, lse = self._begun()
        self.kept[self.number] = part, part_lse
        for each in self.plan.bundles[self.number]:
            if not each.first:
                self._merge(each, part, part_lse, out, lse)
            elif each.last and part is not out:
                put_(out, each.rows, take(part, each.at))
                put_(lse, each.rows, take(part_lse, each.at, -1), -1)
        self.kept = {i: x for i, x in self.kept.items() if self.plan.until[i] > self.number}
        self.number += 1

    def _merge(self, each: Bundle, part: Tensor, part_lse: Tensor, out: Tensor, lse: Tensor) -> None:
        if each.kept:
            (first, first_lse), places = self.kept[each.kept[0]], each.kept[1]
            lse_places = places
        else:
            (first, places), first_lse, lse_places = self.running.place(out, each.rows), lse, each.rows
        into, rows = (out, each.rows) if each.last else self.running.place(out, each.rows)
        before, target = source_and_target(first, places, into, rows)
        before_lse, target_lse = source_and_target(first_lse, lse_places, lse, each.rows, -1)
        merge(target, target_lse, before, before_lse, take(part, each.at), take(part_lse, each.at, -1))
        if len(rows) > 1:  # the targets are copies
            put_(into, rows, target)
            put_(lse, each.rows, target_lse, -1)

    def result(self) -> tuple[Tensor, Tensor]:
        """(out in the queries' dtype, lse)."""
        assert self.number == len(self.parts), f"{self.number} of {len(self.parts)} parts were added"
        return self._begun()

    def _begun(self) -> tuple[Tensor, Tensor]:
        if self.out is None or self.lse is None:
            self.out = empty_tokens(self.q, tokens(self.q))
            self.lse = empty_lse(self.q)
        if self.number == 0:
            for start, stop in self.plan.bare if len(self.plan.bare) <= FEW else [(0, tokens(self.out))]:
                cut(self.out, start, stop - start).zero_()
                self.lse.narrow(-1, start, stop - start).fill_(-torch.inf)
        return self.out, self.lse


def empty_result(q: Tensor) -> tuple[Tensor, Tensor]:
    """(out, lse) of attention over no keys: 0 in the accumulation dtype, and -inf."""
    return torch.zeros(q.shape, dtype=accumulation_dtype(q.dtype), device=q.device), empty_lse(q).fill_(-torch.inf)


def merge_n(
    parts: Tensor,
    lses: Tensor,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Merge n partial results over disjoint keys; a part without keys has lse -inf and out 0.

    parts: `[n, B, S, H, D]`; lses: `[n, B, H, S]`, fp32 (fp64 for fp64 parts), natural log.
    Returns (out `[B, S, H, D]`, lse `[B, H, S]` in the dtype of `lses`). `dtype` is the dtype of a new out, by default
    that of the parts. A given `out` or `lse` is written to instead, and may be `parts[0]` or `lses[0]`.

    Raises ValueError for shapes that do not belong together."""
    if parts.is_cuda and parts.dtype != torch.float64:
        from attention.ops.merge_n import merge_n_triton

        return merge_n_triton(parts, lses, dtype, out, lse)
    return merge_n_eager(parts, lses, dtype, out, lse)


def merge_n_eager(
    parts: Tensor,
    lses: Tensor,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`merge_n` in eager PyTorch, on any device."""
    out, lse = result_tensors(parts, lses, dtype, out, lse)
    total = torch.logsumexp(lses, 0)
    # where every part is empty the weights are exp(-inf - 0) = 0 instead of exp(-inf + inf) = NaN
    safe = total.masked_fill(total == -torch.inf, 0)
    weights = (lses - safe).exp().transpose(-1, -2).unsqueeze(-1)
    out.copy_((parts.to(accumulation_dtype(parts.dtype)) * weights).sum(0))
    lse.copy_(total)
    return out, lse
