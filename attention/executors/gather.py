"""The gather executor: the needed keys of all ranks come together in sequence order, a group of KV heads at a time, the
next group travelling while this one computes; each query chunk is then one call, and nothing is merged. Backward gathers
again, and each owner sums its ranks' dk and dv in fp32."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attention.executors import grouping
from attention.executors.plan import Plan
from attention.merge import empty_result
from attention.phases import phase
from attention.tensors import add_, put_, take, token_dim, wide
from attention.transfers import Intervals, Move, gather_move, move, needed_keys, overlaps
from attention.transports import Handle
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
    incoming = _Gather(k, v, plan, groups[0], 0)
    for i, group in enumerate(groups):
        keys, values = incoming.wait()
        if i + 1 < len(groups):
            incoming = _Gather(k, v, plan, groups[i + 1], i + 1)
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
    incoming = _Gather(k, v, plan, groups[0], 0)
    returning: _Scatter | None = None
    for i, group in enumerate(groups):
        keys, values = incoming.wait()
        if i + 1 < len(groups):
            incoming = _Gather(k, v, plan, groups[i + 1], i + 1)
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
        returning = _Scatter([s.to(k.dtype) for s in sums], k, plan, group, i)
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
    _Redistribution(moving, [x], [out], plan, "q", 0).wait()
    return out


def _each_once(calls: list[Intervals], n: int) -> bool:
    """Whether the calls' queries are all of `[0, n)`; they never overlap."""
    return sum(b - a for intervals in calls for a, b in intervals) == n


class _Redistribution:
    """Moves tokens between two sharded arrangements; several tensors at once."""

    def __init__(self, moving: Move, sources: list[Tensor], targets: list[Tensor], plan: Plan, what: str, step: int):
        self.moving, self.targets = moving, targets
        route = moving.route
        sends = [(peer, take(x, where).contiguous()) for peer, where in route.sends for x in sources]
        self.received = []
        for peer, where in route.receives:
            n = sum(b - a for a, b in where)
            for x in targets:
                shape = list(x.shape)
                shape[token_dim(x)] = n
                self.received.append((peer, where, x, x.new_empty(shape)))
        self.handle: Handle = plan.transport.exchange(
            sends, [(peer, buffer) for peer, _, _, buffer in self.received], what, step
        )
        for mine, place in moving.local:
            for source, target in zip(sources, targets, strict=True):
                put_(target, (place,), take(source, (mine,)))
        self.step = step

    def wait(self) -> None:
        self.handle.wait()
        with phase("comp_place", self.step):
            for _, where, target, buffer in self.received:
                put_(target, where, buffer)


class _Gather:
    """The keys and values of one head group on their way. Without a window every rank needs nearly all keys and one
    all-gather brings them; with one, each rank is sent just those that its window needs."""

    def __init__(self, k: Tensor, v: Tensor, plan: Plan, group: HeadGroup, step: int):
        self.plan, self.step = plan, step
        mine = [x[..., group.k_start : group.k_stop, :] for x in (k, v)]
        shape = list(mine[0].shape)
        shape[token_dim(k)] = plan.steps[0].n_keys
        self.keys = [mine[0].new_empty(shape) for _ in mine]
        self.staged: Tensor | None = None
        if plan.problem.mask.windowed or plan.problem.world == 1:
            moving = gather_move(plan.problem, plan.rank)
            self.moves = _Redistribution(moving, mine, self.keys, plan, "kv", step)
            return
        both = torch.stack(mine)
        self.staged = both.new_empty((plan.problem.world, *both.shape))
        self.handle = plan.transport.all_gather(self.staged, both, "kv", step)

    def wait(self) -> tuple[Tensor, Tensor]:
        if self.staged is None:
            self.moves.wait()
        else:
            self.handle.wait()
            with phase("comp_place", self.step):
                self._place(self.staged)
        return self.keys[0], self.keys[1]

    def _place(self, staged: Tensor) -> None:
        problem = self.plan.problem
        needs = needed_keys(problem, self.plan.rank)
        for peer, shard in enumerate(problem.layout.shards(problem.cu_seqlens, problem.world)):
            for source, target in overlaps(shard, needs):
                for i, keys in enumerate(self.keys):
                    put_(keys, (target,), take(staged[peer, i], (source,)))


class _Scatter:
    """dk and dv of one head group on their way home; `finish` sums them."""

    def __init__(self, sums: list[Tensor], k: Tensor, plan: Plan, group: HeadGroup, step: int):
        self.group, self.step = group, step
        moving = gather_move(plan.problem, plan.rank)
        route = moving.route.reversed()
        sends = [(peer, take(x, where).contiguous()) for peer, where in route.sends for x in sums]
        shape = list(k.shape)
        shape[-2] = group.k_stop - group.k_start
        self.totals = [torch.zeros(shape, dtype=wide(k.dtype), device=k.device) for _ in sums]
        self.received = []
        for peer, where in route.receives:
            shape = list(self.totals[0].shape)
            shape[token_dim(k)] = sum(b - a for a, b in where)
            for total in self.totals:
                self.received.append((peer, where, total, k.new_empty(shape)))
        self.handle = plan.transport.exchange(sends, [(peer, x) for peer, _, _, x in self.received], "dkv", step)
        for mine, place in moving.local:
            for x, total in zip(sums, self.totals, strict=True):
                add_(total, (mine,), take(x, (place,)))

    def finish(self, dk: Tensor, dv: Tensor) -> None:
        self.handle.wait()
        with phase("comp_merge", self.step):
            for _, where, total, x in self.received:
                add_(total, where, x)
            for grad, total in zip((dk, dv), self.totals, strict=True):
                grad[..., self.group.k_start : self.group.k_stop, :] = total
