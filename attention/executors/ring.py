"""The ring executor: step i computes against one owner's keys while the next step's are on their way; partial results
merge. A step's keys come straight from their owner, and only those that some block needs; in the backward each step's
dk and dv go straight home and are summed there in fp32. A schedule with one step is a local call."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace

import torch
from torch import Tensor

from attention.executors.plan import Plan, PlannedStep
from attention.layouts import size
from attention.merge import Accumulator
from attention.phases import phase
from attention.schedules import length
from attention.tensors import add_, room, take, token_dim, wide
from attention.transfers import side_by_side
from attention.transports import Handle, Offer

Saved = tuple[Tensor, ...]


def forward(q: Tensor, k: Tensor, v: Tensor, plan: Plan) -> tuple[Tensor, Tensor, Saved]:
    """q, k, v: this rank's shards. Returns (out, lse) for this rank's queries."""
    total = Accumulator(q)
    with closing(_Keys(k, v, plan)) as source:
        incoming = source.fetch(0)
        for i, step in enumerate(plan.steps):
            keys, values = incoming.wait()
            if i + 1 < len(plan.steps):
                incoming = source.fetch(i + 1)
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
    returning: _Return | None = None
    with closing(_Keys(k, v, plan)) as source:
        incoming = source.fetch(0)
        for i, step in enumerate(plan.steps):
            keys, values = incoming.wait()
            if i + 1 < len(plan.steps):
                incoming = source.fetch(i + 1)
            mine = step.owner == plan.rank
            home = _Return(k, v, plan, i) if step.most else None
            sums = [dk, dv] if mine or home is None else home.sums
            for each in step.calls:
                direct = home is not None and not mine and _covers_once(step)
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
                    if direct:
                        sums[0], sums[1] = dk_, dv_
                    else:
                        add_(sums[0], each.k, dk_)
                        add_(sums[1], each.k, dv_)
            if returning is not None:
                returning.add_to(dk, dv)
                returning = None
            if home is not None:
                home.start()
                returning = home
    if returning is not None:
        returning.add_to(dk, dv)
    with phase("comp_merge", len(plan.steps)):
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _covers_once(step: PlannedStep) -> bool:
    """Whether one call writes the gradients of all of the step's keys, so that nothing has to be summed."""
    return len(step.calls) == 1 and step.calls[0].k == ((0, step.n_keys),)


class _Keys:
    """This rank's keys and values, offered to all, and those of the steps, to be fetched."""

    def __init__(self, k: Tensor, v: Tensor, plan: Plan):
        self.k, self.v, self.plan = k, v, plan
        self.offer: Offer | None = None
        if any(step.most for step in plan.steps):
            shards = plan.problem.layout.shards(plan.problem.cu_seqlens, plan.problem.world)
            self.offer = plan.transport.offer("kv", (k, v), max(map(size, shards)))

    def fetch(self, i: int) -> _Incoming:
        return _Incoming(self, i)

    def close(self) -> None:
        if self.offer is not None:
            self.offer.close()


class _Incoming:
    """The keys and values of one step on their way to this rank, and this rank's to those who need them."""

    def __init__(self, source: _Keys, i: int):
        plan, step = source.plan, source.plan.steps[i]
        self.handle: Handle | None = None
        self.keys = (source.k, source.v)
        if step.owner != plan.rank:
            self.keys = (room(source.k, step.n_keys), room(source.v, step.n_keys))
        if source.offer is not None and step.most:
            receives = plan.messages(step.route.receives, self.keys)
            self.handle = source.offer.fetch(plan.messages(step.route.sends), receives, i)

    def wait(self) -> tuple[Tensor, Tensor]:
        if self.handle is not None:
            self.handle.wait()
        return self.keys


class _Return:
    """One step's dk and dv on their way home, and others' for this rank's keys on their way here."""

    def __init__(self, k: Tensor, v: Tensor, plan: Plan, i: int):
        self.plan, self.i, self.k = plan, i, k
        step = plan.steps[i]
        self.route = step.route.reversed()
        n = 0 if step.owner == plan.rank else step.n_keys
        if _covers_once(step):
            self.sums = [room(k, 0), room(v, 0)]  # the call's own results take their place
        else:
            self.sums = [torch.zeros_like(room(x, n), dtype=wide(x.dtype)) for x in (k, v)]

    def start(self) -> None:
        plan = self.plan
        self.received = []
        receives = []
        for piece in self.route.receives:
            parts = [room(self.k, length(piece.target)) for _ in self.sums]
            self.received.append((piece.target, parts))
            receives += plan.messages([replace(piece, target=side_by_side(piece.target))], parts)
        offer = plan.transport.offer("dkv", [x.to(self.k.dtype) for x in self.sums], plan.steps[self.i].most)
        with closing(offer):
            self.handle = offer.fetch(plan.messages(self.route.sends), receives, self.i)

    def add_to(self, dk: Tensor, dv: Tensor) -> None:
        self.handle.wait()
        with phase("comp_merge", self.i):
            for places, (k_part, v_part) in self.received:
                add_(dk, places, k_part)
                add_(dv, places, v_part)
