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
from attention.kernels import Kernel
from attention.profiling import phase
from attention.reduction.lse_merge import empty_result, merge_n
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
    reduced = plan.transport.name != "none"
    fused = reduced and plan.options.reduce == "fused"
    call = _local_call(plan)
    with phase("comp_shard_kv"):
        keys, values = (take(x, call.k) if call else x for x in (k, v))
    with phase("comp_local_attention"):
        if fused:
            parts, lses = _splits(q, keys, values, call, plan.kernel)
        elif call is None:
            out, lse = empty_result(like)
        elif _all_queries(call, q):
            into = _partial(like) if reduced else None
            out, lse = plan.kernel.forward(q, keys, values, call.call, into=into)
        else:
            out, lse = _some_queries(q, keys, values, call, plan.kernel)
    if fused:
        out, lse = exchanged(parts, lses, like, plan)
    elif reduced:
        out, lse = REDUCTIONS[plan.options.reduce](out, lse, plan)
    out, lse = with_sinks(out, lse, sinks)
    return out.to(q.dtype), lse, ()


def _partial(like: Tensor) -> tuple[Tensor, Tensor]:
    """Uninitialised (out, lse) for a partial result; out has the shape of `like` and the accumulation dtype, because it is
    merged before it is rounded."""
    out = torch.empty(like.shape, dtype=accumulation_dtype(like.dtype), device=like.device)
    return out, empty_lse(like)


def _local_call(plan: Plan) -> LocalCall | None:
    """The queries that see some of this rank's keys, and these keys; None if there are none."""
    return plan.steps[0].calls[0] if plan.steps and plan.steps[0].calls else None


def _all_queries(call: LocalCall, q: Tensor) -> bool:
    return call.q == ((0, q.shape[1]),)


def _some_queries(q: Tensor, k: Tensor, v: Tensor, call: LocalCall, kernel: Kernel) -> tuple[Tensor, Tensor]:
    """(out, lse) in the accumulation dtype, for a call in which some queries see no key."""
    out, lse = empty_result(result_like(q, v))
    kernel.forward(take(q, call.q), k, v, call.call, into=(take(out, call.q), take(lse, call.q, -1)))
    return out, lse


def _splits(q: Tensor, k: Tensor, v: Tensor, call: LocalCall | None, kernel: Kernel) -> tuple[Tensor, Tensor]:
    """This rank's partial results `[n, B, Sq, H, Dv]` and their LSEs `[n, B, H, Sq]`: the kernel's splits of the keys,
    or one if the kernel does not split; n = 0 without keys."""
    if call is None:
        out, lse = _partial(result_like(q, v))
        return out[None][:0], lse[None][:0]
    if not _all_queries(call, q):
        out, lse = _some_queries(q, k, v, call, kernel)
        return out[None], lse[None]
    splits = getattr(kernel, "splits", None)
    if splits is not None:
        parts, lses = splits(q, k, v, call.call)
        return parts, lses
    out, lse = kernel.forward(q, k, v, call.call, into=_partial(result_like(q, v)))
    return out[None], lse[None]


def backward(dout: Tensor, saved: Saved, plan: Plan) -> tuple[Tensor, ...]:
    raise NotImplementedError("a decode has no backward")


def _weights(lse: Tensor) -> Tensor:
    """`[B, H, Sq]` as `[B, Sq, H, 1]`."""
    return lse.transpose(1, 2).unsqueeze(-1)


def _share(lse: Tensor, plan: Plan) -> tuple[Tensor, Tensor]:
    """(the maximum of lse over the ranks, this rank's softmax denominator relative to it)."""
    top = lse.clone()
    plan.transport.all_reduce(top, "max", "max_lse", 0).wait()
    with phase("comp_num_den"):
        safe = torch.where(top == -torch.inf, torch.zeros_like(top), top)
        return safe, (lse - safe).exp()


def _final(num: Tensor, den: Tensor, top: Tensor) -> tuple[Tensor, Tensor]:
    with phase("comp_final_output"):
        weight = _weights(den)
        out = num / torch.where(weight == 0, torch.ones_like(weight), weight)
        return out, top + den.log()


def three(out: Tensor, lse: Tensor, plan: Plan) -> tuple[Tensor, Tensor]:
    """As in the paper: all-reduce the maximum, the denominators, the numerators."""
    top, den = _share(lse, plan)
    with phase("comp_num_den"):
        num = (out * _weights(den)).contiguous()
    summing = plan.transport.all_reduce(den, "sum", "sum_den", 1)
    summing.wait()
    plan.transport.all_reduce(num, "sum", "sum_num", 2).wait()
    return _final(num, den, top)


def two(out: Tensor, lse: Tensor, plan: Plan) -> tuple[Tensor, Tensor]:
    """All-reduce the maximum, then numerators and denominators in one tensor."""
    top, den = _share(lse, plan)
    with phase("comp_num_den"):
        weight = _weights(den)
        both = torch.cat([out * weight, weight], -1)
    plan.transport.all_reduce(both, "sum", "sum_num_den", 1).wait()
    return _final(both[..., :-1], both[..., -1].transpose(1, 2), top)


def packed(out: Tensor, lse: Tensor, plan: Plan) -> tuple[Tensor, Tensor]:
    """One all-gather of `[out, lse]`, merged by every rank."""
    with phase("comp_num_den"):
        mine = torch.cat([out, _weights(lse)], -1)
        everyone = mine.new_empty((plan.problem.world, *mine.shape))
    plan.transport.all_gather(everyone, mine, "partials", 0).wait()
    with phase("comp_final_output"):
        return merge_n(everyone[..., :-1], everyone[..., -1].transpose(2, 3))


def exchanged(parts: Tensor, lses: Tensor, like: Tensor, plan: Plan) -> tuple[Tensor, Tensor]:
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


REDUCTIONS = {"three": three, "two": two, "packed": packed}  # of merged splits
