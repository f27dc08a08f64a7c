"""The executor of dilated attention: each component is plain attention of some heads over a stride of the tokens. Where no key
travels it is one kernel call on a strided view, of equal segments as a batch; else the gather executor brings it the selected
keys. Head groups have places of their own in the result; LongNet's pairs are merged by their LSE. Where more than two pairs meet
at one place, results and gradients are accumulated in fp32.

With the option `copies` (the plain form) components and their results are copied."""

from __future__ import annotations

from collections.abc import Sequence
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
    from attention.variants.dilated import Component, HeadNumbers, Mixture

Saved = tuple[Tensor, ...]


def forward(q: Tensor, k: Tensor, v: Tensor, plan: Plan, sinks: Tensor | None = None) -> tuple[Tensor, Tensor, Saved]:
    """(out, lse) of this rank's queries, and what the backward needs. q, k, v: this rank's shards. sinks: `[H]`."""
    packed = q.dim() == 3
    q, k, v = (x.unsqueeze(0) if packed else x for x in (q, k, v))
    detached, n = plan.options.weights == "detached", _groups(plan)
    total, lse = _Total("out", result_like(q, v), plan, False), empty_lse(q)
    if total.cleared:
        lse.fill_(-torch.inf)
    own: Saved = ()
    for i, (c, part) in enumerate(_parts(plan, q.device)):
        into = None if detached else total.target(c)
        out_part, lse_part = _attend(_inputs((q, k, v), c, plan), c, part, i, into)
        with phase("comp_merge", i):
            out, out_lse = _take(total.whole, c, c.q), _rows(lse, c)
            if not c.q.first:
                merge(out, out_lse, out, out_lse, out_part, lse_part)
            else:
                out_lse.copy_(lse_part)
                if into is None:
                    out.copy_(out_part)
        own += (out_part, lse_part) if detached else ()
    with phase("comp_merge", len(plan.parts)):
        whole, lse = with_sinks(total.result(), lse, sinks)
        out = whole / n if n > 1 else whole
    saved = (q, k, v, lse, *own) if detached else saved_with(sinks, q, k, v, whole, lse)
    return (out[0], lse[0], saved) if packed else (out, lse, saved)


def backward(dout: Tensor, saved: Saved, plan: Plan) -> Grads:
    """(dq, dk, dv) of this rank's shards, and with sinks theirs. A component's backward has the final out and lse of all, or with
    detached weights its own and its share of dout."""
    packed = dout.dim() == 3
    dout = dout.unsqueeze(0) if packed else dout
    qkv, n = saved[:3], _groups(plan)
    totals = [_Total(name, x, plan, name != "dq") for name, x in zip(("dq", "dk", "dv"), qkv, strict=True)]
    for i, (c, part) in enumerate(_parts(plan, dout.device)):
        if plan.options.weights == "detached":
            out, lse = saved[4 + 2 * i : 6 + 2 * i]
            rows = (_take(dout, c, c.q) * _share(lse, _rows(saved[3], c))).to(dout.dtype), out, lse
        else:
            rows = _take(dout, c, c.q), _take(saved[3], c, c.q), _rows(saved[4], c)
        dq, dk, dv = (total.target(c) for total in totals)
        into = None if dq is None or dk is None or dv is None else (dq, dk, dv)
        grads = _attend_backward(rows, _inputs(qkv, c, plan), c, part, i, into)
        if into is None:
            with phase("comp_merge", i):
                for total, x in zip(totals, grads, strict=True):
                    total.add(c, x)
    with phase("comp_merge", len(plan.parts)):
        # the sums are divided, not dout: rounding its often equal elements would bias the gradients
        sums = [total.result() if n == 1 else total.result().div_(n) for total in totals]
        of_sinks = [x / n for x in sinks_gradients(dout, saved)] if plan.sinks else []
    return *(x[0] if packed else x for x in sums), *of_sinks


def _parts(plan: Plan, device: torch.device) -> tuple[tuple[Component, Plan], ...]:
    """Each component with its plan; without the pattern cache the plan's kernel calls are made anew."""
    return plan.parts if plan.options.pattern_cache else tuple((c, _planned_anew(x, device)) for c, x in plan.parts)


def _planned_anew(part: Plan, device: torch.device) -> Plan:
    calls = [each.call for step in part.steps for each in step.calls]
    return replace(part, steps=plan_steps(part.problem, part.rank, calls[0], False, device)) if calls else part


def _groups(plan: Plan) -> int:
    """What the result of head groups is divided by: the number of pairs."""
    return len(cast("Mixture", plan.problem.schedule).pairs) if plan.options.mixing == "head_groups" else 1


def _take(x: Tensor, c: Component, heads: HeadNumbers) -> Tensor:
    """A component's tokens and heads `[B, n, h, D]` of x `[B, s, H, D]`: a view, or a copy where its heads are no slice."""
    rows = x[:, c.offset :: c.rate]
    return (
        torch.stack([rows[..., n, :] for n in heads.numbers], -2) if heads.slice is None else rows[..., heads.slice, :]
    )


def _rows(lse: Tensor, c: Component) -> Tensor:
    """A component's part `[B, h, n]` of an LSE `[B, H, s]`, a view."""
    return lse[:, c.q.slice, c.offset :: c.rate]


def _folded(x: Tensor, c: Component) -> Tensor:
    """Equal segments as a batch: `[B, n, h, D]` as `[B * fold, n / fold, h, D]`; of one sequence a view."""
    return x.unflatten(1, (c.fold, -1)).flatten(0, 1) if c.fold > 1 else x


def _unfolded(x: Tensor, c: Component) -> Tensor:
    return x.reshape(-1, c.fold * x.shape[1], *x.shape[2:])


def _inputs(qkv: Sequence[Tensor], c: Component, plan: Plan) -> Triple:
    """A component's q, k, v for its own problem: views, or copies."""
    q, k, v = (_folded(_take(x, c, heads), c) for x, heads in zip(qkv, (c.q, c.kv, c.kv), strict=True))
    return (q.contiguous(), k.contiguous(), v.contiguous()) if plan.options.copies else (q, k, v)


def _attend(qkv: Triple, c: Component, part: Plan, i: int, into: Tensor | None) -> Pair:
    """(out `[B, n, h, Dv]`, lse `[B, h, n]`) of a component. into: where its kernel writes out."""
    if not c.local:
        out, lse, _ = gather.forward(*qkv, part)
        return out, lse
    ((call,),) = (step.calls for step in part.steps)
    with phase("comp_block", i):
        out, lse = part.kernel.forward(*qkv, call.call, None if into is None else (into, empty_lse(qkv[0])))
    return _unfolded(out, c), lse.unflatten(0, (-1, c.fold)).transpose(1, 2).flatten(2, 3)


def _attend_backward(rows: Triple, qkv: Triple, c: Component, part: Plan, i: int, into: Triple | None) -> Grads:
    """(dq, dk, dv) of a component `[B, n, h, D]`. rows: its dout, out `[B, n, h, Dv]` and lse `[B, h, n]`. into: where its kernel
    writes them."""
    dout, out, lse = rows
    if not c.local:
        return gather.backward(dout, (*qkv, out, lse.contiguous()), part)
    ((call,),) = (step.calls for step in part.steps)
    dout, out = (x.contiguous() if part.options.copies else x for x in (_folded(dout, c), _folded(out, c)))
    lse = lse.unflatten(2, (c.fold, -1)).transpose(1, 2).flatten(0, 1).contiguous()
    with phase("comp_block", i):
        grads = part.kernel.backward(dout, *qkv, out, lse, call.call, into)
    return tuple(_unfolded(x, c) for x in grads)


def _share(own: Tensor, total: Tensor) -> Tensor:
    """exp(own - total) of LSEs `[B, h, n]`, as `[B, n, h, 1]`; 0 where no key is seen."""
    return (own - total).exp().masked_fill(total == -torch.inf, 0).transpose(1, 2).unsqueeze(-1)


class _Total:
    """A tensor like `like` to which every component gives its part: the first at a place writes there, others are combined with
    it, in the accumulation dtype where more than two pairs meet. of_keys: whether its heads are KV heads."""

    def __init__(self, name: str, like: Tensor, plan: Plan, of_keys: bool):
        self.like, self.of_keys = like, of_keys
        heads = [self.heads(c) for c, _ in plan.parts]
        dtype = accumulation_dtype(like.dtype) if any(x.earlier > 1 for x in heads) else like.dtype
        self.in_place = dtype == like.dtype and not plan.options.copies  # whether kernels may write into it
        pool = plan.pool if plan.options.memory_pool and dtype != like.dtype else {}
        key = name, like.shape
        if key not in pool:
            pool[key] = like.new_empty(like.shape, dtype=dtype)
        self.whole = pool[key]
        # with rate 1 and all heads the first component writes everything
        whole = bool(heads) and heads[0].first and len(heads[0].numbers) == like.shape[-2]
        self.cleared = not whole or plan.parts[0][0].rate > 1
        if self.cleared:
            self.whole.zero_()

    def heads(self, c: Component) -> HeadNumbers:
        return c.kv if self.of_keys else c.q

    def target(self, c: Component) -> Tensor | None:
        """Where the kernel of a component may write: a view; None where there is none."""
        viewed = c.fold == 1 or len(self.like) == 1 or tokens(self.like) % c.rate == 0
        able = self.in_place and c.local and viewed and self.heads(c).first
        return _folded(_take(self.whole, c, self.heads(c)), c) if able else None

    def add(self, c: Component, x: Tensor) -> None:
        """Adds a component's part of a gradient."""
        heads = self.heads(c)
        if heads.first:
            _take(self.whole, c, heads).copy_(x)
        elif heads.slice is not None:
            _take(self.whole, c, heads).add_(x)
        else:  # it may have a head several times
            for i, n in enumerate(heads.numbers):
                self.whole[:, c.offset :: c.rate, n].add_(x[:, :, i])

    def result(self) -> Tensor:
        return self.whole.to(self.like.dtype)
