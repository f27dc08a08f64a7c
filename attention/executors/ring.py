"""The ring executor: step i computes against one owner's keys while the next step's are on their way; partial results
merge. A step's keys come straight from their owner, and only those that some block needs; in the backward each step's
dk and dv go straight home and are summed there in fp32. A schedule with one step is a local call."""

from __future__ import annotations

import torch
from torch import Tensor

from attention.executors.plan import Plan, PlannedStep
from attention.merge import Accumulator
from attention.phases import phase
from attention.tensors import add_, take, token_dim, wide
from attention.transfers import Intervals, Route
from attention.transports import Handle

Saved = tuple[Tensor, ...]


def forward(q: Tensor, k: Tensor, v: Tensor, plan: Plan) -> tuple[Tensor, Tensor, Saved]:
    """q, k, v: this rank's shards. Returns (out, lse) for this rank's queries."""
    total = Accumulator(q)
    incoming = _Fetch(k, v, plan, 0)
    for i, step in enumerate(plan.steps):
        keys, values = incoming.wait()
        if i + 1 < len(plan.steps):
            incoming = _Fetch(k, v, plan, i + 1)
        for each in step.calls:
            with phase("comp_block", i):
                out, lse = plan.kernel.forward(take(q, each.q), take(keys, each.k), take(values, each.k), each.call)
            with phase("comp_merge", i):
                at = 0
                for start, stop in each.q:
                    n = stop - start
                    dim = token_dim(out)
                    total.add(start, stop, out.narrow(dim, at, n), lse.narrow(-1, at, n))
                    at += n
    with phase("comp_merge", len(plan.steps)):
        out, lse = total.result()
    return out, lse, (q, k, v, out, lse)


def backward(dout: Tensor, saved: Saved, plan: Plan) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of this rank's shards, from the final out and lse."""
    q, k, v, out, lse = saved
    if len(plan.steps) == 1 and len(plan.steps[0].calls) == 1:
        each = plan.steps[0].calls[0]
        if each.q == ((0, q.shape[token_dim(q)]),) and each.k == ((0, k.shape[token_dim(k)]),):
            with phase("comp_block", 0):
                return plan.kernel.backward(dout, q, k, v, out, lse, each.call)
    dq, dk, dv = (torch.zeros(x.shape, dtype=wide(x.dtype), device=x.device) for x in (q, k, v))
    incoming = _Fetch(k, v, plan, 0)
    returning: _Return | None = None
    for i, step in enumerate(plan.steps):
        keys, values = incoming.wait()
        if i + 1 < len(plan.steps):
            incoming = _Fetch(k, v, plan, i + 1)
        mine = step.owner == plan.rank
        outgoing: list[Tensor] = []
        if not mine and step.keys:
            outgoing = [torch.empty_like(keys), torch.empty_like(values)]
            if not _covers_once(step):
                outgoing = [torch.zeros(x.shape, dtype=wide(x.dtype), device=x.device) for x in outgoing]
        for each in step.calls:
            with phase("comp_block", i):
                dq_, dk_, dv_ = plan.kernel.backward(
                    take(dout, each.q),
                    take(q, each.q),
                    take(keys, each.k),
                    take(values, each.k),
                    take(out, each.q),
                    take(lse, each.q, -1),
                    each.call,
                )
            with phase("comp_merge", i):
                add_(dq, each.q, dq_)
                if mine:
                    add_(dk, each.k, dk_)
                    add_(dv, each.k, dv_)
                elif _covers_once(step):
                    outgoing = [dk_, dv_]
                else:
                    add_(outgoing[0], each.k, dk_)
                    add_(outgoing[1], each.k, dv_)
        if returning is not None:
            returning.add_to(dk, dv)
        returning = _Return([x.to(k.dtype) for x in outgoing], k, v, plan, i)
    if returning is not None:
        returning.add_to(dk, dv)
    with phase("comp_merge", len(plan.steps)):
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _covers_once(step: PlannedStep) -> bool:
    """Whether one call writes the gradients of all of the step's keys, so that nothing has to be summed."""
    return len(step.calls) == 1 and step.calls[0].k == ((0, step.n_keys),)


def _message(x: Tensor, intervals: Intervals) -> Tensor:
    return take(x, intervals).contiguous()


def _room(x: Tensor, n: int) -> Tensor:
    shape = list(x.shape)
    shape[token_dim(x)] = n
    return x.new_empty(shape)


class _Fetch:
    """The keys and values of one step, on their way to this rank, and this rank's on their way to those who need them."""

    def __init__(self, k: Tensor, v: Tensor, plan: Plan, i: int):
        step = plan.steps[i]
        self.own = (k, v) if step.owner == plan.rank else None
        sends = [(plan.peer(place), _message(x, keys)) for place, keys in step.route.sends for x in (k, v)]
        self.received = [_room(x, step.n_keys) for x in (k, v)] if step.route.receives else []
        receives = [(plan.peer(place), x) for place, _ in step.route.receives for x in self.received]
        self.handle: Handle = plan.transport.exchange(sends, receives, "kv", i)
        self.empty = (k, v)

    def wait(self) -> tuple[Tensor, Tensor]:
        self.handle.wait()
        if self.own is not None:
            return self.own
        if not self.received:
            return _room(self.empty[0], 0), _room(self.empty[1], 0)
        return self.received[0], self.received[1]


class _Return:
    """One step's dk and dv on their way home, and others' for this rank's keys on their way here."""

    def __init__(self, outgoing: list[Tensor], k: Tensor, v: Tensor, plan: Plan, i: int):
        self.route: Route = plan.steps[i].route.reversed()
        self.step = i
        sends = [(plan.peer(place), x.contiguous()) for place, _ in self.route.sends for x in outgoing]
        self.received = [
            (intervals, [_room(x, sum(b - a for a, b in intervals)) for x in (k, v)])
            for _, intervals in self.route.receives
        ]
        receives = [
            (plan.peer(place), x)
            for (place, _), (_, pair) in zip(self.route.receives, self.received, strict=True)
            for x in pair
        ]
        self.handle = plan.transport.exchange(sends, receives, "dkv", i)

    def add_to(self, dk: Tensor, dv: Tensor) -> None:
        self.handle.wait()
        with phase("comp_merge", self.step):
            for intervals, (k_part, v_part) in self.received:
                add_(dk, intervals, k_part)
                add_(dv, intervals, v_part)
