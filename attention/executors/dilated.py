"""The executor of dilated attention: each component is plain attention of some heads over a stride of the tokens. Where no key
travels it is one kernel call on a strided view, of equal segments as a batch; else the gather executor brings it the selected
keys. Head groups have places of their own in the result; LongNet's pairs are merged by their LSE. Where more than two pairs meet
at one place, results and gradients are accumulated in fp32.

With the option `copies` (the plain form) components and their results are copied.

Tensors are `[B, S, H, D]` or packed `[T, H, D]`, an LSE `[B, H, S]` or `[H, T]`; those of a component are batches of its segments,
`[B * fold, n, h, D]` and `[B * fold, h, n]`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from attention.dtypes import accumulation_dtype
from attention.executors import gather
from attention.executors.plan import Plan, plan_steps
from attention.kernels.interface import Grads, Pair, Triple
from attention.profiling import phase
from attention.reduction.lse_merge import merge
from attention.reduction.sinks import saved_with, sinks_gradients, with_sinks
from attention.tensors import empty_lse, result_like, tokens

if TYPE_CHECKING:
    from attention.variants.dilated import Component, Mixture

Saved = tuple[Tensor, ...]


def forward(q: Tensor, k: Tensor, v: Tensor, plan: Plan, sinks: Tensor | None = None) -> tuple[Tensor, Tensor, Saved]:
    """(out, lse) of this rank's queries, and what the backward needs. q, k, v: this rank's shards. sinks: `[H]`."""
    detached, n = plan.options.weights == "detached", _groups(plan)
    total, lse = _Total(0, result_like(q, v), plan), empty_lse(q)
    if total.cleared:
        lse.fill_(-torch.inf)
    own: Saved = ()
    for i, (c, part) in enumerate(_parts(plan, q.device)):
        into = None if detached else total.target(c)
        result = _attend(_inputs((q, k, v), c, plan), part, i, into)
        with phase("comp_merge", i):
            out, out_lse = _take(total.whole, c, 0), _lse_rows(lse, c)
            out_part = result[0].reshape(out.shape)
            lse_part = result[1].unflatten(0, (-1, c.fold)).transpose(1, 2).reshape(out_lse.shape)
            if c.earlier[0]:
                merge(out, out_lse, out, out_lse, out_part, lse_part)
            else:
                out_lse.copy_(lse_part)
                if into is None:
                    out.copy_(out_part)
        own += result if detached else ()
    with phase("comp_merge", len(plan.parts)):
        whole, lse = with_sinks(total.result(), lse, sinks)
        out = whole / n if n > 1 else whole
    return out, lse, (q, k, v, lse, *own) if detached else saved_with(sinks, q, k, v, whole, lse)


def backward(dout: Tensor, saved: Saved, plan: Plan) -> Grads:
    """(dq, dk, dv) of this rank's shards, and with sinks theirs. A component's backward has the final out and lse of all, or with
    detached weights its own and its share of dout."""
    detached, n = plan.options.weights == "detached", _groups(plan)
    qkv, total_lse = saved[:3], saved[3 if detached else 4]
    totals = [_Total(side, x, plan) for side, x in enumerate(qkv)]
    for i, (c, part) in enumerate(_parts(plan, dout.device)):
        dout_part = _folded(dout, c, 0, plan)
        lse = _lse_rows(total_lse, c).unflatten(-1, (c.fold, -1)).transpose(-2, -3).flatten(0, -3).contiguous()
        if detached:
            out, own_lse = saved[4 + 2 * i : 6 + 2 * i]
            share = (own_lse - lse).exp().masked_fill(lse == -torch.inf, 0)  # 0 where no key is seen
            dout_part, lse = (dout_part * share.transpose(1, 2).unsqueeze(-1)).to(dout.dtype), own_lse
        else:
            out = _folded(saved[3], c, 0, plan)
        dq, dk, dv = (total.target(c) for total in totals)
        into = None if dq is None or dk is None or dv is None else (dq, dk, dv)
        grads = _attend_backward(dout_part, _inputs(qkv, c, plan), (out, lse), part, i, into)
        if into is None:
            with phase("comp_merge", i):
                for total, x in zip(totals, grads, strict=True):
                    total.add(c, x)
    with phase("comp_merge", len(plan.parts)):
        # the sums are divided, not dout: rounding its often equal elements would bias the gradients
        sums = [total.result() if n == 1 else total.result().div_(n) for total in totals]
        return *sums, *([x / n for x in sinks_gradients(dout, saved)] if plan.sinks else [])


def _parts(plan: Plan, device: torch.device) -> Iterator[tuple[Component, Plan]]:
    """Each component with its plan; without the pattern cache the plan's kernel calls are made anew."""
    for c, part in plan.parts:
        if not plan.options.pattern_cache:
            for like in [x.call for step in part.steps for x in step.calls][:1]:
                part = replace(part, steps=plan_steps(part.problem, part.rank, like, False, device))
        yield c, part


def _groups(plan: Plan) -> int:
    """What the result of head groups is divided by: the number of pairs."""
    return len(cast("Mixture", plan.problem.schedule).pairs) if plan.options.mixing == "head_groups" else 1


def _views(x: Tensor, c: Component, side: int) -> list[Tensor]:
    """A component's tokens and heads of x, which is like q, k or v (side 0, 1 or 2), slice by slice."""
    return [x[..., c.offset :: c.rate, heads, :] for heads in c.taken[side]]


def _take(x: Tensor, c: Component, side: int) -> Tensor:
    """As `_views`, in one: a view, or of several slices a copy."""
    views = _views(x, c, side)
    return views[0] if len(views) == 1 else torch.cat(views, -2)


def _lse_rows(lse: Tensor, c: Component) -> Tensor:
    return lse[..., c.taken[0][0], c.offset :: c.rate]


def _folded(x: Tensor, c: Component, side: int, plan: Plan) -> Tensor:
    """A component's tokens as a batch of its segments: a view where one stride gives it, or with `copies` a copy."""
    rows = _take(x, c, side)
    rows = rows.reshape(-1, tokens(rows) // c.fold, *rows.shape[-2:])
    return rows.contiguous() if plan.options.copies else rows


def _inputs(qkv: Sequence[Tensor], c: Component, plan: Plan) -> Triple:
    q, k, v = (_folded(x, c, side, plan) for side, x in enumerate(qkv))
    return q, k, v


def _attend(qkv: Triple, part: Plan, i: int, into: Tensor | None) -> Pair:
    """(out, lse) of a component. into: where its kernel writes out."""
    if part.only_call is None:
        out, lse, _ = gather.forward(*qkv, part)
        return out, lse
    with phase("comp_block", i):
        return part.kernel.forward(*qkv, part.only_call, None if into is None else (into, empty_lse(qkv[0])))


def _attend_backward(dout: Tensor, qkv: Triple, result: Pair, part: Plan, i: int, into: Triple | None) -> Grads:
    """(dq, dk, dv) of a component. result: its out and lse. into: where its kernel writes them."""
    if part.only_call is None:
        return gather.backward(dout, (*qkv, *result), part)
    with phase("comp_block", i):
        return part.kernel.backward(dout, *qkv, *result, part.only_call, into)


class _Total:
    """A tensor like `like` to which every component gives its part: the first at a place writes there, others are combined with
    it, in the accumulation dtype where more than two pairs meet. side: 0 for out and dq, 1 for dk, 2 for dv."""

    def __init__(self, side: int, like: Tensor, plan: Plan):
        self.side, self.like, self.plan = side, like, plan
        components = [c for c, _ in plan.parts]
        wide = any(c.earlier[side] > 1 for c in components)
        dtype = accumulation_dtype(like.dtype) if wide else like.dtype
        kept = plan.derived if plan.options.memory_pool and dtype != like.dtype else {}
        key = side, like.shape
        if key not in kept:
            kept[key] = like.new_empty(like.shape, dtype=dtype)
        self.whole: Tensor = kept[key]
        # with rate 1 and all heads the first component writes everything
        written = [_take(like, c, side).shape for c in components[:1] if not c.earlier[side]]
        self.cleared = written != [like.shape]
        if self.cleared:
            self.whole.zero_()

    def target(self, c: Component) -> Tensor | None:
        """Where the kernel of a component may write: a view; None where there is none."""
        in_place = self.whole.dtype == self.like.dtype and not self.plan.options.copies
        viewed = c.fold == 1 or self.like.dim() == 3 or len(self.like) == 1 or tokens(self.like) % c.rate == 0
        able = in_place and viewed and c.problem.world == 1 and not c.earlier[self.side]
        return _folded(self.whole, c, self.side, self.plan) if able else None

    def add(self, c: Component, x: Tensor) -> None:
        """Adds a component's part of a gradient."""
        views = _views(self.whole, c, self.side)
        for view, rows in zip(views, x.split(x.shape[-2] // len(views), -2), strict=True):
            (view.add_ if c.earlier[self.side] else view.copy_)(rows.reshape(view.shape))

    def result(self) -> Tensor:
        return self.whole.to(self.like.dtype)
