"""The gather executor: the needed keys of all ranks come together in sequence order, a group of KV heads at a time, the
next group travelling while this one computes; each query chunk is then one call, and nothing is merged. Backward gathers
again, and each owner sums its ranks' dk and dv in fp32."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attention.executors import grouping
from attention.executors.plan import Plan
from attention.merge import empty_result
from attention.phases import phase
from attention.schedules import length
from attention.tensors import add_, put_, room, take, token_dim, wide
from attention.transfers import Intervals, Move, gather_move, move, needed_keys, overlaps, side_by_side
from attention.transports import Handle, Offer
from attention.variants import check_stride


@dataclass(frozen=True)
class HeadGroup:
    """KV heads `[k_start, k_stop)` and the query heads that they serve."""

    k_start: int
    k_stop: int
    q_start: int
    q_stop: int


def head_groups(heads: int, kv_heads: int, stride: int | None) -> list[HeadGroup]:
    """Raises ValueError when the stride does not divide the KV heads."""
    stride = check_stride(stride, kv_heads)
    ratio = heads // kv_heads
    return [HeadGroup(h, h + stride, h * ratio, (h + stride) * ratio) for h in range(0, kv_heads, stride)]


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
    step = plan.steps[0]
    groups = head_groups(q.shape[-2], k.shape[-2], plan.options["heads_k_stride"])
    out = torch.empty_like(q)
    lse = empty_result(q[..., :0])[1]
    if not _each_once([c.q for c in step.calls], q.shape[token_dim(q)]):
        out.zero_()  # some query sees no key
    with closing(_Keys(k, v, plan, groups)) as source:
        incoming = source.fetch(0)
        for i, group in enumerate(groups):
            keys, values = incoming.wait()
            if i + 1 < len(groups):
                incoming = source.fetch(i + 1)
            heads = slice(group.q_start, group.q_stop)
            with phase("comp_block", i):
                for where, o, part_lse in grouping.forward(q[..., heads, :], keys, values, step.calls, plan):
                    put_(out[..., heads, :], where, o)
                    put_(lse[..., heads, :], where, part_lse, -1)
    return out, lse


def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, plan: Plan
) -> tuple[Tensor, Tensor, Tensor]:
    """dout, q, out and lse in the schedule's q layout. Returns dq in that layout, dk and dv of this rank's shards."""
    step = plan.steps[0]
    groups = head_groups(q.shape[-2], k.shape[-2], plan.options["heads_k_stride"])
    once = _each_once([c.q for c in step.calls], q.shape[token_dim(q)])
    dq = torch.empty_like(q) if once else torch.zeros_like(q)
    dk, dv = (torch.empty_like(x) for x in (k, v))
    returning: _Return | None = None
    with closing(_Keys(k, v, plan, groups)) as source:
        incoming = source.fetch(0)
        for i, group in enumerate(groups):
            keys, values = incoming.wait()
            if i + 1 < len(groups):
                incoming = source.fetch(i + 1)
            heads = slice(group.q_start, group.q_stop)
            sums: list[Tensor] | None = None
            for each in step.calls:
                with phase("comp_block", i):
                    dq_, dk_, dv_ = plan.kernel.backward(
                        take(dout[..., heads, :], each.q),
                        take(q[..., heads, :], each.q),
                        take(keys, each.k),
                        take(values, each.k),
                        take(out[..., heads, :], each.q),
                        take(lse[..., heads, :], each.q, -1),
                        each.call,
                    )
                    put_(dq[..., heads, :], each.q, dq_)
                with phase("comp_merge", i):
                    if len(step.calls) == 1 and each.k == ((0, step.n_keys),):
                        sums = [dk_, dv_]
                    else:
                        if sums is None:
                            sums = [torch.zeros(x.shape, dtype=wide(x.dtype), device=x.device) for x in (keys, values)]
                        add_(sums[0], each.k, dk_)
                        add_(sums[1], each.k, dv_)
            if sums is None:  # this rank's queries see nothing
                sums = [torch.zeros_like(keys), torch.zeros_like(values)]
            if returning is not None:
                returning.finish(dk, dv)
            returning = _Return([s.to(k.dtype) for s in sums], k, plan, group, i)
    if returning is not None:
        returning.finish(dk, dv)
    return dq, dk, dv


def relayout(x: Tensor, plan: Plan, to_compute: bool) -> Tensor:
    """Queries (or their gradients, or outputs) between the border layout and the layout they are computed in."""
    problem = plan.problem
    if problem.layout == problem.q_layout or problem.world == 1:
        return x
    border, inner = (x_.shards(problem.cu_seqlens, problem.world) for x_ in (problem.layout, problem.q_layout))
    moving = move(border, inner, plan.rank) if to_compute else move(inner, border, plan.rank)
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
            sends = plan.messages(moving.route.sends, n=n)
            self.handle = offer.fetch(sends, plan.messages(moving.route.receives, targets, n=n), 0)
        for mine, place in moving.local:
            for source, target in zip(sources, targets, strict=True):
                put_(target, (place,), take(source, (mine,)))

    def wait(self) -> None:
        self.handle.wait()


class _Keys:
    """The keys and values of all head groups, offered to all, and the gathered ones, to be fetched group by group.
    Without a window every rank needs nearly all keys and one all-gather brings them, where tokens are sent; with one, or
    where they are pulled, each rank gets just those that it needs."""

    def __init__(self, k: Tensor, v: Tensor, plan: Plan, groups: list[HeadGroup]):
        self.plan = plan
        self.mine = [[x[..., group.k_start : group.k_stop, :] for x in (k, v)] for group in groups]
        self.moving = gather_move(plan.problem, plan.rank)
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
        self.keys = [room(x, plan.steps[0].n_keys) for x in mine]
        sends = plan.messages(route.sends, first=2 * i)
        self.handle: Handle = offer.fetch(sends, plan.messages(route.receives, self.keys, first=2 * i), i)
        with phase("comp_place", i):
            for here, place in source.moving.local:
                for x, keys in zip(mine, self.keys, strict=True):
                    put_(keys, (place,), take(x, (here,)))

    def wait(self) -> tuple[Tensor, Tensor]:
        self.handle.wait()
        return self.keys[0], self.keys[1]


class _AllGathered:
    def __init__(self, source: _Keys, i: int):
        self.plan, self.step = source.plan, i
        self.keys = [room(x, self.plan.steps[0].n_keys) for x in source.mine[i]]
        both = torch.stack(source.mine[i])
        self.staged = both.new_empty((self.plan.problem.world, *both.shape))
        self.handle = self.plan.transport.all_gather(self.staged, both, "kv", i)

    def wait(self) -> tuple[Tensor, Tensor]:
        self.handle.wait()
        problem = self.plan.problem
        needs = needed_keys(problem, self.plan.rank)
        with phase("comp_place", self.step):
            for peer, shard in enumerate(problem.layout.shards(problem.cu_seqlens, problem.world)):
                for source, target in overlaps(shard, needs):
                    for i, keys in enumerate(self.keys):
                        put_(keys, (target,), take(self.staged[peer, i], (source,)))
        return self.keys[0], self.keys[1]


class _Return:
    """dk and dv of one head group on their way home; `finish` sums them in fp32."""

    def __init__(self, sums: list[Tensor], k: Tensor, plan: Plan, group: HeadGroup, step: int):
        self.group, self.step, self.sums = group, step, sums
        self.moving = gather_move(plan.problem, plan.rank)
        route = self.moving.route.reversed()
        mine = k[..., group.k_start : group.k_stop, :]
        self.received = []
        receives = []
        for piece in route.receives:
            parts = [room(mine, length(piece.target)) for _ in sums]
            self.received.append((piece.target, parts))
            receives += plan.messages([replace(piece, target=side_by_side(piece.target))], parts)
        with closing(plan.transport.offer("dkv", sums, plan.steps[0].most)) as offer:
            self.handle = offer.fetch(plan.messages(route.sends), receives, step)

    def finish(self, dk: Tensor, dv: Tensor) -> None:
        self.handle.wait()
        with phase("comp_merge", self.step):
            for i, grad in enumerate((dk, dv)):
                grad = grad[..., self.group.k_start : self.group.k_stop, :]
                total = torch.zeros(grad.shape, dtype=wide(grad.dtype), device=grad.device)
                for here, place in self.moving.local:
                    add_(total, (here,), take(self.sums[i], (place,)))
                for places, parts in self.received:
                    add_(total, places, parts[i])
                grad.copy_(total)
