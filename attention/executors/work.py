"""What all forwards, or all backwards, of a plan have in common: prepared at the first one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from torch import Tensor

from attention.executors.heads import gathered_sizes, halves, head_groups
from attention.executors.nested_prefixes import together
from attention.executors.plan import LocalCall, Plan
from attention.geometry.intervals import side_by_side, union
from attention.geometry.layouts import largest
from attention.geometry.merge_plan import MergePlan, merge_plan
from attention.geometry.transfers import Move, Route, gather_move, gathered
from attention.gpu.streams import Inline, PriorityStream
from attention.masks.band import Interval, Intervals
from attention.tensors import FEW, tokens
from attention.transports import Message, Messages

RING_HALVED = (
    8192  # a rank's tokens from which a ring's backward takes two parts of the heads: saves memory, costs launches
)
# a rank's tokens up to which a backward computes on local KV beside the other steps: that costs memory, and longer shards fill the
# GPU anyway
APART = 8192


class Work:
    """A round is a step for a head group. While it computes, the keys of the next round arrive, and the gradients of the previous
    round travel to their owners.

    most: the most tokens that a rank publishes; None: nothing is published. Keys are not published if an all-gather for each
    head group sends all of them, which it does unless ranks pull, or each needs few of the remote keys.
    sent: the local keys that some remote rank pulls; None where they lie in many places: then all are published.
    calls: of each step, what is computed together. late: by head group, whether the step on the local KV comes last, in the last
    of several groups, or may still be running (`apart`, on the background stream) when the others have ended. queries, keys: by
    head group the parts of this rank's queries and keys, in the order of time; of a gather's keys also how many of them are local
    and come first, but are added last."""

    def __init__(self, plan: Plan, q: Tensor, k: Tensor, backward: bool):
        steps, problem, gathers, pulls = plan.steps, plan.problem, plan.gathers, plan.transport.pulls
        local = [i for i, step in enumerate(steps) if step.owner == plan.rank]
        remote = [i for i, step in enumerate(steps) if step.owner != plan.rank]
        sizes = [kv_heads := k.shape[-2]]
        if gathers:
            # a smaller first group pays only if ranks pull, and if no local step hides the transfer of its keys
            small = pulls and not local, pulls and backward
            sizes = gathered_sizes(kv_heads, plan.options.heads_k_stride, *small, most_remote(plan, bool(local)))
        elif backward and problem.ulysses == 1:  # an all-to-all already divides the heads
            n = halves(plan.options.head_parts, kv_heads, tokens(k), RING_HALVED)
            sizes = [kv_heads // n] * n
        self.groups = head_groups(q.shape[-2], sizes)
        last, groups = len(sizes) - 1, range(len(sizes))

        all_gathers = gathers and not (problem.world == 1 or needs_few(plan, bool(local)) or pulls)
        publishes = not all_gathers and any(step.most for step in steps)
        self.most = largest(problem.layout, problem.cu_seqlens, problem.world) if publishes else None
        self.moves = [Move(step.route, ()) for step in steps]
        if gathers and (publishes or backward):
            self.moves[-1] = gather_move(problem, plan.rank)
        self.sent = _union(x for moving in self.moves for piece in moving.route.sends for x in piece.source)
        self.pulls = [[messages(plan, x.route, 2 * g) for x in self.moves] for g in groups]
        self.returns = [messages(plan, x.route.reversed, apart=True) for x in self.moves]
        if all_gathers:  # by rank, of its keys in its shard and among the gathered
            self.places = [tuple(zip(*places, strict=True)) for places in gathered(problem, plan.rank)]

        # not where a ring takes the heads in parts, which is for memory
        beside = backward and local and any(steps[i].calls for i in remote) and (gathers or not last)
        short = problem.cu_seqlens[-1] // problem.world <= APART
        self.priority: PriorityStream = plan.transport.priority_stream if beside and short else Inline()
        self.apart = self.priority.apart
        self.late = [bool(backward and local) and (self.apart or 0 < g == last) for g in groups]
        self.allocates = last > 0 or self.apart or (gathers and (backward or not local))
        orders = [remote + local if late else local + remote for late in self.late]
        rounds = [(g, i) for g in groups for i in orders[g]]
        self.rounds = sorted(rounds, key=lambda x: self.apart and x[1] in remote)

        self.calls: list[list[tuple[LocalCall, ...]]] = [together(step.calls, plan) for step in steps]
        if backward:  # each by itself; one on all keys of a step comes first, because it writes into what is published
            self.calls = [
                [(x,) for x in sorted(step.calls, key=lambda x: step.most and x.k != ((0, step.n_keys),))]
                for step in steps
            ]
        # gathered keys of this rank's own: where they lie in the shard, and among all
        own = self.moves[-1].local
        pieces = [(x,) for x in own] if len(own) <= FEW else [own]
        self.own = [tuple(there for _, there in piece) for piece in pieces]
        returned = [tuple(here for here, _ in piece) for piece in pieces]
        returned += [x.target for moving in self.moves for x in moving.route.reversed.receives]
        local_keys = [call.k for i in local for call in steps[i].calls]
        self.queries, self.keys = list[MergePlan](), list[Any]()
        for late, order in zip(self.late, orders, strict=True):
            rows = [tuple(x for call in calls for x in call.q) for i in order for calls in self.calls[i]]
            self.queries.append(merge_plan(tokens(q), tuple(rows)))
            if backward:
                parts = tuple(returned + local_keys if late else local_keys + returned)
                first = 0 if late else len(local_keys)
                self.keys.append((parts, first) if gathers else merge_plan(tokens(k), parts))


def most_remote(plan: Plan, own_first: bool) -> int:
    """The most remote keys that a rank of a gather needs. own_first: whether its own are not gathered."""
    return plan.steps[-1].most - (0 if own_first else plan.problem.shard_tokens)


def needs_few(plan: Plan, own_first: bool) -> bool:
    """Whether each rank of a gather needs few of the remote keys, so that an all-gather would send too much."""
    problem = plan.problem
    return problem.keys_differ or 2 * most_remote(plan, own_first) <= problem.cu_seqlens[-1] - problem.shard_tokens


def _union(intervals: Iterable[Interval]) -> Intervals | None:
    """Where they lie, in few places; else None."""
    start, stop = np.array([*intervals], np.int64).reshape(-1, 2).T
    merged = union(start, stop, 0 * start)[:, :2].tolist()
    return tuple((a, b) for a, b in merged) if len(merged) <= FEW else None


def messages(plan: Plan, route: Route, first: int = 0, n: int = 2, apart: bool = False) -> Messages:
    """The messages of a route: its pieces for each of the n published tensors from number `first` on. All ranks' pieces
    are pulled into the same n tensors; with `apart`, each remote rank's pieces into n tensors of their own, side by side."""
    size, head = plan.problem.ulysses, plan.head
    sends = [Message(x.remote * size + head, first + i, x.source, x.target) for x in route.sends for i in range(n)]
    receives = []
    for number, x in enumerate(route.receives):
        target, into = (side_by_side(x.target), number * n) if apart else (x.target, 0)
        receives += [Message(x.remote * size + head, first + i, x.source, target, into + i) for i in range(n)]
    return Messages(sends, receives)
