"""The ring executor: step i computes against one owner's keys while the next step's are on their way; partial results
merge. A step's keys come straight from their owner, and only those that some block needs; in the backward each step's
dk and dv go straight home and are summed there in fp32. A schedule with one step is a local call.

What parts a token of out, dq, dk and dv will have is known beforehand, so that only what lies between its first and its
last part is ever kept in fp32."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace

from torch import Tensor

from attention.executors.plan import Plan
from attention.kernels.interface import Triple
from attention.layouts import size
from attention.merge import Accumulator
from attention.phases import phase
from attention.schedules import length
from attention.sums import Sum
from attention.tensors import room, take, token_dim
from attention.transfers import Intervals, side_by_side
from attention.transports import Handle, Offer

Saved = tuple[Tensor, ...]


def forward(q: Tensor, k: Tensor, v: Tensor, plan: Plan) -> tuple[Tensor, Tensor, Saved]:
    """q, k, v: this rank's shards. Returns (out, lse) for this rank's queries."""
    total = Accumulator(q, [each.q for step in plan.steps for each in step.calls])
    with closing(_Keys(k, v, plan)) as source:
        incoming = source.fetch(0)
        for i, step in enumerate(plan.steps):
            keys, values = incoming.wait()
            if i + 1 < len(plan.steps):
                incoming = source.fetch(i + 1)
            for each in step.calls:
                with phase("comp_block", i):
                    part = plan.kernel.forward(take(q, each.q), take(keys, each.k), take(values, each.k), each.call)
                with phase("comp_merge", i):
                    total.add(*part)
    with phase("comp_merge", len(plan.steps)):
        out, lse = total.result()
    return out, lse, (q, k, v, out, lse)


def backward(dout: Tensor, saved: Saved, plan: Plan, wanted: Triple | None = None) -> Triple:
    """Gradients of this rank's shards, from the final out and lse; in `wanted` where that is given."""
    q, k, v, out, lse = saved
    if len(plan.steps) == 1 and len(plan.steps[0].calls) == 1:
        each = plan.steps[0].calls[0]
        if each.q == ((0, q.shape[token_dim(q)]),) and each.k == ((0, k.shape[token_dim(k)]),):
            with phase("comp_block", 0):
                return plan.kernel.backward(dout, q, k, v, out, lse, each.call, wanted)
    in_q, in_k, in_v = wanted or (None, None, None)
    dq = Sum(q, [each.q for step in plan.steps for each in step.calls], in_q)
    dk, dv = (Sum(x, _key_parts(plan), into) for x, into in ((k, in_k), (v, in_v)))
    returning: _Return | None = None
    with closing(_Keys(k, v, plan)) as source:
        incoming = source.fetch(0)
        for i, step in enumerate(plan.steps):
            keys, values = incoming.wait()
            if i + 1 < len(plan.steps):
                incoming = source.fetch(i + 1)
            mine = step.owner == plan.rank
            home = _Return(k, v, plan, i) if step.most else None
            for each in step.calls:
                into: Triple | None = None
                if home is not None and home.direct:
                    into = (room(q, length(each.q)), home.grads[0], home.grads[1])
                with phase("comp_block", i):
                    dq_part, dk_part, dv_part = plan.kernel.backward(
                        take(dout, each.q),
                        take(q, each.q),
                        take(keys, each.k),
                        take(values, each.k),
                        take(out, each.q),
                        take(lse, each.q, -1),
                        each.call,
                        into,
                    )
                with phase("comp_merge", i):
                    dq.add(dq_part)
                    if mine:
                        dk.add(dk_part)
                        dv.add(dv_part)
                    elif home is not None and not home.direct:
                        home.add(dk_part, dv_part)
            if returning is not None:
                returning.add_to(dk, dv)
                returning = None
            if home is not None:
                home.start()
                returning = home
    if returning is not None:
        returning.add_to(dk, dv)
    with phase("comp_merge", len(plan.steps)):
        return dq.result(), dk.result(), dv.result()


def _key_parts(plan: Plan) -> list[Intervals]:
    """The parts of this rank's dk and dv in the order in which they come: its own, and after each step what the peers'
    kernels wrote in the step before."""
    found: list[Intervals] = []
    returning: list[Intervals] = []
    for step in plan.steps:
        if step.owner == plan.rank:
            found += [each.k for each in step.calls]
        found += returning
        returning = [piece.target for piece in step.route.reversed().receives] if step.most else []
    return found + returning


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
    """One step's dk and dv on their way home, and others' for this rank's keys on their way here. What goes home is written
    where the transport takes it from, by the kernel itself if one call has all of the step's keys (`direct`)."""

    def __init__(self, k: Tensor, v: Tensor, plan: Plan, i: int):
        self.plan, self.i, self.k = plan, i, k
        step = plan.steps[i]
        self.route = step.route.reversed()
        mine = step.owner == plan.rank
        n = 0 if mine else step.n_keys
        shapes = [(*x.shape[:-3], n, *x.shape[-2:]) for x in (k, v)]
        self.grads = plan.transport.room("dkv", shapes, k, step.most)
        self.direct = not mine and len(step.calls) == 1 and step.calls[0].k == ((0, n),)
        self.sums: list[Sum] = []
        if not mine and not self.direct:
            self.sums = [Sum(grad, [each.k for each in step.calls], into=grad) for grad in self.grads]

    def add(self, dk_part: Tensor, dv_part: Tensor) -> None:
        self.sums[0].add(dk_part)
        self.sums[1].add(dv_part)

    def start(self) -> None:
        plan = self.plan
        self.received = []
        receives = []
        for piece in self.route.receives:
            parts = [room(self.k, length(piece.target)) for _ in self.grads]
            self.received.append(parts)
            receives += plan.messages([replace(piece, target=side_by_side(piece.target))], parts)
        for total in self.sums:
            total.result()
        with closing(plan.transport.offer("dkv", self.grads, plan.steps[self.i].most)) as offer:
            self.handle = offer.fetch(plan.messages(self.route.sends), receives, self.i)

    def add_to(self, dk: Sum, dv: Sum) -> None:
        self.handle.wait()
        with phase("comp_merge", self.i):
            for k_part, v_part in self.received:
                dk.add(k_part)
                dv.add(v_part)
