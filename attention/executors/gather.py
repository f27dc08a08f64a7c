"""The gather executor: the keys that a rank needs are gathered from all ranks in sequence order, a group of KV heads at
a time; the next group travels while this one computes. Each query chunk is one kernel call and nothing is merged. The
backward gathers again, and each owner sums the dk and dv from all ranks in fp32.

A schedule with a local step computes on the local KV while remote keys travel, then on the remote keys, and merges the
two results. In a backward of several head groups, the last group's local step runs at the end, while gradients
travel."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing

import torch
from torch import Tensor

from attention.batched_copy import copy_all, moves
from attention.executors import nested_prefixes
from attention.executors.gradients import GradReturn
from attention.executors.head_groups import HeadGroup, head_groups
from attention.executors.keys import Arriving, KeyPair, LocalKeys
from attention.executors.plan import LocalCall, Plan
from attention.geometry.intervals import length, side_by_side
from attention.geometry.transfers import gathered
from attention.gpu.streams import PriorityStream
from attention.kernels.interface import Grads, Triple
from attention.masks.band import Interval, Intervals
from attention.profiling import phase
from attention.reduction.grad_sum import sum_all, sum_parts
from attention.reduction.lse_merge import merge
from attention.reduction.sinks import saved_with, sinks_gradients, with_sinks
from attention.tensors import FEW, empty_lse, empty_tokens, put_, result_like, take, tokens

Saved = tuple[Tensor, ...]


def forward(q: Tensor, k: Tensor, v: Tensor, plan: Plan, sinks: Tensor | None = None) -> tuple[Tensor, Tensor, Saved]:
    """(out, lse) of this rank's queries, and what the backward needs. q, k, v: this rank's shards. sinks: `[H]`."""
    q = relayout(q, plan, to_compute=True)
    out, lse = with_sinks(*_forward(q, k, v, plan), sinks)
    border_lse = relayout(lse.transpose(-1, -2).unsqueeze(-1), plan, to_compute=False) if plan.want_lse else None
    returned = lse if border_lse is None else border_lse.squeeze(-1).transpose(-1, -2)
    return relayout(out, plan, to_compute=False), returned, saved_with(sinks, q, k, v, out, lse)


def backward(dout: Tensor, saved: Saved, plan: Plan) -> Grads:
    """(dq, dk, dv) of this rank's shards; then the sinks' gradient, if any."""
    q, k, v, out, lse = saved[:5]
    dout = relayout(dout, plan, to_compute=True)
    dq, dk, dv = _backward(dout, q, k, v, out, lse, plan)
    return relayout(dq, plan, to_compute=False), dk, dv, *sinks_gradients(dout, saved)


def relayout(x: Tensor, plan: Plan, to_compute: bool) -> Tensor:
    """Queries, their gradients or outputs, moved from the shards' layout to the layout for computing (`q_layout`), or
    with `to_compute=False` back."""
    problem = plan.problem
    if problem.layout == problem.q_layout or problem.world == 1:
        return x
    moving = plan.to_compute if to_compute else plan.to_border
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    with closing(plan.transport.publish("q", [x])) as published:
        transfer = published.pull(plan.messages(moving.route, n=1), [out], 0)
    copy_all(moves(out, x, moving.local))
    transfer.wait()
    return out


def _forward(q: Tensor, k: Tensor, v: Tensor, plan: Plan) -> tuple[Tensor, Tensor]:
    """(out, lse) of the queries. q, out and lse are in the layout for computing."""
    *first, step = plan.steps
    groups = _groups(q, k, plan)
    with closing(_publish(k, v, plan, groups)) as local:
        arriving = _gathered(local, 0)
        if first:
            (each,) = first[0].calls
            with phase("comp_block", 0):
                out, lse = plan.kernel.forward(q, k, v, each.call)
        else:
            out = empty_tokens(result_like(q, v), tokens(q))
            lse = empty_lse(q).fill_(-torch.inf)
            if not _each_once([c.q for c in step.calls], tokens(q)):
                out.zero_()  # some query sees no key
        for i, group in enumerate(groups):
            keys, values = arriving.wait()
            if i + 1 < len(groups):
                arriving = _gathered(local, i + 1)
            mine, into = group.queries(q), (group.queries(out), group.queries(lse))
            if first:
                _merge_rest(mine, keys, values, plan, into, 1 + i)
            else:
                with phase("comp_block", i):
                    nested_prefixes.forward(mine, keys, values, step.calls, plan, into)
    return out, lse


def _merge_rest(q: Tensor, keys: Tensor, values: Tensor, plan: Plan, into: tuple[Tensor, Tensor], number: int) -> None:
    """Compute on the remote keys, and merge the results into `into`, which has the local ones."""
    for each in plan.steps[-1].calls:
        with phase("comp_block", number):
            part, part_lse = plan.kernel.forward(take(q, each.q), take(keys, each.k), take(values, each.k), each.call)
        with phase("comp_merge", number):
            for rows, here in zip(each.q, side_by_side(each.q), strict=True):
                out, lse = take(into[0], (rows,)), take(into[1], (rows,), -1)
                merge(out, lse, out, lse, take(part, (here,)), take(part_lse, (here,), -1))
        del part, part_lse  # else they are held while the next call computes


def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, plan: Plan
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv). dout, q, out, lse and dq are in the layout for computing."""
    *first, step = plan.steps
    groups = _groups(q, k, plan, backward=True)
    once = first or _each_once([c.q for c in step.calls], tokens(q))
    dq = torch.empty_like(q) if once else torch.empty_like(q).zero_()
    grads = dq, torch.empty_like(k), torch.empty_like(v)
    inputs = dout, q, out, lse
    returning: list[_GroupBackward] = []
    with plan.priority_stream() as priority, closing(_publish(k, v, plan, groups)) as local:
        local_groups = _local_groups(groups, priority.apart) if first else []
        arriving = _gathered(local, 0)
        for heads in local_groups[:1]:
            _compute_local(heads, inputs, k, v, grads, plan, priority)
        for i, group in enumerate(groups):
            keys, values = arriving.wait()
            if i + 1 < len(groups):
                arriving = _gathered(local, i + 1)
            here = _GroupBackward(group, i, inputs, grads, local, priority.apart, group in local_groups[1:])
            here.compute(keys, values)
            if not priority.apart:
                _finish(returning)
            here.home.start()
            returning.append(here)
        for heads in local_groups[1:]:
            _compute_local(heads, inputs, k, v, grads, plan, priority)
        priority.join()
        _finish(returning)
    return grads


def _compute_local(
    heads: HeadGroup, inputs: Inputs, k: Tensor, v: Tensor, grads: Triple, plan: Plan, priority: PriorityStream
) -> None:
    """The step on the local KV, for these heads; writes dq, dk and dv."""
    (each,) = plan.steps[0].calls
    dout, q, out, lse = (heads.queries(x) for x in inputs)
    with priority.background(), phase("comp_block", 0):
        plan.kernel.backward(dout, q, heads.keys(k), heads.keys(v), out, lse, each.call, heads.of(grads))


def _finish(returning: list[_GroupBackward]) -> None:
    while returning:
        returning.pop(0).finish()


def _groups(q: Tensor, k: Tensor, plan: Plan, backward: bool = False) -> list[HeadGroup]:
    # a smaller first group pays only if ranks pull, and if no local step hides the transfer of its keys
    pulls, first = plan.transport.pulls, len(plan.steps) == 1
    stride, most = plan.options.heads_k_stride, plan.steps[-1].most
    return head_groups(q.shape[-2], k.shape[-2], stride, pulls and first, pulls and backward, most)


def _local_groups(groups: list[HeadGroup], apart: bool) -> list[HeadGroup]:
    """The heads whose local step runs before the calls on remote keys, then, if any, the heads whose local step runs
    after all of these calls."""
    last = groups[-1]
    if apart or len(groups) == 1:
        return [HeadGroup(0, last.k_stop, 0, last.q_stop)]
    return [HeadGroup(0, last.k_start, 0, last.q_start), last]


def _each_once(calls: list[Intervals], n: int) -> bool:
    """Whether the calls together cover all n queries. No two calls share a query."""
    return sum(b - a for intervals in calls for a, b in intervals) == n


def _publish(k: Tensor, v: Tensor, plan: Plan, groups: list[HeadGroup]) -> LocalKeys:
    """Publishes the keys, so that each rank gets only the keys that it needs, if ranks pull or if the mask makes many keys
    unnecessary. Otherwise publishes nothing: an all-gather for each head group sends all keys."""
    one_by_one = plan.problem.world == 1 or plan.problem.keys_differ or plan.transport.pulls
    return LocalKeys(k, v, plan, groups, one_by_one)


def _gathered(local: LocalKeys, i: int) -> Arriving[KeyPair]:
    """Starts the gather of the keys that this rank needs, for head group i, in the order of the last step's `keys`."""
    plan = local.plan
    if local.published is None:
        return _all_gathered(local, i)
    moving = plan.gathering
    arriving = local.pull(moving.route, i, i, plan.steps[-1].n_keys)
    with phase("comp_place", i):
        pairs = zip(local.by_group[i], arriving.tensors, strict=True)
        copy_all(copy for x, keys in pairs for copy in moves(keys, x, moving.local))
    return arriving


def _all_gathered(local: LocalKeys, i: int) -> Arriving[KeyPair]:
    plan, pair = local.plan, local.by_group[i]
    problem = plan.problem
    k, v = (empty_tokens(x, plan.steps[-1].n_keys) for x in pair)
    alike = k.shape[-1] == v.shape[-1]
    both = torch.stack(pair) if alike else torch.cat(pair, -1)
    staged = both.new_empty((problem.world, *both.shape))

    def parts(x: Tensor) -> Sequence[Tensor]:
        return x.unbind() if alike else x.split([k.shape[-1], v.shape[-1]], -1)

    def unpack() -> None:
        with phase("comp_place", i):
            for rank, places in enumerate(_places(plan)):
                both = zip(parts(staged[rank]), (k, v), strict=True)
                copy_all(copy for x, keys in both for copy in moves(keys, x, places))

    return Arriving((k, v), plan.transport.all_gather(staged, both, "kv", i), unpack)


def _places(plan: Plan) -> list[Sequence[tuple[Interval, Interval]]]:
    """For each rank, where its keys lie in its shard and among the gathered ones."""
    places = plan.derived.get("gathered")
    if places is None:
        both = gathered(plan.problem, plan.rank)
        places = plan.derived["gathered"] = [tuple(zip(*intervals, strict=True)) for intervals in both]
    return places  # type: ignore[no-any-return]


Inputs = tuple[Tensor, Tensor, Tensor, Tensor]  # dout, q, out and lse


class _GroupBackward:
    """One head group's dq, dk and dv, computed on the gathered keys. dk and dv are sent to the keys' owners and summed
    there in fp32.

    If there is a local step, it writes its gradients to `grads`, and the gradients of the remote keys are added to them.
    dq is added at the end if the local step may still be running (`apart`: on the background stream) or comes later
    (`local_last`)."""

    def __init__(
        self,
        group: HeadGroup,
        i: int,
        inputs: Inputs,
        grads: Triple,
        local: LocalKeys,
        apart: bool,
        local_last: bool,
    ):
        self.plan = plan = local.plan
        *first, self.step = plan.steps
        self.has_local, self.late = bool(first), apart or local_last
        self.number = i + len(first)
        self.dout, self.q, self.out, self.lse = (group.queries(x) for x in inputs)
        self.dq, self.dk, self.dv = group.of(grads)
        self.late_dq: list[tuple[Tensor, Tensor]] = []  # rows of dq, and the parts to add to them
        self.moving = plan.gathering
        assert not (apart and self.moving.local), "`computed` would be read at the end, after its memory was reused"
        like, n_keys, most = local.by_group[i], self.step.n_keys, self.step.most
        self.home = GradReturn(plan, self.moving.route, like, n_keys, most, self.number, early=apart)

    def compute(self, keys: Tensor, values: Tensor) -> None:
        """All kernel calls of the step: dq of this rank's queries, and their contribution to dk and dv of all gathered keys."""
        everything = ((0, tokens(keys)),)
        # a call that covers all keys runs first and writes to the published memory; the other parts are added there
        calls = sorted(self.step.calls, key=lambda each: each.k != everything)
        parts: list[tuple[Sequence[Tensor], Intervals]] = []
        for each in calls:
            direct = not parts and each.k == everything
            parts.append((self._call(each, keys, values, self.home.computed if direct else None), each.k))
        if len(parts) == 1 and parts[0][1] == everything:
            return
        with phase("comp_merge", self.number):
            sum_all(self.home.computed, parts)

    def _call(self, each: LocalCall, keys: Tensor, values: Tensor, into: Sequence[Tensor] | None) -> Sequence[Tensor]:
        """One kernel call: writes or adds dq, and returns (dk, dv)."""
        with phase("comp_block", self.number):
            in_place = len(each.q) == 1 and not self.has_local
            dq = take(self.dq, each.q) if in_place else empty_tokens(self.dq, length(each.q))
            dk, dv = into or [empty_tokens(x, length(each.k)) for x in (keys, values)]
            self.plan.kernel.backward(
                take(self.dout, each.q),
                take(self.q, each.q),
                take(keys, each.k),
                take(values, each.k),
                take(self.out, each.q),
                take(self.lse, each.q, -1),
                each.call,
                into=(dq, dk, dv),
            )
            if not in_place and not self.has_local:
                put_(self.dq, each.q, dq)
        if self.has_local:
            rows = zip(each.q, side_by_side(each.q), strict=True)
            self.late_dq += [(take(self.dq, (row,)), take(dq, (here,))) for row, here in rows]
            if not self.late:
                self._add_dq()
        return dk, dv

    def _add_dq(self) -> None:
        with phase("comp_merge", self.number):
            for total, part in self.late_dq:
                whole = ((0, tokens(total)),)
                sum_parts(total, [(total, whole), (part, whole)])
        self.late_dq = []

    def finish(self) -> None:
        """Wait for the dk and dv that remote ranks computed for this rank's keys, and add up all parts."""
        if self.late_dq:
            self._add_dq()
        arrived = self.home.arrived()
        totals, computed = (self.dk, self.dv), self.home.computed
        parts: list[tuple[Sequence[Tensor], Intervals]] = []
        with phase("comp_merge", self.number):
            if len(self.moving.local) > FEW:
                here, place = (tuple(x[end] for x in self.moving.local) for end in (0, 1))
                parts.append(([take(x, place) for x in computed], here))
            else:
                parts += [([take(x, (b,)) for x in computed], (a,)) for a, b in self.moving.local]
            parts += arrived
            if self.has_local:
                parts.append((totals, ((0, tokens(self.dk)),)))
            sum_all(totals, parts)
