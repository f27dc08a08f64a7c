"""Results combined from partial results ("parts") that arrive one by one and cover different tokens."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from attention.dtypes import accumulation_dtype
from attention.geometry.merge_plan import MergePlan, Sweep, merge_plan
from attention.masks.band import Intervals
from attention.tensors import FEW, put_, take, tokens

Cover = MergePlan | Sequence[Intervals]


class Stepwise:
    """The parts are declared in advance. Takes ownership of them.

    A token's first part is kept as it is; the kernel that combines its last part also rounds the result. Only tokens with
    three parts or more need a buffer in the accumulation dtype. If the first part covers all tokens, its tensors become
    the result. So one part costs nothing, and two parts cost one kernel, which reads two tensors and writes one.

    like: tensors of the shape and dtype of the results. parts: the intervals of each part, in the order in which they will
    be added, or their plan. dims: the token dimension of each tensor of a part. outs: the tensors to write to, by default new ones."""

    def __init__(self, like: Sequence[Tensor], parts: Cover, dims: Sequence[int], outs: Sequence[Tensor] | None = None):
        self.like, self.dims, self.outs = like, dims, outs
        self.plan = parts if isinstance(parts, MergePlan) else merge_plan(tokens(like[0]), tuple(parts))
        self.buffers: dict[int, Tensor] = {}  # by result: the running result of tokens with three parts or more
        self.kept: dict[int, Sequence[Tensor]] = {}  # by number: earlier parts that a later part will be combined with
        self.number = 0  # of the next part

    def new(self) -> Sequence[Tensor]:
        """Uninitialised tensors for the results."""
        raise NotImplementedError

    def clear(self, *outs: Tensor) -> None:
        """Writes the result of tokens without a part."""
        raise NotImplementedError

    def combine(self, into: Sequence[Tensor], a: Sequence[Tensor], b: Sequence[Tensor]) -> None:
        """Writes the combination of two partial results over the same tokens. `into` may be `a`."""
        raise NotImplementedError

    def add(self, *part: Tensor) -> None:
        """The next part: the tokens of its intervals side by side, in any dtype."""
        plan, number = self.plan, self.number
        if self.outs is None and plan.whole and self._may_be_results(part):
            self.outs = part
        outs = self._started()
        for each in plan.of[number]:
            if not each.first:
                self._combine(each, part, outs)
            elif each.last and part is not outs:
                for out, x, dim in zip(outs, part, self.dims, strict=True):
                    if x is not out:
                        put_(out, each.rows, take(x, each.at, dim), dim)
        self.kept[number] = part
        self.kept = {i: x for i, x in self.kept.items() if plan.until[i] > number}
        self.number += 1

    def _may_be_results(self, part: Sequence[Tensor]) -> bool:
        """Whether a first part with all tokens can become the results: if parts follow, it is contiguous."""
        more = len(self.plan.of) > 1
        for x, like in zip(part, self.like, strict=False):  # the LSE is never rounded
            if x.dtype != like.dtype or (more and not x.is_contiguous()):
                return False
        return True

    def _combine(self, each: Sweep, part: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
        before, targets, places = [], [], []
        for i, (out, dim) in enumerate(zip(outs, self.dims, strict=True)):
            first, at = (self.kept[each.kept[0]][i], each.kept[1]) if each.kept else self._partial(i, out, each.rows)
            into, rows = (out, each.rows) if each.last else self._partial(i, out, each.rows)
            before.append(take(first, at, dim))
            targets.append(before[i] if first is into and at == rows else take(into, rows, dim))
            places.append((into, rows, targets[i], dim))
        self.combine(targets, before, [take(x, each.at, dim) for x, dim in zip(part, self.dims, strict=True)])
        if len(each.rows) > 1:  # the targets are copies
            for place in places:
                put_(*place)

    def _partial(self, number: int, out: Tensor, rows: Intervals) -> tuple[Tensor, Intervals]:
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

    def result(self) -> Sequence[Tensor]:
        assert self.number == len(self.plan.of), f"{self.number} of {len(self.plan.of)} parts were added"
        self.buffers.clear()
        return self._started()

    def _started(self) -> Sequence[Tensor]:
        if self.outs is None:
            self.outs = self.new()
        if self.number == 0 and self.plan.bare:
            bare = self.plan.bare if len(self.plan.bare) <= FEW else [(0, self.plan.n)]
            for start, stop in bare:
                self.clear(*(x.narrow(dim, start, stop - start) for x, dim in zip(self.outs, self.dims, strict=True)))
        return self.outs
