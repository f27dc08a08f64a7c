"""The gather executor: the needed keys of all ranks come together in sequence order, a group of KV heads at a time, the
next group travelling while this one computes; each query chunk is then one call, and nothing is merged. Backward gathers
again, and each owner sums its ranks' dk and dv in fp32. A schedule that begins with the rank's own keys computes on them
while the others' travel, in a backward of several groups on the last one's at the end, while gradients do, and merges."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing

import torch
from torch import Tensor

from attention.executors import nested_prefixes
from attention.executors.head_groups import HeadGroup, head_groups
from attention.executors.plan import Plan
from attention.geometry.schedules import length
from attention.geometry.transfers import Intervals, Move, needed_keys, overlaps, side_by_side
from attention.profiling import phase
from attention.reduction.grad_sum import sum_all, sum_parts
from attention.reduction.lse_merge import merge
from attention.runtime.batched_copy import copy_all, moves
from attention.tensors import FEW, empty_lse, empty_pair, empty_tokens, put_, take, token_dim, tokens
from attention.transports import Handle, Offer

Saved = tuple[Tensor, ...]


def forward(q: Tensor, k: Tensor, v: Tensor, plan: Plan) -> tuple[Tensor, Tensor, Saved]:
    """q, k, v: this rank's shards. The queries move to the layout they are computed in, where it is another one."""
    q = relayout(q, plan, to_compute=True)
    out, lse = _forward(q, k, v, plan)
    border_lse = relayout(lse.transpose(-1, -2).unsqueeze(-1), plan, to_compute=False) if plan.want_lse else None
    returned = lse if border_lse is None else border_lse.squeeze(-1).transpose(-1, -2)
    return relayout(out, plan, to_compute=False), returned, (q, k, v, out, lse)


def backward(dout: Tensor, saved: Saved, plan: Plan) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, out, lse = saved
    dq, dk, dv = _backward(relayout(dout, plan, to_compute=True), q, k, v, out, lse, plan)
    return relayout(dq, plan, to_compute=False), dk, dv


def _forward(q: Tensor, k: Tensor, v: Tensor, plan: Plan) -> tuple[Tensor, Tensor]:
    """q in the schedule's q layout, k and v this rank's shards. Returns (out, lse) for q."""
    *own, step = plan.steps
    groups = _groups(q, k, plan)
    with closing(_Keys(k, v, plan, groups)) as source:
        incoming = source.fetch(0)
        if own:
            (each,) = own[0].calls
            with phase("comp_block", 0):
                out, lse = plan.kernel.forward(q, k, v, each.call)
        else:
            out = torch.empty_like(q)
            lse = empty_lse(q).fill_(-torch.inf)
            if not _each_once([c.q for c in step.calls], q.shape[token_dim(q)]):
                out.zero_()  # some query sees no key
        for i, group in enumerate(groups):
            keys, values = incoming.wait()
            if i + 1 < len(groups):
                incoming = source.fetch(i + 1)
            mine, into = group.queries(q), (group.queries(out), group.queries(lse))
            if own:
                _merge_rest(mine, keys, values, plan, into, 1 + i)
            else:
                with phase("comp_block", i):
                    nested_prefixes.forward(mine, keys, values, step.calls, plan, into)
    return out, lse


def _merge_rest(q: Tensor, keys: Tensor, values: Tensor, plan: Plan, into: tuple[Tensor, Tensor], number: int) -> None:
    """What the own keys left of the calls, merged into `into`."""
    for each in plan.steps[-1].calls:
        with phase("comp_block", number):
            part, part_lse = plan.kernel.forward(take(q, each.q), take(keys, each.k), take(values, each.k), each.call)
        with phase("comp_merge", number):
            for rows, here in zip(each.q, side_by_side(each.q), strict=True):
                out, lse = take(into[0], (rows,)), take(into[1], (rows,), -1)
                merge(out, lse, out, lse, take(part, (here,)), take(part_lse, (here,), -1))
        del part, part_lse  # or they would be held beside the next


def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, plan: Plan
) -> tuple[Tensor, Tensor, Tensor]:
    """dout, q, out and lse in the schedule's q layout. Returns dq in that layout, dk and dv of this rank's shards."""
    *own, step = plan.steps
    groups = _groups(q, k, plan, backward=True)
    once = own or _each_once([c.q for c in step.calls], q.shape[token_dim(q)])
    dq = torch.empty_like(q) if once else torch.empty_like(q).zero_()
    dk, dv = (torch.empty_like(x) for x in (k, v))
    returning: list[_Return] = []
    with plan.front() as front, closing(_Keys(k, v, plan, groups)) as source:
        own_groups = _own_groups(groups, front.apart) if own else []

        def compute_own(heads: HeadGroup) -> None:
            (each,) = own[0].calls
            of_q, of_k = heads.queries, heads.keys
            with front.behind(), phase("comp_block", 0):
                into = heads.of((dq, dk, dv))
                plan.kernel.backward(of_q(dout), of_q(q), of_k(k), of_k(v), of_q(out), of_q(lse), each.call, into)

        incoming = source.fetch(0)
        for heads in own_groups[:1]:
            compute_own(heads)
        for i, group in enumerate(groups):
            keys, values = incoming.wait()
            if i + 1 < len(groups):
                incoming = source.fetch(i + 1)
            home = _Return(keys, plan, group, i + len(own), front.apart, group in own_groups[1:])
            here = group.queries
            home.compute(here(dout), here(q), here(out), here(lse), here(dq), keys, values)
            if not front.apart:
                _finish(returning, dk, dv)
            home.start()
            returning.append(home)
        for heads in own_groups[1:]:
            compute_own(heads)
        front.settle()
        _finish(returning, dk, dv)
    return dq, dk, dv


def _groups(q: Tensor, k: Tensor, plan: Plan, backward: bool = False) -> list[HeadGroup]:
    # what is sent comes all at once anyway, and one's own keys give the first group the time to come
    pulls, first = plan.transport.pulls, len(plan.steps) == 1
    stride, most = plan.options.heads_k_stride, plan.steps[-1].most
    return head_groups(q.shape[-2], k.shape[-2], stride, pulls and first, pulls and backward, most)


def _own_groups(groups: list[HeadGroup], apart: bool) -> list[HeadGroup]:
    """Of which heads the own keys are computed before the groups, and after them."""
    last = groups[-1]
    if apart or len(groups) == 1:
        return [HeadGroup(0, last.k_stop, 0, last.q_stop)]
    return [HeadGroup(0, last.k_start, 0, last.q_start), last]


def relayout(x: Tensor, plan: Plan, to_compute: bool) -> Tensor:
    """Queries (or their gradients, or outputs) between the border layout and the layout they are computed in."""
    problem = plan.problem
    if problem.layout == problem.q_layout or problem.world == 1:
        return x
    moving = plan.to_compute if to_compute else plan.to_border
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    _Redistribution(moving, [x], [out], plan, "q").wait()
    return out


def _each_once(calls: list[Intervals], n: int) -> bool:
    """Whether the calls' queries are all of `[0, n)`; they never overlap."""
    return sum(b - a for intervals in calls for a, b in intervals) == n


class _Redistribution:
    """Moves tokens between two sharded arrangements; several tensors at once."""

    def __init__(self, moving: Move, sources: list[Tensor], targets: list[Tensor], plan: Plan, what: str):
        n = len(sources)
        with closing(plan.transport.offer(what, sources)) as offer:
            self.handle = offer.fetch(plan.messages(moving.route, n=n), targets, 0)
        ends = zip(sources, targets, strict=True)
        copy_all(pair for source, target in ends for pair in moves(target, source, moving.local))

    def wait(self) -> None:
        self.handle.wait()


class _Keys:
    """The keys and values of all head groups, offered to all, and the gathered ones, to be fetched group by group.
    Without a window every rank needs nearly all keys and one all-gather brings them, where tokens are sent; with one, or
    where they are pulled, each rank gets just those that it needs."""

    def __init__(self, k: Tensor, v: Tensor, plan: Plan, groups: list[HeadGroup]):
        self.plan = plan
        self.mine = [[group.keys(x) for x in (k, v)] for group in groups]
        self.moving = plan.gathering
        self.offer: Offer | None = None
        if plan.problem.world == 1 or plan.problem.mask.windowed or plan.transport.pulls:
            self.offer = plan.transport.offer("kv", [x for pair in self.mine for x in pair])

    def fetch(self, i: int) -> _Pulled | _AllGathered:
        return _AllGathered(self, i) if self.offer is None else _Pulled(self, self.offer, i)

    def close(self) -> None:
        if self.offer is not None:
            self.offer.close()


class _Pulled:
    def __init__(self, source: _Keys, offer: Offer, i: int):
        plan, route, mine = source.plan, source.moving.route, source.mine[i]
        self.keys = empty_pair(mine[0], plan.steps[-1].n_keys)
        self.handle: Handle = offer.fetch(plan.messages(route, first=2 * i), self.keys, i)
        with phase("comp_place", i):
            ends = zip(mine, self.keys, strict=True)
            copy_all(pair for x, keys in ends for pair in moves(keys, x, source.moving.local))

    def wait(self) -> tuple[Tensor, Tensor]:
        self.handle.wait()
        return self.keys[0], self.keys[1]


class _AllGathered:
    def __init__(self, source: _Keys, i: int):
        self.plan, self.step = source.plan, i
        self.keys = [empty_tokens(x, self.plan.steps[-1].n_keys) for x in source.mine[i]]
        both = torch.stack(source.mine[i])
        self.staged = both.new_empty((self.plan.problem.world, *both.shape))
        self.handle = self.plan.transport.all_gather(self.staged, both, "kv", i)

    def wait(self) -> tuple[Tensor, Tensor]:
        self.handle.wait()
        problem = self.plan.problem
        needs = needed_keys(problem, self.plan.rank)
        with phase("comp_place", self.step):
            for peer, shard in enumerate(problem.layout.shards(problem.cu_seqlens, problem.world)):
                found = overlaps(shard, needs)
                copy_all(pair for i, keys in enumerate(self.keys) for pair in moves(keys, self.staged[peer, i], found))
        return self.keys[0], self.keys[1]


def _finish(returning: list[_Return], dk: Tensor, dv: Tensor) -> None:
    while returning:
        returning.pop(0).finish(dk, dv)


class _Return:
    """dk and dv of one head group: computed, sent home and summed there, in fp32 at each place. Where the own keys are a step of
    their own, dq, dk and dv hold what these gave, to which the rest is added; where that step is `apart`, or follows (`own_last`),
    at the end."""

    def __init__(self, keys: Tensor, plan: Plan, group: HeadGroup, number: int, apart: bool, own_last: bool):
        self.plan, self.group, self.number, self.apart = plan, group, number, apart
        self.late = apart or own_last
        self.queries: list[tuple[Tensor, Tensor]] = []  # rows of dq, and what is to be added to them
        self.moving = plan.gathering
        assert not (apart and self.moving.local), (
            "this rank's part of the sums would be read when another offer lies there"
        )
        *self.own, self.step = plan.steps
        self.most = self.step.most
        self.route = self.moving.route.reversed()
        self.received: list[tuple[Intervals, tuple[Tensor, Tensor]]] = []
        if apart:  # where peers are done before this rank is, theirs can come meanwhile
            self._make_rooms(keys)
        self.sums = plan.transport.room("dkv", [keys.shape, keys.shape], keys, self.most)

    def compute(
        self, dout: Tensor, q: Tensor, out: Tensor, lse: Tensor, dq: Tensor, keys: Tensor, values: Tensor
    ) -> None:
        """All calls of the step; writes dq, and this rank's dk and dv of the gathered keys."""
        everything = ((0, keys.shape[token_dim(keys)]),)
        # a call that sees every key writes its dk and dv where they are sent from, the others are added to it
        calls = sorted(self.step.calls, key=lambda each: each.k != everything)
        parts: list[tuple[Intervals, Tensor, Tensor]] = []
        for each in calls:
            first = not parts and each.k == everything
            with phase("comp_block", self.number):
                direct = len(each.q) == 1 and not self.own
                target = take(dq, each.q) if direct else empty_tokens(dq, length(each.q))
                dkv = self.sums if first else [empty_tokens(keys, length(each.k)) for _ in self.sums]
                self.plan.kernel.backward(
                    take(dout, each.q),
                    take(q, each.q),
                    take(keys, each.k),
                    take(values, each.k),
                    take(out, each.q),
                    take(lse, each.q, -1),
                    each.call,
                    into=(target, dkv[0], dkv[1]),
                )
                if not direct and not self.own:
                    put_(dq, each.q, target)
            if self.own:
                ends = zip(each.q, side_by_side(each.q), strict=True)
                self.queries += [(take(dq, (rows,)), take(target, (here,))) for rows, here in ends]
                if not self.late:
                    self._add_queries()
            del target  # or it would be held beside the next
            parts.append((each.k, dkv[0], dkv[1]))
        if len(parts) == 1 and parts[0][0] == everything:
            return
        with phase("comp_merge", self.number):
            sum_all(self.sums, [(pair, places) for places, *pair in parts])

    def start(self) -> None:
        plan = self.plan
        if not self.apart:
            self._make_rooms(self.sums[0])
        self.offer = plan.transport.offer("dkv", self.sums, self.most)  # holds this rank's own sums
        with closing(self.offer):
            into = [x for _, parts in self.received for x in parts]
            self.handle = self.offer.fetch(plan.messages(self.route, apart=True), into, self.number, early=self.apart)

    def _make_rooms(self, like: Tensor) -> None:
        self.received = [(piece.target, empty_pair(like, length(piece.target))) for piece in self.route.receives]

    def _add_queries(self) -> None:
        with phase("comp_merge", self.number):
            for total, part in self.queries:
                whole = ((0, tokens(total)),)
                sum_parts(total, [(total, whole), (part, whole)])
        self.queries = []

    def finish(self, dk: Tensor, dv: Tensor) -> None:
        if self.queries:
            self._add_queries()
        self.handle.wait()
        totals = [self.group.keys(x) for x in (dk, dv)]
        parts: list[tuple[Sequence[Tensor], Intervals]] = []
        with phase("comp_merge", self.number):
            here, place = (tuple(x[end] for x in self.moving.local) for end in (0, 1))
            if len(here) > FEW:
                parts.append(([take(x, place) for x in self.sums], here))
            else:
                parts += [([take(x, (b,)) for x in self.sums], (a,)) for a, b in self.moving.local]
            parts += [(pair, places) for places, pair in self.received]
            if self.own:
                parts.append((totals, ((0, tokens(totals[0])),)))
            sum_all(totals, parts)
