"""The all-to-all executor (Ulysses, USP): within a group of ranks heads are exchanged for sequence, so that each rank has
its share of the heads over the group's whole shard; across the groups the ring executor does the rest (a ring of one is a
local call); then back. With fewer KV heads than ranks in the group, a KV head goes to several of them and their
gradients are summed in fp32."""

from __future__ import annotations

from contextlib import closing

from torch import Tensor

from attention.executors import ring
from attention.executors.plan import Plan
from attention.phases import phase
from attention.tensors import put_, room, take, wide
from attention.transfers import Intervals
from attention.transports import Message

Saved = tuple[Tensor, ...]
Heads = list[slice]  # of each rank in the group


def forward(q: Tensor, k: Tensor, v: Tensor, plan: Plan) -> tuple[Tensor, Tensor, Saved]:
    """q, k, v: this rank's shards. Returns (out, lse) of this rank's tokens, all heads; lse so only where wanted."""
    own, kv = shares(plan.heads, plan), shares(plan.kv_heads, plan)
    q, k, v = _to_heads([q, k, v], [own, kv, kv], plan, "qkv")
    out, lse, saved = ring.forward(q, k, v, plan)
    (result,) = _to_tokens([out], [own], plan, "out")
    if plan.want_lse:
        (turned,) = _to_tokens([lse.transpose(-1, -2).unsqueeze(-1)], [own], plan, "lse")
        lse = turned.squeeze(-1).transpose(-1, -2)
    return result, lse, saved


def backward(dout: Tensor, saved: Saved, plan: Plan) -> tuple[Tensor, Tensor, Tensor]:
    own, kv = shares(plan.heads, plan), shares(plan.kv_heads, plan)
    (dout,) = _to_heads([dout], [own], plan, "dout")
    dq, dk, dv = _to_tokens(list(ring.backward(dout, saved, plan)), [own, kv, kv], plan, "dqkv")
    return dq, dk, dv


def shares(heads: int, plan: Plan) -> Heads:
    """The heads that each rank of the group computes: an equal share, or one KV head that several of them have."""
    n = plan.problem.ulysses
    if heads % n == 0:
        return [slice(i * heads // n, (i + 1) * heads // n) for i in range(n)]
    return [slice(i * heads // n, i * heads // n + 1) for i in range(n)]


def _group(plan: Plan) -> list[int]:
    """The ranks of this rank's group, in the order of their tokens."""
    first = plan.rank * plan.problem.ulysses
    return list(range(first, first + plan.problem.ulysses))


def _to_heads(xs: list[Tensor], heads: list[Heads], plan: Plan, what: str) -> list[Tensor]:
    """`[..., s, heads, D]` of this rank's tokens to `[..., n * s, share, D]` of the group's."""
    me, group = plan.head, _group(plan)
    if len(group) == 1:
        return xs
    n, s = len(xs), xs[0].shape[-3]
    whole: Intervals = ((0, s),)
    # to each rank of the group its heads; nothing to oneself
    offered = [
        x[..., share[i], :] if i != me else room(x[..., share[i], :], 0)
        for i in range(len(group))
        for x, share in zip(xs, heads, strict=True)
    ]
    out = [room(x[..., share[me], :], len(group) * s) for x, share in zip(xs, heads, strict=True)]
    sends, receives = [], []
    for i, peer in enumerate(group):
        if i == me:
            continue
        place: Intervals = ((i * s, (i + 1) * s),)
        sends += [Message(peer, i * n + j, whole, place) for j in range(n)]
        receives += [Message(peer, me * n + j, whole, place, out[j]) for j in range(n)]
    with closing(plan.transport.offer(what, offered, s)) as offer:
        moving = offer.fetch(sends, receives, 0)
    with phase("comp_place"):
        for x, share, target in zip(xs, heads, out, strict=True):
            put_(target, ((me * s, (me + 1) * s),), x[..., share[me], :])
    moving.wait()
    return out


def _to_tokens(xs: list[Tensor], heads: list[Heads], plan: Plan, what: str) -> list[Tensor]:
    """The way back: `[..., n * s, share, D]` to `[..., s, heads, D]`; what several ranks have of one head is summed."""
    me, group = plan.head, _group(plan)
    if len(group) == 1:
        return xs
    n, s = len(xs), xs[0].shape[-3] // len(group)
    whole: Intervals = ((0, s),)
    mine: Intervals = ((me * s, (me + 1) * s),)
    results, pieces = zip(*(_places(x, share, s) for x, share in zip(xs, heads, strict=True)), strict=True)
    sends, receives = [], []
    for i, peer in enumerate(group):
        if i == me:
            continue
        sends += [Message(peer, j, ((i * s, (i + 1) * s),), whole) for j in range(n)]
        receives += [Message(peer, j, mine, whole, pieces[j][i]) for j in range(n)]
    with closing(plan.transport.offer(what, xs)) as offer:
        moving = offer.fetch(sends, receives, 0)
    with phase("comp_place"):
        for x, by_rank in zip(xs, pieces, strict=True):
            by_rank[me].copy_(take(x, mine))
    moving.wait()
    with phase("comp_place"):
        return [
            _summed(by_rank, share) if result is None else result
            for result, by_rank, share in zip(results, pieces, heads, strict=True)
        ]


def _places(x: Tensor, share: Heads, s: int) -> tuple[Tensor | None, list[Tensor]]:
    """Where s tokens of each rank's heads of x come: views of one tensor, and it; apart and None where several ranks have
    the same heads, which are to be summed."""
    total = share[-1].stop
    if total < sum(each.stop - each.start for each in share):
        return None, [room(x, s) for _ in share]
    result = x.new_empty((*x.shape[:-3], s, total, x.shape[-1]))
    return result, [result[..., each, :] for each in share]


def _summed(by_rank: list[Tensor], share: Heads) -> Tensor:
    first = by_rank[0]
    sums = first.new_zeros((*first.shape[:-2], share[-1].stop, first.shape[-1]), dtype=wide(first.dtype))
    for x, heads in zip(by_rank, share, strict=True):
        sums[..., heads, :] += x
    return sums.to(first.dtype)
