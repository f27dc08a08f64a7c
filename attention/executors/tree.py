"""The tree executor (decode): every rank attends its local KV, and the partial results are reduced over the ranks.
Forward only. A rank whose keys no query sees contributes out 0 and lse -inf.

Phases: comp_shard_kv, comp_local_attention, comp_num_den, comp_final_output, and by reduction comm_max_lse,
comm_sum_den, comm_sum_num, comm_sum_num_den, comm_partials, each with its wait_*;
`reduce=fused` has only wait_partials."""

from __future__ import annotations

import torch
from torch import Tensor

from attention.dtypes import accumulation_dtype
from attention.executors.plan import LocalCall, Plan
from attention.geometry.mailbox import Mailbox, pieces, received_bytes
from attention.kernels.interface import Pair
from attention.profiling import phase
from attention.reduction.parts import empty_result, merge_n
from attention.reduction.sinks import with_sinks
from attention.tensors import empty_lse, result_like, take
from attention.transports import mailboxes

Saved = tuple[Tensor, ...]


def forward(q: Tensor, k: Tensor, v: Tensor, plan: Plan, sinks: Tensor | None = None) -> tuple[Tensor, Tensor, Saved]:
    """(out, lse, an empty tuple). q: `[B, Sq, H, D]`, the same on every rank; k `[B, N, Hk, D]`, v `[B, N, Hk, Dv]`: this rank's
    shards. sinks: `[H]`, applied once, after the reduction."""
    like = result_like(q, v)
    if not q.numel():
        return *empty_result(like), ()
    reduce = plan.options.reduce if plan.transport.name != "none" else None
    # the queries that see some of this rank's keys, and these keys
    call = next((call for step in plan.steps for call in step.calls), None)
    with phase("comp_shard_kv"):
        keys, values = (take(x, call.k) if call else x for x in (k, v))
    with phase("comp_local_attention"):
        if reduce == "fused":
            parts, lses = _splits(q, keys, values, call, plan)
        else:
            out, lse = _local(q, keys, values, call, plan, _partial(like) if reduce else None)
    if reduce == "fused":
        out, lse = exchanged(parts, lses, like, plan)
    elif reduce == "packed":
        out, lse = packed(out, lse, plan)
    elif reduce:
        out, lse = reduced(out, lse, plan, together=reduce == "two")
    out, lse = with_sinks(out, lse, sinks)
    return out.to(q.dtype), lse, ()


def backward(dout: Tensor, saved: Saved, plan: Plan) -> tuple[Tensor, ...]:
    raise NotImplementedError("a decode has no backward")


def _partial(like: Tensor) -> Pair:
    """Uninitialised (out, lse) for a partial result; out has the shape of `like` and the accumulation dtype, because it is
    merged before it is rounded."""
    return torch.empty(like.shape, dtype=accumulation_dtype(like.dtype), device=like.device), empty_lse(like)


def _local(q: Tensor, k: Tensor, v: Tensor, call: LocalCall | None, plan: Plan, into: Pair | None) -> Pair:
    """(out, lse) of these keys, written to `into` if every query sees some; else in the accumulation dtype."""
    if call is not None and call.q == ((0, q.shape[1]),):
        return plan.kernel.forward(q, k, v, call.call, into)
    out, lse = empty_result(result_like(q, v))
    if call is not None:
        plan.kernel.forward(take(q, call.q), k, v, call.call, (take(out, call.q), take(lse, call.q, -1)))
    return out, lse


def _splits(q: Tensor, k: Tensor, v: Tensor, call: LocalCall | None, plan: Plan) -> Pair:
    """This rank's partial results `[n, B, Sq, H, Dv]` and their LSEs `[n, B, H, Sq]`: the kernel's splits of the keys,
    or one if the kernel does not split."""
    splits = getattr(plan.kernel, "splits", None)
    if splits is not None and call is not None and call.q == ((0, q.shape[1]),):
        parts, lses = splits(q, k, v, call.call)
    else:
        parts, lses = (x[None] for x in _local(q, k, v, call, plan, _partial(result_like(q, v))))
    return parts, lses


def _weights(lse: Tensor) -> Tensor:
    """`[B, H, Sq]` as `[B, Sq, H, 1]`."""
    return lse.transpose(1, 2).unsqueeze(-1)


def packed(out: Tensor, lse: Tensor, plan: Plan) -> Pair:
    """One all-gather of `[out, lse]`, merged by every rank."""
    with phase("comp_num_den"):
        mine = torch.cat([out, _weights(lse)], -1)
        everyone = mine.new_empty((plan.problem.world, *mine.shape))
    plan.transport.all_gather(everyone, mine, "partials", 0).wait()
    with phase("comp_final_output"):
        return merge_n(everyone[..., :-1], everyone[..., -1].transpose(2, 3))


def reduced(out: Tensor, lse: Tensor, plan: Plan, together: bool) -> Pair:
    """As in the paper: all-reduce the maximum, the denominators, the numerators; `together` the last two in one tensor."""
    top = lse.clone()
    plan.transport.all_reduce(top, "max", "max_lse", 0).wait()
    with phase("comp_num_den"):
        top.masked_fill_(top == -torch.inf, 0)
        den = (lse - top).exp()
        weight = _weights(den)
        num = torch.cat([out * weight, weight], -1) if together else (out * weight).contiguous()
    if together:
        plan.transport.all_reduce(num, "sum", "sum_num_den", 1).wait()
        num, den = num[..., :-1], num[..., -1].transpose(1, 2)
    else:
        plan.transport.all_reduce(den, "sum", "sum_den", 1).wait()
        plan.transport.all_reduce(num, "sum", "sum_num", 2).wait()
    with phase("comp_final_output"):
        weight = _weights(den)
        return num / weight.masked_fill(weight == 0, 1), top + den.log()


def exchanged(parts: Tensor, lses: Tensor, like: Tensor, plan: Plan) -> Pair:
    """reduce=fused: one kernel merges this rank's splits, writes the result into every remote rank's memory, waits for
    theirs and merges them. The whole kernel is recorded as `wait_partials`: most of its few microseconds are waiting.
    like: has the shape and dtype of out."""
    rows, head_dim, world = like.shape[:3].numel(), like.shape[3], plan.problem.world
    plan.transport.counted("partials", received_bytes(world, rows, head_dim))
    if like.is_meta:  # without data there is nothing to write to; the memory is as large
        like.new_empty(Mailbox.holding(world, pieces(rows, head_dim)).numel, dtype=torch.float32)
        return _partial(like)
    boxes = mailboxes(plan.transport, pieces(rows, head_dim), like.device)
    from attention.ops.tree import exchange

    with phase("wait_partials"):
        return exchange(parts, lses, boxes.addresses, boxes.box, plan.rank, like)
