"""The executor of rings and gathers: in each step a rank computes on some keys, while those of the next step travel. A ring has
a step for each owner, whose keys it pulls straight from there, and only the ones that some call needs. A gather has one step with
the needed keys of all ranks in sequence order, for one group of KV heads at a time, and maybe one on the local KV before it. A
plan of one step on the local KV is a local call.

How often each token's results are combined is known in advance (`reduction.parts`), so that only tokens with three or more
parts need an fp32 buffer. In the backward each step's dk and dv go straight back to the owners, where all parts are summed in
fp32. It may take the heads in groups: of several, the last one's step on the local KV comes last, so that the other steps'
gradients travel while it computes."""

from __future__ import annotations

from contextlib import AbstractContextManager, closing, nullcontext
from functools import partial
from typing import Any

from torch import Tensor

from attention.batched_copy import copy_all, moves
from attention.dtypes import accumulation_dtype
from attention.executors.keys import GradReturn, KeyPair, LocalKeys, one_by_one
from attention.executors.nested_prefixes import forward as nested_prefixes
from attention.executors.plan import LocalCall, Plan
from attention.executors.work import Work, messages
from attention.geometry.intervals import length
from attention.geometry.transfers import Move, query_move
from attention.kernels.interface import Grads, Triple
from attention.masks.band import Intervals
from attention.profiling import phase
from attention.reduction.grad_sum import sum_all
from attention.reduction.parts import Accumulator, Sum, SumAtOnce
from attention.reduction.sinks import SAVED, sinks_gradients, with_sinks
from attention.tensors import cut, dense_like, empty_lse, empty_tokens, result_like, take, tokens
from attention.transports import Messages

Saved = tuple[Tensor, ...]
NOTHING: AbstractContextManager[object] = nullcontext()


def forward(q: Tensor, k: Tensor, v: Tensor, plan: Plan, sinks: Tensor | None = None) -> tuple[Tensor, Tensor, Saved]:
    """(out, lse) of this rank's queries, and what the backward needs. q, k, v: this rank's shards. sinks: `[H]`."""
    if plan.only_call is not None:
        with phase("comp_block", 0):
            if plan.takes_whole(q, k):
                out, lse = plan.kernel.attend((q, k, v), plan.only_call)
            else:
                out, lse = plan.kernel.forward(q, k, v, plan.only_call)
        if sinks is None:
            return out, lse, (q, k, v, out, lse)
    else:
        q = relayout(q, plan, to_compute=True)
        out, lse = _forward(q, k, v, plan)
    saved: Saved = q, k, v, out, lse
    if sinks is not None:
        saved += (sinks,)
        with phase("comp_merge", len(plan.steps)):
            with_sinks(out, lse, sinks)
    if plan.want_lse:
        lse = relayout(lse.transpose(-1, -2).unsqueeze(-1), plan, to_compute=False).squeeze(-1).transpose(-1, -2)
    return relayout(out, plan, to_compute=False), lse, saved


def backward(dout: Tensor, saved: Saved, plan: Plan, into: Triple | None = None) -> Grads:
    """(dq, dk, dv) of this rank's shards, from the final out and lse; written to `into` if given; then the sinks'
    gradient, if any."""
    q, k, v, out, lse = saved[:SAVED]
    if plan.only_call is not None:
        with phase("comp_block", 0):
            if into is None and plan.takes_whole(q, k):
                grads = plan.kernel.gradients((dout, q, k, v, out, lse), plan.only_call)
            else:
                grads = plan.kernel.backward(dout, q, k, v, out, lse, plan.only_call, into)
        return grads if len(saved) == SAVED else (*grads, *sinks_gradients(dout, saved))
    dout = relayout(dout, plan, to_compute=True)
    dq, dk, dv = _backward(dout, q, k, v, out, lse, plan, into)
    return relayout(dq, plan, to_compute=False), dk, dv, *sinks_gradients(dout, saved)


def relayout(x: Tensor, plan: Plan, to_compute: bool) -> Tensor:
    """Queries, their gradients or outputs, moved from the shards' layout to the layout for computing (`q_layout`), or
    with `to_compute=False` back."""
    if not plan.moves_queries:
        return x

    def planned() -> tuple[Move, Messages]:
        moving = query_move(plan.problem, plan.rank)
        moving = moving if to_compute else moving.reversed()
        return moving, messages(plan, moving.route, n=1)

    moving, pulls = plan.once(("q", to_compute), planned)
    out = dense_like(x)
    with closing(plan.transport.publish("q", [x])) as published:
        transfer = published.pull(pulls, [out], 0)
    copy_all(moves(out, x, moving.local))
    transfer.wait()
    return out


def _forward(q: Tensor, k: Tensor, v: Tensor, plan: Plan) -> tuple[Tensor, Tensor]:
    """(out, lse) of the queries. q, out and lse are in the layout for computing."""
    work = plan.derived.get("forward") or plan.once("forward", partial(Work, plan, q, k, backward=False))
    like, into = result_like(q, v), None
    if work.allocates:
        into = empty_tokens(like, tokens(q)), empty_lse(q)
    totals = [
        Accumulator(cut(like, heads), work.queries[g], into and [cut(x, heads) for x in into])
        for g, (heads, _) in enumerate(work.groups)
    ]
    with closing(LocalKeys(k, v, plan, work)) as local:
        for g, i, (keys, values) in one_by_one(local.pull, work.rounds):
            for calls in work.calls[i]:
                rows, call = cut(q, work.groups[g].q), calls[0]
                place = totals[g].target() if len(calls) == 1 else None
                with phase("comp_block", i):
                    if len(calls) > 1:
                        part = nested_prefixes(rows, keys, values, calls, plan)
                    else:
                        part = plan.kernel.forward(
                            take(rows, call.q), take(keys, call.k), take(values, call.k), call.call, place
                        )
                with phase("comp_merge", i):
                    totals[g].add(*part, placed=place is not None)
                del part  # else it is held while the next call computes
            del keys, values
    with phase("comp_merge", len(plan.steps)):
        results = [total.result() for total in totals]
    return into or results[0]


def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, plan: Plan, into: Triple | None
) -> Triple:
    """(dq, dk, dv). dout, q, out, lse and dq are in the layout for computing."""
    work = plan.once("backward", partial(Work, plan, q, k, backward=True))
    if into is None and work.allocates:
        into = empty_tokens(q, tokens(q)), empty_tokens(k, tokens(k)), empty_tokens(v, tokens(v))
    returning: tuple[GroupSums, GradReturn] | None = None  # of the previous round
    with work.priority, closing(LocalKeys(k, v, plan, work)) as local:
        sums = [GroupSums((dout, q, out, lse), local.by_group[g], plan, work, g, into) for g in range(len(work.groups))]
        for g, i, (keys, values) in one_by_one(local.pull, work.rounds):
            home = sums[g].compute(i, keys, values)
            if returning is not None:
                returning[0].add_arrived(returning[1])
            returning = None
            if home is not None:
                home.start()
                returning = sums[g], home
            del keys, values
        if returning is not None:
            returning[0].add_arrived(returning[1])
        work.priority.join()
        with phase("comp_merge", len(plan.steps)):
            results = [x.finish() for x in sums]
    return into or results[0]


class GroupSums:
    """The sums of one head group's dq, dk and dv. A ring adds parts of dk and dv as they come, a gather adds all of them at once.
    inputs: dout, q, out and lse. local: the group's keys and values on this rank. into: tensors like q, k and v to write to."""

    def __init__(self, inputs: Saved, local: KeyPair, plan: Plan, work: Work, g: int, into: Triple | None):
        heads = work.groups[g]
        self.inputs, self.local, self.plan, self.work = [cut(x, heads.q) for x in inputs], local, plan, work
        self.q, self.late = self.inputs[1], work.late[g]
        self.into = into and (cut(into[0], heads.q), cut(into[1], heads.k), cut(into[2], heads.k))
        self.dq = Sum([self.q], work.queries[g], self.into and self.into[:1])
        into_keys: Any = self.into and self.into[1:]  # for a gather there always are some
        self.dkv: Any = SumAtOnce(into_keys, *work.keys[g]) if plan.gathers else Sum(local, work.keys[g], into_keys)
        self.late_parts: list[Triple] = []  # of the step on the local KV, to be added at the end

    def compute(self, i: int, keys: Tensor, values: Tensor) -> GradReturn | None:
        """All kernel calls of step i. Adds the parts of dq, and the parts of dk and dv of local keys; those of other keys are
        summed, to be returned."""
        step = self.plan.steps[i]
        if not step.most:  # all of its keys are local
            for (call,) in self.work.calls[i]:
                grads = self._computed(i, call, keys, values, self._place_of_local(call))
                if self.late:
                    self.late_parts.append(grads)
                else:
                    with phase("comp_merge", i):
                        self._add(*grads)
                del grads  # else they are held while the next call computes
            return None
        home = GradReturn(self.plan, self.work, i, self.local, early=self.work.apart)
        whole, parts = ((0, step.n_keys),), list[tuple[KeyPair, Intervals]]()
        for (call,) in self.work.calls[i]:
            rows, into = self.dq.target(), None
            direct = call.k == whole and not parts
            if rows or direct:
                dk, dv = home.computed if direct else [empty_tokens(x, length(call.k)) for x in (keys, values)]
                into = (rows[0] if rows else empty_tokens(self.q, length(call.q))), dk, dv
            dq, dk, dv = self._computed(i, call, keys, values, into)
            parts.append(((dk, dv), call.k))
            with phase("comp_merge", i):
                self.dq.add(dq, placed=rows is not None)
            del dq, into
        if [x for _, x in parts] != [whole]:
            with phase("comp_merge", i):
                sum_all(home.computed, parts)
        return home

    def _computed(self, i: int, call: LocalCall, keys: Tensor, values: Tensor, into: Triple | None) -> Triple:
        """dq of the call's queries, and its part of dk and dv of its keys."""
        dout, q, out, lse = self.inputs
        local = not self.plan.steps[i].most
        with self.work.priority.background() if local else NOTHING, phase("comp_block", i):
            return self.plan.kernel.backward(
                take(dout, call.q),
                take(q, call.q),
                take(keys, call.k),
                take(values, call.k),
                take(out, call.q),
                take(lse, call.q, -1),
                call.call,
                into,
            )

    def _place_of_local(self, call: LocalCall) -> Triple | None:
        """The tensors that a call on the local KV writes its gradients to; None: new ones.

        A call that covers all tokens and is added first or last writes to the result tensors. But in fp32 and fp64 the sum of
        a ring's other parts is kept there, so that the last call can't. For a call on the background stream, tensors are
        allocated here, so that they belong to the high-priority stream."""
        (k, v), q = self.local, self.q
        if self.into is not None and call.q == ((0, tokens(q)),) and call.k == ((0, tokens(k)),):
            rounded = q.dtype != accumulation_dtype(q.dtype)
            if rounded or self.plan.gathers if self.late else not self.dq.number:
                return self.into
        if not self.work.apart:
            return None
        return empty_tokens(q, length(call.q)), empty_tokens(k, length(call.k)), empty_tokens(v, length(call.k))

    def add_arrived(self, home: GradReturn) -> None:
        """Waits for the dk and dv that remote ranks computed for this rank's keys, and adds them."""
        arrived = home.arrived()
        with phase("comp_merge", home.i):
            for places in self.work.own:
                self.dkv.add(*(take(x, places) for x in home.computed))
            for pair in arrived:
                self.dkv.add(*pair)

    def _add(self, dq: Tensor, dk: Tensor, dv: Tensor) -> None:
        self.dq.add(dq)
        self.dkv.add(dk, dv)

    def finish(self) -> Triple:
        """(dq, dk, dv), once all parts have come."""
        for grads in self.late_parts:
            self._add(*grads)
        self.late_parts = []
        (dq,), (dk, dv) = self.dq.result(), self.dkv.result()
        return dq, dk, dv
