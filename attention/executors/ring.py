"""The ring executor: step i computes against one owner's keys while the next step's are on their way; partial results
merge. A step's keys come straight from their owner, and only those that some block needs; in the backward each step's
dk and dv go straight home and are summed there in fp32. A schedule with one step is a local call.

What parts a token of out, dq, dk and dv will have is known beforehand, so that only what lies between its first and its
last part is ever kept in fp32. A long backward goes through the ring once for each half of the heads: what it holds beside
its inputs and results is halved, and the second half's keys travel while the first computes. The last time the own keys
come last, so that the other steps' gradients are home by the end."""

from __future__ import annotations

from contextlib import closing, nullcontext

from torch import Tensor

from attention.dtypes import accumulation_dtype
from attention.executors.head_groups import HeadGroup, head_groups
from attention.executors.plan import LocalCall, Plan
from attention.executors.policy import ring_parts
from attention.geometry.layouts import largest
from attention.geometry.schedules import length
from attention.geometry.transfers import Intervals
from attention.kernels.interface import Triple
from attention.profiling import phase
from attention.reduction.grad_sum import Sum
from attention.reduction.lse_merge import Accumulator
from attention.runtime.priority_stream import Front
from attention.tensors import empty_pair, empty_tokens, take, tokens
from attention.transports import Handle, Offer

Saved = tuple[Tensor, ...]


def forward(q: Tensor, k: Tensor, v: Tensor, plan: Plan) -> tuple[Tensor, Tensor, Saved]:
    """q, k, v: this rank's shards. Returns (out, lse) for this rank's queries."""
    total = Accumulator(q, [each.q for step in plan.steps for each in step.calls])
    with closing(_Keys(k, v, plan, head_groups(q.shape[-2], k.shape[-2], None))) as source:
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
                del part  # or it would be held beside the next
    with phase("comp_merge", len(plan.steps)):
        out, lse = total.result()
    return out, lse, (q, k, v, out, lse)


def backward(dout: Tensor, saved: Saved, plan: Plan, wanted: Triple | None = None) -> Triple:
    """Gradients of this rank's shards, from the final out and lse; in `wanted` where that is given."""
    q, k, v, out, lse = saved
    if len(plan.steps) == 1 and len(plan.steps[0].calls) == 1 and _of_all(plan.steps[0].calls[0], q, k):
        with phase("comp_block", 0):
            return plan.kernel.backward(dout, q, k, v, out, lse, plan.steps[0].calls[0].call, wanted)
    groups = _backward_groups(q, k, plan)
    before = plan.front(len(groups))
    if wanted is None and (len(groups) > 1 or before.apart):
        wanted = (empty_tokens(q, tokens(q)), empty_tokens(k, tokens(k)), empty_tokens(v, tokens(v)))
    rounds = _rounds(len(groups), plan)
    sums: list[_Gradients] = []
    returning: _Return | None = None
    with before as front, closing(_Keys(k, v, plan, groups)) as source:
        incoming = source.fetch(0)
        for ahead, (g, i) in enumerate(rounds, 1):
            keys, values = incoming.wait()
            if ahead < len(rounds):
                incoming = source.fetch(rounds[ahead][1], rounds[ahead][0])
            heads, own, step = groups[g].queries, source.mine[g], plan.steps[i]
            first = len(sums) == g
            if first:
                last, given = front.apart or _own_last(g, len(groups)), groups[g].of(wanted) if wanted else None
                sums.append(_Gradients(heads(q), own, plan, front, last, given))
            grads, mine = sums[g], step.owner == plan.rank
            home = _Return(grads, plan, i) if step.most else None
            for each in step.calls:
                into: Triple | None = None
                if home is not None and home.direct:
                    into = (empty_tokens(grads.q, length(each.q)), home.parts[0], home.parts[1])
                elif mine:
                    into = grads.own_rooms(each)
                with front.behind() if mine else nullcontext(), phase("comp_block", i):
                    dq_part, dk_part, dv_part = plan.kernel.backward(
                        take(heads(dout), each.q),
                        take(grads.q, each.q),
                        take(keys, each.k),
                        take(values, each.k),
                        take(heads(out), each.q),
                        take(heads(lse), each.q, -1),
                        each.call,
                        into,
                    )
                with phase("comp_merge", i):
                    if mine:
                        grads.add_own(dq_part, dk_part, dv_part)
                    else:
                        grads.dq.add(dq_part)
                        if home is not None and home.total is not None:
                            home.total.add(dk_part, dv_part)
                del dq_part, dk_part, dv_part, into
            if returning is not None:
                returning.arrive()
            if g and first:
                sums[g - 1].results(len(plan.steps))
            if home is not None:
                home.start()
            returning = home
        if returning is not None:
            returning.arrive()
        found = sums[-1].results(len(plan.steps))
    return wanted if wanted is not None and len(groups) > 1 else found


def _of_all(each: LocalCall, q: Tensor, k: Tensor) -> bool:
    return each.q == ((0, tokens(q)),) and each.k == ((0, tokens(k)),)


def _rounds(groups: int, plan: Plan) -> list[tuple[int, int]]:
    """Of which group of heads each step is computed, in order."""
    return [(g, i) for g in range(groups) for i in _order(plan, _own_last(g, groups))]


def _order(plan: Plan, own_last: bool) -> list[int]:
    """The numbers of the steps, in turn, or with the own keys' at the end."""
    return sorted(range(len(plan.steps)), key=lambda i: own_last and plan.steps[i].owner == plan.rank)


def _own_last(group: int, groups: int) -> bool:
    """Whether the own keys are a group's last step, while gradients travel. Of the first they are the first, while keys do."""
    return 0 < group == groups - 1


def _backward_groups(q: Tensor, k: Tensor, plan: Plan) -> list[HeadGroup]:
    """`head_parts` as many. None: two where the shard is long. Within an all-to-all, whose parts they would be, all at once."""
    kv_heads, parts = k.shape[-2], 1
    if plan.problem.ulysses == 1:
        parts = ring_parts(plan.options.head_parts, kv_heads, tokens(k))
    return head_groups(q.shape[-2], kv_heads, kv_heads // parts)


class _Gradients:
    """The gradients of one group of heads, summed up as their parts come, or with `own_last` those of the own keys at the end; in
    `wanted` where that is given."""

    def __init__(
        self, q: Tensor, own: tuple[Tensor, Tensor], plan: Plan, front: Front, own_last: bool, wanted: Triple | None
    ):
        self.q, (self.k, self.v) = q, own
        self.front, self.own_last, self.wanted = front, own_last, wanted
        self.held_q, self.held_keys = list[Tensor](), list[tuple[Tensor, Tensor]]()
        queries = [each.q for i in _order(plan, own_last) for each in plan.steps[i].calls]
        self.dq = Sum([q], queries, wanted and wanted[:1])
        self.dkv = Sum(own, _key_parts(plan, own_last), wanted and wanted[1:])

    def own_rooms(self, each: LocalCall) -> Triple | None:
        """Where a call on the own keys should write: where it has all tokens and comes last the result, to which the other parts are
        then added, unless that is wide and has their sum so far; else, of memory of the front, what it needs."""
        if self.own_last and self.q.dtype != accumulation_dtype(self.q.dtype) and _of_all(each, self.q, self.k):
            return self.wanted
        if not self.front.apart:
            return None
        return (
            empty_tokens(self.q, length(each.q)),
            empty_tokens(self.k, length(each.k)),
            empty_tokens(self.v, length(each.k)),
        )

    def add_own(self, dq_part: Tensor, dk_part: Tensor, dv_part: Tensor) -> None:
        if self.front.apart:
            self.held_q.append(dq_part)
        else:
            self.dq.add(dq_part)
        if self.own_last:  # what the last peers send home comes before
            self.held_keys.append((dk_part, dv_part))
        else:
            self.dkv.add(dk_part, dv_part)

    def results(self, number: int) -> Triple:
        if self.held_q:
            self.front.settle()
        with phase("comp_merge", number):
            for dq_part in self.held_q:
                self.dq.add(dq_part)
            for parts in self.held_keys:
                self.dkv.add(*parts)
            self.held_q, self.held_keys = [], []
            (dq,), (dk, dv) = self.dq.result(), self.dkv.result()
            return dq, dk, dv


def _key_parts(plan: Plan, own_last: bool) -> list[Intervals]:
    """The parts of this rank's dk and dv in the order in which they are added: its own, and after each step what the peers'
    kernels wrote in the step before."""
    found: list[Intervals] = []
    returning: list[Intervals] = []
    own: list[Intervals] = []
    for step in plan.steps:
        if step.owner == plan.rank:
            (own if own_last else found).extend(each.k for each in step.calls)
        found += returning
        returning = [piece.target for piece in step.route.reversed().receives] if step.most else []
    return found + returning + own


class _Keys:
    """This rank's keys and values, offered to all by head group, and those of the steps, to be fetched."""

    def __init__(self, k: Tensor, v: Tensor, plan: Plan, groups: list[HeadGroup]):
        self.plan = plan
        self.mine = [(each.keys(k), each.keys(v)) for each in groups]
        self.offer: Offer | None = None
        if any(step.most for step in plan.steps):
            most = largest(plan.problem.layout, plan.problem.cu_seqlens, plan.problem.world)
            self.offer = plan.transport.offer("kv", [x for pair in self.mine for x in pair], most)

    def fetch(self, i: int, group: int = 0) -> _Incoming:
        return _Incoming(self, i, group)

    def close(self) -> None:
        if self.offer is not None:
            self.offer.close()


class _Incoming:
    """The keys and values of one step on their way to this rank, and this rank's to those who need them."""

    def __init__(self, source: _Keys, i: int, group: int):
        plan, step = source.plan, source.plan.steps[i]
        self.handle: Handle | None = None
        k, v = source.mine[group]
        if step.owner != plan.rank:
            k, v = empty_pair(k, step.n_keys)
        self.keys = (k, v)
        if source.offer is not None and step.most:
            self.handle = source.offer.fetch(plan.messages(step.route, first=2 * group), self.keys, i)

    def wait(self) -> tuple[Tensor, Tensor]:
        if self.handle is not None:
            self.handle.wait()
        return self.keys


class _Return:
    """One step's dk and dv on their way home, and others' for this rank's keys on their way here. What goes home is written
    where the transport takes it from, by the kernel itself if one call has all of the step's keys (`direct`)."""

    def __init__(self, sums: _Gradients, plan: Plan, i: int):
        self.plan, self.i, self.sums = plan, i, sums
        step = plan.steps[i]
        self.route = step.route.reversed()
        mine = step.owner == plan.rank
        n = 0 if mine else step.n_keys
        shapes = [(*x.shape[:-3], n, *x.shape[-2:]) for x in (sums.k, sums.v)]
        self.received: list[tuple[Tensor, Tensor]] = []
        if sums.front.apart:  # where peers are done before this rank is, theirs can come meanwhile
            self._make_rooms()
        self.parts = plan.transport.room("dkv", shapes, sums.k, step.most)
        self.direct = not mine and len(step.calls) == 1 and step.calls[0].k == ((0, n),)
        self.total: Sum | None = None
        if not mine and not self.direct:
            self.total = Sum(self.parts, [each.k for each in step.calls], into=self.parts)

    def start(self) -> None:
        plan, apart = self.plan, self.sums.front.apart
        if not apart:
            self._make_rooms()
        if self.total is not None:
            self.total.result()
        with closing(plan.transport.offer("dkv", self.parts, plan.steps[self.i].most)) as offer:
            into = [x for parts in self.received for x in parts]
            self.handle = offer.fetch(plan.messages(self.route, apart=True), into, self.i, early=apart)

    def _make_rooms(self) -> None:
        self.received = [empty_pair(self.sums.k, length(piece.target)) for piece in self.route.receives]

    def arrive(self) -> None:
        self.handle.wait()
        with phase("comp_merge", self.i):
            for parts in self.received:
                self.sums.dkv.add(*parts)
