"""The ring executor: step i computes against one owner's keys while the next step's keys travel; the partial results
are merged. A step pulls its keys straight from their owner, and only the ones that some block needs. In the backward
each step's dk and dv go straight back to the owner and are summed there in fp32. A schedule with one step is a local
call.

The number of partial results of each token is known in advance, so that only tokens with three or more need an fp32
buffer. The backward of a long shard computes one half of the heads after the other. So its buffers are half as large, and
the second half's keys travel while the first half computes. In the second half the step on the local KV comes last, so
that the other steps' gradients travel while it computes."""

from __future__ import annotations

from contextlib import closing, nullcontext

from torch import Tensor

from attention.dtypes import accumulation_dtype
from attention.executors.gradients import GradReturn
from attention.executors.head_groups import HeadGroup, head_groups
from attention.executors.keys import Arriving, KeyPair, LocalKeys
from attention.executors.plan import LocalCall, Plan
from attention.executors.policy import ring_parts
from attention.geometry.layouts import largest
from attention.geometry.schedules import length
from attention.geometry.transfers import Intervals
from attention.kernels.interface import Grads, Triple
from attention.profiling import phase
from attention.reduction.grad_sum import Sum
from attention.reduction.lse_merge import Accumulator
from attention.reduction.sinks import saved_with, sinks_gradients, with_sinks
from attention.runtime.priority_stream import PriorityStream
from attention.tensors import empty_tokens, result_like, take, tokens

Saved = tuple[Tensor, ...]


def forward(q: Tensor, k: Tensor, v: Tensor, plan: Plan, sinks: Tensor | None = None) -> tuple[Tensor, Tensor, Saved]:
    """(out, lse) of this rank's queries, and what the backward needs. q, k, v: this rank's shards. sinks: `[H]`."""
    if plan.only_call is not None:
        with phase("comp_block", 0):
            out, lse = plan.kernel.forward(q, k, v, plan.only_call)
        if sinks is not None:
            with phase("comp_merge", 1):
                out, lse = with_sinks(out, lse, sinks)
        return out, lse, saved_with(sinks, q, k, v, out, lse)
    total = Accumulator(result_like(q, v), [each.q for step in plan.steps for each in step.calls])
    with closing(_publish(k, v, plan, head_groups(q.shape[-2], k.shape[-2], None))) as local:
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
        out, lse = total.result()
        out, lse = with_sinks(out, lse, sinks)
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
    groups = _backward_groups(q, k, plan)
    before = plan.priority_stream(len(groups))
    if into is None and (len(groups) > 1 or before.apart):
        into = (empty_tokens(q, tokens(q)), empty_tokens(k, tokens(k)), empty_tokens(v, tokens(v)))
    rounds = [(g, i) for g in range(len(groups)) for i in _step_order(plan, _local_last(g, len(groups)))]
    with before as priority, closing(_publish(k, v, plan, groups)) as local:
        ring = _RingBackward((dout, q, out, lse), plan, groups, local, priority, into)
        arriving = _step_keys(local, rounds[0])
        for number, (g, i) in enumerate(rounds, 1):
            keys, values = arriving.wait()
            if number < len(rounds):
                arriving = _step_keys(local, rounds[number])
            ring.compute(g, i, keys, values)
        found = ring.finish()
    return into if into is not None and len(groups) > 1 else found


def _publish(k: Tensor, v: Tensor, plan: Plan, groups: list[HeadGroup]) -> LocalKeys:
    problem = plan.problem
    any_pulled = any(step.most for step in plan.steps)
    most = largest(problem.layout, problem.cu_seqlens, problem.world) if any_pulled else None
    return LocalKeys(k, v, plan, groups, any_pulled, most)


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


def _step_order(plan: Plan, local_last: bool) -> list[int]:
    """The indices of the steps in the order of their computation."""
    return sorted(range(len(plan.steps)), key=lambda i: local_last and plan.steps[i].owner == plan.rank)


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


class _RingBackward:
    """The rounds of a backward; a round is one step for one head group. While a round computes, the keys of the next
    round arrive, and the gradients of the previous round travel to their owners."""

    def __init__(
        self,
        inputs: tuple[Tensor, Tensor, Tensor, Tensor],  # dout, q, out and lse
        plan: Plan,
        groups: list[HeadGroup],
        local: LocalKeys,
        priority: PriorityStream,
        into: Triple | None,
    ):
        self.inputs, self.plan, self.groups, self.local, self.priority, self.into = (
            inputs,
            plan,
            groups,
            local,
            priority,
            into,
        )
        self.sums: list[_GroupSums] = []  # of the head groups begun so far
        self.returning: _StepReturn | None = None  # of the previous round

    def compute(self, group: int, i: int, keys: Tensor, values: Tensor) -> None:
        """Computes step i for one head group, and starts the return of its dk and dv."""
        first = group == len(self.sums)
        if first:
            self.sums.append(self._sums_of(group))
        sums, step = self.sums[group], self.plan.steps[i]
        home = _StepReturn(sums, self.plan, i) if step.most else None
        for each in step.calls:
            self._call(each, group, i, keys, values, home)
        self._add_arrived()
        if first and group:
            self.sums[group - 1].results(len(self.plan.steps))
        if home is not None:
            home.start()
        self.returning = home

    def finish(self) -> Triple:
        """The gradients of the last head group."""
        self._add_arrived()
        return self.sums[-1].results(len(self.plan.steps))

    def _sums_of(self, group: int) -> _GroupSums:
        last = self.priority.apart or _local_last(group, len(self.groups))
        heads, into = self.groups[group], self.into
        q, given = heads.queries(self.inputs[1]), heads.of(into) if into else None
        return _GroupSums(q, self.local.by_group[group], self.plan, self.priority, last, given)

    def _call(
        self, each: LocalCall, group: int, i: int, keys: Tensor, values: Tensor, home: _StepReturn | None
    ) -> None:
        """One kernel call, whose dq, dk and dv are added to the sums."""
        sums, heads = self.sums[group], self.groups[group].queries
        local = self.plan.steps[i].owner == self.plan.rank
        dout, q, out, lse = (heads(x) for x in self.inputs)
        into = sums.buffers_of_local(each) if local else home.buffers_of(each) if home is not None else None
        with self.priority.background() if local else nullcontext(), phase("comp_block", i):
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
                sums.add_local(dq, dk, dv)
            else:
                sums.dq.add(dq)
                if home is not None:
                    home.add(dk, dv)

    def _add_arrived(self) -> None:
        """Add the gradients that arrived in the previous round."""
        if self.returning is not None:
            self.returning.add_arrived()
            self.returning = None


class _GroupSums:
    """The sums of one head group's dq, dk and dv. The order of their parts is declared here, and they must be added in
    this order. With `local_last`, the parts of the step on the local KV come last. The sums are written to `into` if it
    is given."""

    def __init__(
        self, q: Tensor, local: KeyPair, plan: Plan, priority: PriorityStream, local_last: bool, into: Triple | None
    ):
        self.q, (self.k, self.v) = q, local
        self.priority, self.local_last, self.into = priority, local_last, into
        self.late_dq, self.late_dkv = list[Tensor](), list[KeyPair]()  # to be added at the end
        queries = [each.q for i in _step_order(plan, local_last) for each in plan.steps[i].calls]
        self.dq = Sum([q], queries, into and into[:1])
        self.dkv = Sum(local, _key_parts(plan, local_last), into and into[1:])

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

    def __init__(self, sums: _GroupSums, plan: Plan, i: int):
        self.sums, self.i, step = sums, i, plan.steps[i]
        local = step.owner == plan.rank
        n = 0 if local else step.n_keys
        self.home = GradReturn(plan, step.route, (sums.k, sums.v), n, step.most, i, early=sums.priority.apart)
        self.direct = not local and len(step.calls) == 1 and step.calls[0].k == ((0, n),)
        self.total: Sum | None = None
        if not local and not self.direct:
            self.total = Sum(self.home.computed, [each.k for each in step.calls], into=self.home.computed)

    def buffers_of(self, each: LocalCall) -> Triple | None:
        """The tensors that a call on remote keys writes to; None: new ones."""
        if not self.direct:
            return None
        dk, dv = self.home.computed
        return empty_tokens(self.sums.q, length(each.q)), dk, dv

    def add(self, dk: Tensor, dv: Tensor) -> None:
        if self.total is not None:
            self.total.add(dk, dv)

    def start(self) -> None:
        if self.total is not None:
            self.total.result()
        self.home.start()

    def add_arrived(self) -> None:
        arrived = self.home.arrived()
        with phase("comp_merge", self.i):
            for pair, _ in arrived:
                self.sums.dkv.add(*pair)
