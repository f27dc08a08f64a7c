"""The ring executor: step i computes against one owner's keys while the next step's keys travel; the partial results
are merged. A step pulls its keys straight from their owner, and only the ones that some block needs. In the backward
each step's dk and dv go straight back to the owner and are summed there in fp32. A schedule with one step is a local
call.

The number of partial results of each token is known in advance, so that only tokens with three or more need an fp32
buffer. The backward of a long shard computes one half of the heads after the other. So its buffers are half as large, and
the second half's keys travel while the first half computes. In the second half the step on the local KV comes last, so
that the other steps' gradients travel while it computes."""

from __future__ import annotations

from contextlib import AbstractContextManager, closing, nullcontext

from torch import Tensor

from attention.dtypes import accumulation_dtype
from attention.executors.gradients import GradReturn
from attention.executors.head_groups import HeadGroup, head_groups
from attention.executors.keys import Arriving, KeyPair, LocalKeys
from attention.executors.plan import LocalCall, Plan
from attention.executors.policy import ring_parts
from attention.geometry.intervals import length
from attention.geometry.layouts import largest
from attention.geometry.merge_plan import MergePlan, merge_plan
from attention.gpu.streams import PriorityStream
from attention.kernels.interface import Grads, Triple
from attention.masks.band import Intervals
from attention.profiling import phase
from attention.reduction.grad_sum import Sum
from attention.reduction.lse_merge import Accumulator
from attention.reduction.sinks import saved_with, sinks_gradients, with_sinks
from attention.tensors import empty_tokens, result_like, take, tokens

Saved = tuple[Tensor, ...]
NOTHING: AbstractContextManager[object] = nullcontext()


def forward(q: Tensor, k: Tensor, v: Tensor, plan: Plan, sinks: Tensor | None = None) -> tuple[Tensor, Tensor, Saved]:
    """(out, lse) of this rank's queries, and what the backward needs. q, k, v: this rank's shards. sinks: `[H]`."""
    if plan.only_call is not None:
        with phase("comp_block", 0):
            out, lse = plan.kernel.forward(q, k, v, plan.only_call)
        if sinks is not None:
            with phase("comp_merge", 1):
                out, lse = with_sinks(out, lse, sinks)
        return out, lse, saved_with(sinks, q, k, v, out, lse)
    ring = _ring(plan, q, k)
    total = Accumulator(result_like(q, v), ring.queries[False])
    with closing(LocalKeys(k, v, plan, ring.whole, ring.most is not None, ring.most)) as local:
        arriving = _step_keys(local, (0, 0))
        for i, step in enumerate(plan.steps):
            keys, values = arriving.wait()
            if i + 1 < len(plan.steps):
                arriving = _step_keys(local, (0, i + 1))
            for each in step.calls:
                with phase("comp_block", i):
                    part = plan.kernel.forward(take(q, each.q), take(keys, each.k), take(values, each.k), each.call)
                with phase("comp_merge", i):
                    total.add(*part)
                del part  # else it is held while the next call computes
    with phase("comp_merge", len(plan.steps)):
        out, lse = with_sinks(*total.result(), sinks)
    return out, lse, saved_with(sinks, q, k, v, out, lse)


def backward(dout: Tensor, saved: Saved, plan: Plan, into: Triple | None = None) -> Grads:
    """(dq, dk, dv) of this rank's shards, from the final out and lse; written to `into` if given; then the sinks'
    gradient, if any."""
    inputs = saved[:5]
    return *_backward(dout, inputs, plan, into), *sinks_gradients(dout, saved)


def _backward(dout: Tensor, saved: Saved, plan: Plan, into: Triple | None) -> Triple:
    q, k, v, out, lse = saved
    if plan.only_call is not None:
        with phase("comp_block", 0):
            return plan.kernel.backward(dout, q, k, v, out, lse, plan.only_call, into)
    ring = _ring(plan, q, k)
    groups, last = ring.groups, len(plan.steps)
    before = plan.priority_stream(len(groups))
    if into is None and (len(groups) > 1 or before.apart):
        into = (empty_tokens(q, tokens(q)), empty_tokens(k, tokens(k)), empty_tokens(v, tokens(v)))
    sums: list[_GroupSums] = []  # of the head groups begun so far
    returning: _StepReturn | None = None  # of the previous round
    with before as priority, closing(LocalKeys(k, v, plan, groups, ring.most is not None, ring.most)) as local:
        arriving = _step_keys(local, ring.rounds[0])
        for number, (g, i) in enumerate(ring.rounds, 1):
            keys, values = arriving.wait()
            if number < len(ring.rounds):
                arriving = _step_keys(local, ring.rounds[number])
            first = g == len(sums)
            if first:
                inputs = [groups[g].queries(x) for x in (dout, q, out, lse)]
                sums.append(_GroupSums(inputs, local.by_group[g], ring, priority, g, into and groups[g].of(into)))
            home = _StepReturn(sums[g], ring, i) if plan.steps[i].most else None
            for each in plan.steps[i].calls:
                sums[g].compute(each, i, keys, values, home)
            if returning is not None:
                returning.add_arrived()
            if first and g:
                sums[g - 1].results(last)
            if home is not None:
                home.start()
            returning = home
        if returning is not None:
            returning.add_arrived()
        grads = sums[-1].results(last)
    return into if into is not None and len(groups) > 1 else grads


class _Ring:
    """What all calls of a plan have in common. A round is one step for one head group. While it computes, the keys of the
    next round arrive, and the gradients of the previous round travel to their owners.

    most: the most tokens that a rank publishes; None: no rank pulls keys. queries, keys: how the parts of this rank's
    queries and keys are combined, by whether the step on the local KV comes last. remote: likewise for the keys of each step
    that gradients return from; None where one call has all of them, so that its kernel writes what is published."""

    def __init__(self, plan: Plan, q: Tensor, k: Tensor):
        self.plan, problem, steps = plan, plan.problem, plan.steps
        pulled = any(step.most for step in steps)
        self.most = largest(problem.layout, problem.cu_seqlens, problem.world) if pulled else None
        self.whole = head_groups(q.shape[-2], k.shape[-2], None)
        self.groups = groups = _backward_groups(q, k, plan)
        self.rounds = [(g, i) for g in range(len(groups)) for i in self._order(_local_last(g, len(groups)))]
        self.queries, self.keys = dict[bool, MergePlan](), dict[bool, MergePlan]()
        for last in (False, True):
            queries = [each.q for i in self._order(last) for each in steps[i].calls]
            self.queries[last] = merge_plan(tokens(q), tuple(queries))
            self.keys[last] = merge_plan(tokens(k), tuple(_key_parts(plan, last)))
        self.remote = [
            None if [each.k for each in step.calls] == [((0, step.n_keys),)]
            else merge_plan(step.n_keys, tuple(each.k for each in step.calls))
            for step in steps
        ]  # fmt: skip

    def _order(self, local_last: bool) -> list[int]:
        """The indices of the steps in the order of their computation."""
        steps = self.plan.steps
        return sorted(range(len(steps)), key=lambda i: local_last and steps[i].owner == self.plan.rank)


def _ring(plan: Plan, q: Tensor, k: Tensor) -> _Ring:
    ring = plan.derived.get("ring")
    if ring is None:
        ring = plan.derived["ring"] = _Ring(plan, q, k)
    return ring  # type: ignore[no-any-return]


def _step_keys(local: LocalKeys, number: tuple[int, int]) -> Arriving[KeyPair]:
    """Starts the transfer of one step's keys for one head group. number: (index of the head group, index of the step)."""
    group, i = number
    step = local.plan.steps[i]
    if not step.most:  # no rank pulls keys in this step
        return Arriving(local.by_group[group], None)
    remote = step.owner != local.plan.rank
    return local.pull(step.route, group, i, step.n_keys if remote else None)


def _covers(each: LocalCall, q: Tensor, k: Tensor) -> bool:
    """Whether a call computes all queries against all keys."""
    return each.q == ((0, tokens(q)),) and each.k == ((0, tokens(k)),)


def _local_last(group: int, groups: int) -> bool:
    """Whether the step on the local KV comes last: in the last of several head groups, while gradients travel. In the
    other groups it comes first, while keys travel."""
    return 0 < group == groups - 1


def _backward_groups(q: Tensor, k: Tensor, plan: Plan) -> list[HeadGroup]:
    """`head_parts` head groups, by default two for a long shard. Within an all-to-all one group, because the
    all-to-all already divides the heads."""
    kv_heads, parts = k.shape[-2], 1
    if plan.problem.ulysses == 1:
        parts = ring_parts(plan.options.head_parts, kv_heads, tokens(k))
    return head_groups(q.shape[-2], kv_heads, kv_heads // parts)


class _GroupSums:
    """The sums of one head group's dq, dk and dv; the parts are added in the order of `_Ring`. With `local_last` those of the
    step on the local KV come last. The sums are written to `into` if it is given. inputs: dout, q, out and lse."""

    def __init__(
        self, inputs: list[Tensor], local: KeyPair, ring: _Ring, priority: PriorityStream, g: int, into: Triple | None
    ):
        self.inputs, self.q, (self.k, self.v) = inputs, inputs[1], local
        self.plan, self.priority, self.into = ring.plan, priority, into
        self.local_last = last = priority.apart or _local_last(g, len(ring.groups))
        self.late_dq, self.late_dkv = list[Tensor](), list[KeyPair]()  # to be added at the end
        self.dq = Sum([self.q], ring.queries[last], into and into[:1])
        self.dkv = Sum(local, ring.keys[last], into and into[1:])

    def compute(self, each: LocalCall, i: int, keys: Tensor, values: Tensor, home: _StepReturn | None) -> None:
        """One kernel call of step i, whose dq, dk and dv are added to the sums."""
        dout, q, out, lse = self.inputs
        local = self.plan.steps[i].owner == self.plan.rank
        into = self.buffers_of_local(each) if local else home.buffers_of(each) if home is not None else None
        with self.priority.background() if local else NOTHING, phase("comp_block", i):
            dq, dk, dv = self.plan.kernel.backward(
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
            if local:
                self.add_local(dq, dk, dv)
            else:
                self.dq.add(dq)
                if home is not None and home.total is not None:
                    home.total.add(dk, dv)

    def buffers_of_local(self, each: LocalCall) -> Triple | None:
        """The tensors that a call on the local KV writes its gradients to; None: new ones.

        A call that covers all tokens and is added last writes to the result tensors, to which the sum of the other
        parts is then added. In fp32 and fp64 that sum itself is kept in the result tensors, so the call cannot write
        there. For a call on the background stream, tensors are allocated here, so that they belong to the high-priority
        stream."""
        rounded = self.q.dtype != accumulation_dtype(self.q.dtype)
        if self.local_last and rounded and _covers(each, self.q, self.k):
            return self.into
        if not self.priority.apart:
            return None
        n_keys = length(each.k)
        return empty_tokens(self.q, length(each.q)), empty_tokens(self.k, n_keys), empty_tokens(self.v, n_keys)

    def add_local(self, dq: Tensor, dk: Tensor, dv: Tensor) -> None:
        """Add the gradients of a call on the local KV, or keep them for later."""
        if self.priority.apart:  # the background stream may still write them
            self.late_dq.append(dq)
        else:
            self.dq.add(dq)
        if self.local_last:
            self.late_dkv.append((dk, dv))
        else:
            self.dkv.add(dk, dv)

    def results(self, number: int) -> Triple:
        if self.late_dq:
            self.priority.join()
        with phase("comp_merge", number):
            for dq_part in self.late_dq:
                self.dq.add(dq_part)
            for parts in self.late_dkv:
                self.dkv.add(*parts)
            self.late_dq, self.late_dkv = [], []
            (dq,), (dk, dv) = self.dq.result(), self.dkv.result()
            return dq, dk, dv


def _key_parts(plan: Plan, local_last: bool) -> list[Intervals]:
    """The parts of this rank's dk and dv, in the order in which they are added. Each call of the step on the local KV
    adds one. Gradients that remote ranks compute in a step arrive during the next step and are added after its calls.
    With `local_last`, the local parts come at the end."""
    found: list[Intervals] = []
    returning: list[Intervals] = []
    local: list[Intervals] = []
    for step in plan.steps:
        if step.owner == plan.rank:
            (local if local_last else found).extend(each.k for each in step.calls)
        found += returning
        returning = [piece.target for piece in step.route.reversed().receives] if step.most else []
    return found + returning + local


class _StepReturn:
    """Sends one step's dk and dv to the keys' owner. They are summed in memory that the transport publishes. If one
    call covers all keys of the step, its kernel writes there directly."""

    def __init__(self, sums: _GroupSums, ring: _Ring, i: int):
        step, self.sums, self.i = ring.plan.steps[i], sums, i
        local = step.owner == ring.plan.rank
        n = 0 if local else step.n_keys
        self.home = GradReturn(ring.plan, step.route, (sums.k, sums.v), n, step.most, i, early=sums.priority.apart)
        total = None if local else ring.remote[i]
        self.total = None if total is None else Sum(self.home.computed, total, into=self.home.computed)

    def buffers_of(self, each: LocalCall) -> Triple | None:
        """The tensors that a call on remote keys writes to; None: new ones."""
        if self.total is not None:
            return None
        dk, dv = self.home.computed
        return empty_tokens(self.sums.q, length(each.q)), dk, dv

    def start(self) -> None:
        if self.total is not None:
            self.total.result()
        self.home.start()

    def add_arrived(self) -> None:
        arrived = self.home.arrived()
        with phase("comp_merge", self.i):
            for pair, _ in arrived:
                self.sums.dkv.add(*pair)
