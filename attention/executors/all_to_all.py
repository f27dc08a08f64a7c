"""The all-to-all executor (Ulysses, USP). The ranks form groups. An exchange within the group gives each rank a share
of the heads for all of the group's tokens. The executor of rings computes on them, with one step for each group; with a
single group this is a local call. A second exchange brings the results back. A share may be computed in several parts,
so that one part's tensors travel while another computes. With fewer KV heads than ranks in a group, several ranks
compute with the same KV head, and their gradients are summed in fp32."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing

from torch import Tensor

from attention.batched_copy import copy_all
from attention.executors import exchange
from attention.executors.heads import halves
from attention.executors.keys import Arriving, one_by_one
from attention.executors.plan import Plan
from attention.kernels.interface import Grads
from attention.masks.band import Intervals
from attention.profiling import phase
from attention.reduction.grad_sum import sum_all
from attention.reduction.sinks import SAVED
from attention.tensors import cut, empty_pair, empty_tokens, result_like, take, tokens
from attention.transports import Handle, Message, Messages

# a group's tokens from which a rank takes half of its heads at a time: on 4 H200 13.04 ms instead of 13.25
# (results/h200-x4/path_3_parts); with half as many tokens launches make it 5.51 instead of 3.66 (h200-x4/short_training)
EXCHANGED_BY_PARTS = 32768

Saved = tuple[Tensor, ...]
Heads = list[list[slice]]  # heads[part][i]: the heads that rank i of the group computes


def forward(q: Tensor, k: Tensor, v: Tensor, plan: Plan, sinks: Tensor | None = None) -> tuple[Tensor, Tensor, Saved]:
    """(out, lse) of this rank's tokens with all heads, and what the backward needs; the lse only if the plan wants it.
    q, k, v: this rank's shards. sinks: `[H]`."""
    if plan.problem.ulysses == 1:
        return exchange.forward(q, k, v, plan, sinks)
    group = plan.once("group", lambda: Group(plan, tokens(q)))
    saved: Saved = ()
    outs, lses = ToTokens(group, [result_like(q, v).shape], q, "out"), list[Tensor]()
    with closing(ToHeads(group, [q, k, v], "qkv")) as shares:
        for part, (q_, k_, v_) in one_by_one(shares.pull, group.parts):
            mine = None if sinks is None else sinks[group.heads[0][part][plan.head]]
            out, lse, saved_of_part = exchange.forward(q_, k_, v_, plan, mine)
            outs.send([out])
            lses.append(lse)
            saved += saved_of_part
            del q_, k_, v_, out, lse, saved_of_part
    (out,) = outs.finish()
    lse = lses[0]
    if plan.want_lse:
        turned = ToTokens(group, [(*q.shape[:-1], 1)], lse, "lse")
        for x in lses:
            turned.send([x.transpose(-1, -2).unsqueeze(-1)])  # [..., S, heads, 1]
        lse = turned.finish()[0].squeeze(-1).transpose(-1, -2)
    return out, lse, saved


def backward(dout: Tensor, saved: Saved, plan: Plan) -> Grads:
    """(dq, dk, dv) of this rank's shards, and with sinks also theirs, which are 0 for heads that other ranks computed."""
    if plan.problem.ulysses == 1:
        return exchange.backward(dout, saved, plan)
    group = plan.once("group", lambda: Group(plan, tokens(dout)))
    heads = plan.heads, plan.kv_heads, plan.kv_heads
    shapes = [(*dout.shape[:-2], n, x.shape[-1]) for n, x in zip(heads, saved, strict=False)]
    grads, n_saved = ToTokens(group, shapes, dout, "dqkv"), SAVED + plan.sinks
    dsinks = [saved[SAVED].new_zeros(plan.heads)] if plan.sinks else []
    with closing(ToHeads(group, [dout], "dout")) as shares:
        for part, (dout_,) in one_by_one(shares.pull, group.parts):
            saved_of_part = saved[part * n_saved : (part + 1) * n_saved]
            like, *_ = qkv = saved_of_part[:3]
            dq, dk, dv = plan.transport.buffers("dqkv", [x.shape for x in qkv], like, tokens(like))
            _, _, _, *of_sinks = exchange.backward(dout_, saved_of_part, plan, (dq, dk, dv))
            for total, x in zip(dsinks, of_sinks, strict=True):
                total[group.heads[0][part][plan.head]].copy_(x)
            grads.send([dq, dk, dv])
            del dout_
    return *grads.finish(), *dsinks


class Group:
    """What all calls of a plan have in common. heads: those that each rank of the group computes, by part, of tensors like q, k and
    v. s: the tokens of a rank."""

    def __init__(self, plan: Plan, s: int):
        self.plan, self.s, self.size, self.me = plan, s, plan.problem.ulysses, plan.head
        self.ranks = [plan.rank * self.size + i for i in range(self.size)]
        self.others = [i for i in range(self.size) if i != self.me]
        self.places: list[Intervals] = [((i * s, (i + 1) * s),) for i in range(self.size)]
        share, rest = divmod(plan.kv_heads, self.size)
        n = 1 if rest else halves(plan.options.head_parts, share, self.size * s, EXCHANGED_BY_PARTS)
        self.parts = [(part,) for part in range(n)]
        self.heads = [self._shares(heads, n) for heads in (plan.heads, plan.kv_heads, plan.kv_heads)]

    def _shares(self, heads: int, n: int) -> Heads:
        """An equal share for each rank, in `n` parts, or with fewer heads than ranks one head, which several ranks compute."""
        if heads < self.size:
            return [[slice(x := i * heads // self.size, x + 1) for i in range(self.size)]]
        share = heads // self.size // n
        starts = [[(i * n + part) * share for i in range(self.size)] for part in range(n)]
        return [[slice(x, x + share) for x in part] for part in starts]

    def to_heads(self, n: int, part: int) -> Messages:
        """The messages of `ToHeads`: s tokens of n tensors from each other rank. A rank publishes its tensors ordered by part,
        then by receiving rank."""
        first, whole, places, numbered = part * self.size * n, self.places[0], self.places, self._numbered(n)
        return Messages(
            [Message(self.ranks[i], first + i * n + j, whole, places[self.me]) for i, j in numbered],
            [Message(self.ranks[i], first + self.me * n + j, whole, places[i], j) for i, j in numbered],
        )

    def to_tokens(self, n: int) -> Messages:
        """The messages of `ToTokens`. Each other rank gets its s tokens of n tensors from this rank, and sends this rank's s
        tokens of n tensors."""
        whole, places, numbered = self.places[0], self.places, self._numbered(n)
        return Messages(
            [Message(self.ranks[i], j, places[i], whole) for i, j in numbered],
            [Message(self.ranks[i], j, places[self.me], whole, at) for at, (i, j) in enumerate(numbered)],
        )

    def _numbered(self, n: int) -> list[tuple[int, int]]:
        return [(i, j) for i in self.others for j in range(n)]


class ToHeads:
    """The exchange before the computation. Each rank publishes `[..., s, heads, D]`: all heads for its own tokens. Each
    rank pulls, part by part, `[..., n * s, share, D]`: its share of the heads for the tokens of all n ranks of the
    group."""

    def __init__(self, group: Group, xs: list[Tensor], what: str):
        self.group, self.n = group, len(xs)
        # by part and receiving rank, the rank's heads of each tensor; what this rank itself takes is not published
        self.shares = [
            [[cut(x, heads[part][i]) for x, heads in zip(xs, group.heads, strict=False)] for i in range(group.size)]
            for (part,) in group.parts
        ]
        by_rank = [x for part in self.shares for x in enumerate(part)]
        published = [empty_tokens(x, 0) if i == group.me else x for i, share in by_rank for x in share]
        self.published = group.plan.transport.publish(what, published, group.s)

    def pull(self, part: int) -> Arriving:
        group, mine = self.group, self.shares[part][self.group.me]
        out = [empty_tokens(mine[0], group.size * group.s)]
        if self.n > 1:
            out += empty_pair((mine[1], mine[2]), group.size * group.s)
        pulls = group.plan.once(("to heads", self.n, part), lambda: group.to_heads(self.n, part))
        transfer = self.published.pull(pulls, out, part)
        with phase("comp_place", part):
            copy_all((take(target, group.places[group.me]), x) for x, target in zip(mine, out, strict=True))
        return Arriving(out, transfer)

    def close(self) -> None:
        self.published.close()


class ToTokens:
    """The exchange after the computation: the reverse of `ToHeads`, part by part. shapes: of the results, `[..., s, heads, D]`.
    Gradients of a head that several ranks computed come into tensors of their own, and are summed."""

    def __init__(self, group: Group, shapes: Sequence[Sequence[int]], like: Tensor, what: str):
        self.group, self.what, self.like, self.shapes = group, what, like, [tuple(shape) for shape in shapes]
        self.heads = group.heads
        self.apart: dict[int, list[Tensor]] = {}  # of dk and dv, if ranks share heads: what each rank computed
        self.results = {j: like.new_empty(x) for j, x in enumerate(self.shapes) if x[-2] >= group.size}
        self.transfers: list[Handle] = []

    def _places(self, j: int, part: int) -> list[Tensor]:
        """For each rank, where its heads of tensor j go."""
        if j in self.results:
            return [cut(self.results[j], heads) for heads in self.heads[j][part]]
        *leading, _, head_dim = self.shapes[j]
        self.apart[j] = [self.like.new_empty((*leading, 1, head_dim)) for _ in range(self.group.size)]
        return self.apart[j]

    def send(self, xs: list[Tensor]) -> None:
        group, part, n = self.group, len(self.transfers), len(xs)
        places = [self._places(j, part) for j in range(n)]
        into = [by_rank[i] for i in group.others for by_rank in places]
        messages = group.plan.once(("to tokens", n), lambda: group.to_tokens(n))
        with closing(group.plan.transport.publish(self.what, xs)) as published:
            self.transfers.append(published.pull(messages, into, part))
        mine = group.places[group.me]
        with phase("comp_place", part):
            copy_all((by_rank[group.me], take(x, mine)) for x, by_rank in zip(xs, places, strict=True))

    def finish(self) -> list[Tensor]:
        for transfer in self.transfers:
            transfer.wait()
        if self.apart:
            with phase("comp_place", len(self.transfers)):
                self._sum()
        return [self.results[j] for j in range(len(self.shapes))]

    def _sum(self) -> None:
        everything: Intervals = ((0, self.group.s),)
        (heads,) = self.heads[1]
        totals = [self.like.new_empty(self.shapes[j]) for j in self.apart]
        for head in {x.start: x for x in heads}.values():
            ranks = [i for i, x in enumerate(heads) if x == head]
            parts = [([pieces[i] for pieces in self.apart.values()], everything) for i in ranks]
            sum_all([cut(total, head) for total in totals], parts)
        self.results.update(zip(self.apart, totals, strict=True))
