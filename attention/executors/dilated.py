"""The executor of dilated attention: each component is plain attention of some heads over a stride of the tokens. Where no key
travels it is one kernel call on a strided view, of equal segments as a batch; else the executor of gathers brings it the selected
keys. Head groups have places of their own in the result; LongNet's pairs are merged by their LSE. Where more than two pairs meet
at one place, results and gradients are accumulated in fp32.

With the option `copies` (the plain form) components and their results are copied.

Tensors are `[B, S, H, D]` or packed `[T, H, D]`, an LSE `[B, H, S]` or `[H, T]`; those of a component are batches of its segments,
`[B * fold, n, h, D]` and `[B * fold, h, n]`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import log
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from attention.dtypes import accumulation_dtype
from attention.executors import exchange
from attention.executors.plan import Plan, plan_steps
from attention.gpu.uploads import held, uploaded
from attention.kernels.interface import Grads, Triple
from attention.profiling import phase
from attention.reduction.parts import merge
from attention.reduction.sinks import saved_with, sinks_gradients, with_sinks
from attention.tensors import empty_lse, result_like, tokens

if TYPE_CHECKING:
    from attention.variants.dilated import Component

Saved = tuple[Tensor, ...]


def forward(q: Tensor, k: Tensor, v: Tensor, plan: Plan, sinks: Tensor | None = None) -> tuple[Tensor, Tensor, Saved]:
    """(out, lse) of this rank's queries, and what the backward needs. q, k, v: this rank's shards. sinks: `[H]`."""
    detached = plan.options.weights == "detached"
    total, lse = _Totals(plan, result_like(q, v)), empty_lse(q)
    if total.cleared:
        lse.fill_(-torch.inf)
    own: Saved = ()
    for i, (c, part) in enumerate(_parts(plan, q.device)):
        into = None if detached else total.targets(c)
        qkv: Triple = _folded((q, k, v), c, plan)
        if part.only_call is None:
            out_part, lse_part, _ = exchange.forward(*qkv, part)
        else:
            with phase("comp_block", i):
                written = into and (*into, empty_lse(qkv[0]))
                out_part, lse_part = part.kernel.forward(*qkv, part.only_call, written)
        del qkv  # copies, that the next component's would be beside
        own += (out_part, lse_part) if detached else ()
        with phase("comp_merge", i):
            out, out_lse = _views(total.wholes[0], c, 0)[0], lse[..., c.taken[0][0], c.offset :: c.rate]
            out_part = out_part.reshape(out.shape)
            lse_part = lse_part.unflatten(0, (-1, c.fold)).transpose(1, 2).reshape(out_lse.shape)
            if c.earlier[0]:
                merge(out, out_lse, out, out_lse, out_part, lse_part)
            else:
                out_lse.copy_(lse_part)
                if into is None:
                    out.copy_(out_part)
    with phase("comp_merge", len(plan.parts)):
        whole, lse = with_sinks(total.results()[0], lse, sinks)
        out = total.finished(0, whole, torch.empty_like(whole), total.divisor) if total.divisor > 1 else whole
    return out, lse, (q, k, v, lse, *own) if detached else saved_with(sinks, q, k, v, whole, lse)


def backward(dout: Tensor, saved: Saved, plan: Plan) -> Grads:
    """(dq, dk, dv) of this rank's shards, and with sinks theirs. A component's backward has the final out and lse of all, or with
    detached weights its own and its share of dout. In bf16 gradients are divided by n pairs through the LSE, as those of
    exp(score - (lse + log n)): up to an LSE of 1e5 this sum is rounded less than they are. Other dtypes divide the gradients."""
    detached, qkv = plan.options.weights == "detached", saved[:3]
    totals = _Totals(plan, *qkv)
    lse_of_all, n = saved[3 if detached else 4], totals.divisor
    if n > 1 and dout.dtype == torch.bfloat16:
        lse_of_all, n = lse_of_all + log(n), 1
    for i, (c, part) in enumerate(_parts(plan, dout.device)):
        into = totals.targets(c)
        qkv_part: Triple = _folded(qkv, c, plan)
        (dout_part,) = _folded((dout,), c, plan)
        lse = lse_of_all[..., c.taken[0][0], c.offset :: c.rate]
        lse = lse.unflatten(-1, (c.fold, -1)).transpose(-2, -3).flatten(0, -3).contiguous()
        if detached:
            out_part, own_lse = saved[4 + 2 * i : 6 + 2 * i]
            share = (own_lse - lse).exp().masked_fill(lse == -torch.inf, 0)  # 0 where no key is seen
            dout_part, lse = (dout_part * share.transpose(1, 2).unsqueeze(-1)).to(dout.dtype), own_lse
        else:
            (out_part,) = _folded(saved[3:4], c, plan)
        if part.only_call is None:
            grads = exchange.backward(dout_part, (*qkv_part, out_part, lse), part)
        else:
            with phase("comp_block", i):
                grads = part.kernel.backward(dout_part, *qkv_part, out_part, lse, part.only_call, into)
        del dout_part, qkv_part, out_part
        if into is None:
            with phase("comp_merge", i):
                totals.add(c, grads)
    with phase("comp_merge", len(plan.parts)):
        of_sinks = [x / totals.divisor for x in sinks_gradients(dout, saved)] if plan.sinks else []
        return *(totals.finished(side, x, x, n) for side, x in enumerate(totals.results())), *of_sinks


def _parts(plan: Plan, device: torch.device) -> Iterator[tuple[Component, Plan]]:
    """Each component with its plan; without the pattern cache the plan's kernel calls are made anew."""
    for c, part in plan.parts:
        if not plan.options.pattern_cache:
            for like in [x.call for step in part.steps for x in step.calls][:1]:
                part = replace(part, steps=plan_steps(part.problem, part.rank, like, False, device))
        yield c, part


def _views(x: Tensor, c: Component, side: int) -> list[Tensor]:
    """A component's tokens and heads of x, which is like q, k or v (side 0, 1 or 2), slice by slice."""
    return [x[..., c.offset :: c.rate, heads, :] for heads in c.taken[side]]


def _folded(xs: Sequence[Tensor], c: Component, plan: Plan) -> Any:
    """A component's tokens and heads of tensors like q, k and v, each as a batch of its segments: views where one stride gives them,
    else and with `copies` copies. A tuple."""
    views = [_views(x, c, side) for side, x in enumerate(xs)]
    rows = [x[0] if len(x) == 1 else torch.cat(x, -2) for x in views]
    batches = [x.reshape(-1, tokens(x) // c.fold, *x.shape[-2:]) for x in rows]
    return tuple(x.contiguous() if plan.options.copies else x for x in batches)


class _Totals:
    """Tensors like out, or like q, k and v, to which every component gives its part: the first at a place writes there, others are
    combined with it, in the accumulation dtype where more than two pairs meet. divisor: of the results of head groups, the number of
    pairs. clears_last: whether places without a part become 0 in `finished`, not before."""

    def __init__(self, plan: Plan, *likes: Tensor):
        self.plan, self.like, self.wholes = plan, likes[0], list[Tensor]()
        self.divisor = len(plan.problem.schedule.pairs) if plan.options.mixing == "head_groups" else 1  # type: ignore[attr-defined]
        wide = any(max(c.earlier[: len(likes)]) > 1 for c, _ in plan.parts)
        dtype = accumulation_dtype(self.like.dtype) if wide else self.like.dtype
        kept = plan.derived if plan.options.memory_pool and dtype != self.like.dtype else {}
        self.in_place = dtype == self.like.dtype and not plan.options.copies  # whether kernels may write into them
        first = plan.parts[0][0]
        disjoint = not any(max(c.earlier[: len(likes)]) for c, _ in plan.parts)
        self.clears_last = self.divisor > 1 and disjoint and self.like.is_cuda and not plan.sinks
        for side, like in enumerate(likes):
            key = side, like.shape
            if key not in kept:
                kept[key] = like.new_empty(like.shape, dtype=dtype)
            # with rate 1 and all heads the first component writes everything
            self.cleared = first.earlier[side] or _views(like, first, side)[0].shape != like.shape
            self.wholes.append(kept[key].zero_() if self.cleared and not self.clears_last else kept[key])

    def targets(self, c: Component) -> Any:
        """Where the kernel of a component may write: views, None where there are none."""
        like = self.like
        viewed = c.fold == 1 or like.dim() == 3 or len(like) == 1 or tokens(like) % c.rate == 0
        able = self.in_place and viewed and c.problem.world == 1 and not any(c.earlier[: len(self.wholes)])
        return _folded(self.wholes, c, self.plan) if able else None

    def add(self, c: Component, grads: Grads) -> None:
        """Adds a component's part of the gradients."""
        for side, (whole, x) in enumerate(zip(self.wholes, grads, strict=True)):
            views = _views(whole, c, side)
            for view, rows in zip(views, [x] if len(views) == 1 else x.split(1, -2), strict=True):
                (view.add_ if c.earlier[side] else view.copy_)(rows.reshape(view.shape))

    def finished(self, side: int, x: Tensor, out: Tensor, n: int) -> Tensor:
        """x, like q, k or v (side 0, 1 or 2), divided by n into `out`, and 0 where there is no part. With n = 1 `out` is x."""
        if not self.clears_last:
            return x if n == 1 else torch.div(x, n, out=out)
        from attention.ops.rows import divide_strided

        def places() -> Tensor:
            rows = np.ones((2, x.shape[-2]), np.int32)
            for c, _ in self.plan.parts:
                for heads in c.taken[side]:
                    rows[:, heads] = [[c.rate], [c.offset]]
            return uploaded(rows, x.device)

        strides = held(self.plan.once(("strides", side, x.device), places), x.device)
        divide_strided(out, x, strides, n)
        return out

    def results(self) -> list[Tensor]:
        return [x.to(self.like.dtype) for x in self.wholes]
