"""The all-to-all executor (Ulysses, USP). The ranks form groups. An exchange within the group gives each rank a share
of the heads for all of the group's tokens. The ring executor computes on them, with one step for each group; with a
single group this is a local call. A second exchange brings the results back. A share may be computed in several parts,
so that one part's tensors travel while another computes. With fewer KV heads than ranks in a group, several ranks
compute with the same KV head, and their gradients are summed in fp32."""

from __future__ import annotations

from contextlib import closing
from functools import lru_cache

from torch import Tensor

from attention.batched_copy import copy_all
from attention.executors import ring
from attention.executors.head_groups import cut_heads
from attention.executors.keys import Arriving
from attention.executors.plan import Plan
from attention.executors.policy import exchange_parts
from attention.kernels.interface import Grads
from attention.masks.band import Intervals
from attention.profiling import phase
from attention.reduction.grad_sum import sum_all
from attention.reduction.sinks import SAVED
from attention.tensors import empty_pair, empty_tokens, result_like, take, tokens
from attention.transports import Handle, Message, Messages

Saved = tuple[Tensor, ...]
Heads = list[list[slice]]  # heads[part][i]: the heads that rank i of the group computes


def forward(q: Tensor, k: Tensor, v: Tensor, plan: Plan, sinks: Tensor | None = None) -> tuple[Tensor, Tensor, Saved]:
    """(out, lse) of this rank's tokens with all heads, and what the backward needs; the lse only if the plan wants it.
    q, k, v: this rank's shards. sinks: `[H]`."""
    if plan.problem.ulysses == 1:
        return ring.forward(q, k, v, plan, sinks)
    n = exchange_parts(plan.options.head_parts, plan.kv_heads, plan.problem.ulysses, tokens(q) * plan.problem.ulysses)
    q_heads, kv_heads = shares(plan.heads, plan, n), shares(plan.kv_heads, plan, n)
    outs, lses = _ToTokens([result_like(q, v)], [q_heads], plan, "out"), []
    saved: list[Saved] = []
    with closing(_ToHeads([q, k, v], [q_heads, kv_heads, kv_heads], plan, "qkv")) as exchange:
        arriving = exchange.pull(0)
        for i in range(n):
            q_, k_, v_ = arriving.wait()
            if i + 1 < n:
                arriving = exchange.pull(i + 1)
            mine = None if sinks is None else sinks[q_heads[i][plan.head]]
            out, lse, saved_of_part = ring.forward(q_, k_, v_, plan, mine)
            outs.send(i, [out])
            lses.append(lse)
            saved.append(saved_of_part)
    (out,) = outs.finish()
    if plan.want_lse:
        rows = [x.transpose(-1, -2).unsqueeze(-1) for x in lses]  # [..., S, heads, 1]
        turned = _ToTokens([rows[0].new_empty((*q.shape[:-1], 1))], [q_heads], plan, "lse")
        for i, x in enumerate(rows):
            turned.send(i, [x])
        lse = turned.finish()[0].squeeze(-1).transpose(-1, -2)
    return out, lse, tuple(x for of_part in saved for x in of_part)


def backward(dout: Tensor, saved: Saved, plan: Plan) -> Grads:
    """(dq, dk, dv) of this rank's shards, and with sinks also theirs, which are 0 for heads that other ranks computed."""
    if plan.problem.ulysses == 1:
        return ring.backward(dout, saved, plan)
    each = SAVED + plan.sinks
    n = len(saved) // each
    q_heads, kv_heads = shares(plan.heads, plan, n), shares(plan.kv_heads, plan, n)
    # the shapes of this rank's q, k and v
    like = [
        dout[..., :1, :1].expand(*dout.shape[:-2], heads, x.shape[-1])
        for heads, x in zip((plan.heads, plan.kv_heads, plan.kv_heads), saved, strict=False)
    ]
    grads = _ToTokens(like, [q_heads, kv_heads, kv_heads], plan, "dqkv")
    dsinks = [saved[SAVED].new_zeros(plan.heads)] if plan.sinks else []
    with closing(_ToHeads([dout], [q_heads], plan, "dout")) as exchange:
        arriving = exchange.pull(0)
        for i in range(n):
            (dout_,) = arriving.wait()
            if i + 1 < n:
                arriving = exchange.pull(i + 1)
            q_, k_, v_, *_ = saved_of_part = saved[i * each : (i + 1) * each]
            dq, dk, dv = plan.transport.buffers("dqkv", [x.shape for x in (q_, k_, v_)], q_, tokens(q_))
            _, _, _, *of_sinks = ring.backward(dout_, saved_of_part, plan, (dq, dk, dv))
            for total, x in zip(dsinks, of_sinks, strict=True):
                total[q_heads[i][plan.head]].copy_(x)
            grads.send(i, [dq, dk, dv])
    return *grads.finish(), *dsinks


def shares(heads: int, plan: Plan, n: int = 1) -> Heads:
    """The heads that each rank of the group computes, in `n` parts: an equal share, or with fewer heads than ranks one
    head, which several ranks compute."""
    ranks = plan.problem.ulysses
    if heads % ranks:
        return [[slice(i * heads // ranks, i * heads // ranks + 1) for i in range(ranks)]]
    each = heads // ranks // n
    return [[slice((i * n + part) * each, (i * n + part + 1) * each) for i in range(ranks)] for part in range(n)]


def _cut(x: Tensor, heads: slice) -> Tensor:
    return cut_heads(x, heads.start, heads.stop)


def _group(plan: Plan) -> tuple[int, ...]:
    """The ranks of this rank's group, in the order of their tokens."""
    first = plan.rank * plan.problem.ulysses
    return tuple(range(first, first + plan.problem.ulysses))


class _ToHeads:
    """The exchange before the computation. Each rank publishes `[..., s, heads, D]`: all heads for its own tokens. Each
    rank pulls, part by part, `[..., n * s, share, D]`: its share of the heads for the tokens of all n ranks of the
    group."""

    def __init__(self, xs: list[Tensor], heads: list[Heads], plan: Plan, what: str):
        self.xs, self.heads, self.plan = xs, heads, plan
        self.s = tokens(xs[0])
        me, ranks = plan.head, range(plan.problem.ulysses)
        # for each part and receiving rank, the rank's heads of each tensor; empty for this rank itself
        published = [
            empty_tokens(_cut(x, share[part][i]), 0) if i == me else _cut(x, share[part][i])
            for part in range(len(heads[0]))
            for i in ranks
            for x, share in zip(xs, heads, strict=True)
        ]
        self.published = plan.transport.publish(what, published, self.s)

    def pull(self, part: int) -> Arriving[list[Tensor]]:
        plan, s, n = self.plan, self.s, len(self.xs)
        me, group = plan.head, _group(plan)
        mine = [_cut(x, share[part][me]) for x, share in zip(self.xs, self.heads, strict=True)]
        out = [empty_tokens(mine[0], len(group) * s)]
        if n > 1:
            out += empty_pair((mine[1], mine[2]), len(group) * s)
        transfer = self.published.pull(_to_heads(group, me, s, n, part), out, part)
        with phase("comp_place", part):
            copy_all((take(target, ((me * s, (me + 1) * s),)), x) for x, target in zip(mine, out, strict=True))
        return Arriving(out, transfer)

    def close(self) -> None:
        self.published.close()


@lru_cache(maxsize=1024)
def _to_heads(group: tuple[int, ...], me: int, s: int, n: int, part: int) -> Messages:
    """The messages of one part: s tokens of n tensors from each other rank of the group. A rank publishes its tensors
    ordered by part, then by receiving rank."""
    whole: Intervals = ((0, s),)
    first = part * len(group) * n
    others = [(i, rank, ((i * s, (i + 1) * s),)) for i, rank in enumerate(group) if i != me]
    return Messages(
        [Message(rank, first + i * n + j, whole, place) for i, rank, place in others for j in range(n)],
        [Message(rank, first + me * n + j, whole, place, j) for _, rank, place in others for j in range(n)],
    )


class _ToTokens:
    """The exchange after the computation: the reverse of `_ToHeads`, part by part. Gradients of a head that several
    ranks computed are summed. like: tensors with the shapes of the results, `[..., s, heads, D]`."""

    def __init__(self, like: list[Tensor], heads: list[Heads], plan: Plan, what: str):
        self.plan, self.what, self.heads, self.s = plan, what, heads, tokens(like[0])
        places = [_places(x, share) for x, share in zip(like, heads, strict=True)]
        self.results = [result for result, _ in places]
        self.pieces = [pieces for _, pieces in places]  # of each tensor, by part and rank
        self.transfers: list[Handle] = []

    def send(self, part: int, xs: list[Tensor]) -> None:
        plan, s = self.plan, self.s
        me, group = plan.head, _group(plan)
        mine: Intervals = ((me * s, (me + 1) * s),)
        here = [pieces[part] for pieces in self.pieces]
        into = [by_rank[i] for i in range(len(group)) if i != me for by_rank in here]
        with closing(plan.transport.publish(self.what, xs)) as published:
            self.transfers.append(published.pull(_to_tokens(group, me, s, len(xs)), into, part))
        with phase("comp_place", part):
            copy_all((by_rank[me], take(x, mine)) for x, by_rank in zip(xs, here, strict=True))

    def finish(self) -> list[Tensor]:
        for transfer in self.transfers:
            transfer.wait()
        unsummed = [i for i, result in enumerate(self.results) if result is None]  # dk and dv
        totals: list[Tensor] = []
        if unsummed:
            with phase("comp_place", len(self.transfers)):
                totals = _summed([self.pieces[i][0] for i in unsummed], self.heads[unsummed[0]][0])
        return [totals.pop(0) if result is None else result for result in self.results]


@lru_cache(maxsize=1024)
def _to_tokens(group: tuple[int, ...], me: int, s: int, n: int) -> Messages:
    """The messages of one part. Each other rank gets its s tokens of n tensors from this rank, and sends this rank's s
    tokens of n tensors."""
    whole: Intervals = ((0, s),)
    places: list[Intervals] = [((i * s, (i + 1) * s),) for i in range(len(group))]
    others = [(i, rank) for i, rank in enumerate(group) if i != me]
    return Messages(
        [Message(rank, j, places[i], whole) for i, rank in others for j in range(n)],
        [Message(rank, j, places[me], whole, at * n + j) for at, (_, rank) in enumerate(others) for j in range(n)],
    )


def _places(like: Tensor, heads: Heads) -> tuple[Tensor | None, list[list[Tensor]]]:
    """(the result, pieces). The heads that rank i of the group computed go to `pieces[part][i]`. The pieces are views of
    the result. If several ranks computed the same head, the pieces are separate tensors instead, which `_summed` adds
    up, and the result is None."""
    every = [each for by_rank in heads for each in by_rank]
    shape = like.shape[:-2]
    if sum(each.stop - each.start for each in every) > every[-1].stop:
        return None, [[like.new_empty((*shape, 1, like.shape[-1])) for _ in every]]
    result = like.new_empty(like.shape)
    return result, [[_cut(result, each) for each in by_rank] for by_rank in heads]


def _summed(pieces: list[list[Tensor]], heads: list[slice]) -> list[Tensor]:
    """For each tensor, each head summed over the ranks that computed it. pieces[tensor][rank] is the head `heads[rank]`."""
    first = pieces[0][0]
    totals = [x.new_empty((*x.shape[:-2], heads[-1].stop, x.shape[-1])) for x, *_ in pieces]
    everything: Intervals = ((0, tokens(first)),)
    for head in {each.start: each for each in heads}.values():
        of_head = zip(
            *([x for x, each in zip(by_rank, heads, strict=True) if each == head] for by_rank in pieces), strict=True
        )
        sum_all([_cut(total, head) for total in totals], [(of_rank, everything) for of_rank in of_head])
    return totals
