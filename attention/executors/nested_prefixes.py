"""Kernel calls for a rank's query chunks, which attend nested prefixes of the same keys: `separate` (one call for each
chunk), `packed` (one varlen call for all) or `fused` (our Triton kernel, which reads each KV tile once)."""

from __future__ import annotations

import torch
from torch import Tensor

from attention.errors import UnsupportedCall
from attention.executors.plan import LocalCall, Plan
from attention.geometry.options import GatherOptions, Options
from attention.kernels import KERNELS, Shape, refusal
from attention.kernels.interface import Pair
from attention.masks.band import FULL, Intervals
from attention.tensors import take

Calls = tuple[LocalCall, ...]


def together(calls: Calls, plan: Plan) -> list[Calls]:
    """The calls of a step's forward, over disjoint queries, in tuples of those that are computed as one."""
    separate = not plan.gathers or len(plan.steps) > 1 or plan.options.grouping == "separate"
    return [(x,) for x in calls] if separate or len({x.call.mask for x in calls}) != 1 else [calls]


def forward(q: Tensor, keys: Tensor, values: Tensor, calls: Calls, plan: Plan) -> Pair:
    """(out, lse) of several calls as one: of their queries side by side."""
    run = _packed if plan.options.grouping == "packed" else _fused
    return run(q, keys, values, calls, plan)


def _rows(calls: Calls) -> Intervals:
    return tuple(x for call in calls for x in call.q)


def _packed(q: Tensor, keys: Tensor, values: Tensor, calls: Calls, plan: Plan) -> Pair:
    """One varlen call. A key is copied once for each chunk that sees it."""
    batch, like = q.shape[:-3], calls[0].call
    columns = tuple(x for call in calls for x in call.k)
    q, keys, values = take(q, _rows(calls)), take(keys, columns), take(values, columns)
    if batch:
        q, keys, values = (x.flatten(0, 1) for x in (q, keys, values))
        q_lengths, k_lengths = ([b - a for a, b in x] * batch[0] for x in (_rows(calls), columns))
    else:
        q_lengths = [n for call in calls for n in call.call.q_lengths or ()]
        k_lengths = [n for call in calls for n in call.call.k_lengths or ()]
    out, lse = plan.kernel.forward(q, keys, values, like.of_packed(like.mask, q_lengths, k_lengths, q.device))
    if batch:
        return out.unflatten(0, (batch[0], -1)), lse.unflatten(1, (batch[0], -1)).transpose(0, 1)
    return out, lse


def _fused(q: Tensor, keys: Tensor, values: Tensor, calls: Calls, plan: Plan) -> Pair:
    from attention.kernels.triton_grouped import grouped_forward

    if q.dim() == 4:
        return grouped_forward(take(q, _rows(calls)), keys, values, [call.k[0][1] for call in calls], plan.scale)
    # by sequence: the queries of each chunk, and the keys that the last chunk sees, which are those of all
    queries = zip(*(take(q, x.q).split(x.call.q_lengths) for x in calls), strict=True)
    pairs = zip(*(take(x, calls[-1].k).split(calls[-1].call.k_lengths) for x in (keys, values)), strict=True)
    ends = zip(*(x.call.k_lengths for x in calls), strict=True)
    results = []
    for chunks, (k, v), prefixes in zip(queries, pairs, ends, strict=True):
        out, lse = grouped_forward(torch.cat(chunks)[None], k[None], v[None], prefixes, plan.scale)
        sizes = [len(x) for x in chunks]
        results.append(list(zip(out[0].split(sizes), lse[0].split(sizes, -1), strict=True)))
    outs, lses = zip(*(part for chunk in zip(*results, strict=True) for part in chunk), strict=True)
    return torch.cat(outs), torch.cat(lses, -1)


def check(options: Options, shape: Shape) -> None:
    """Raises UnsupportedCall when grouping=fused cannot run here or for this shape."""
    if not isinstance(options, GatherOptions) or options.grouping != "fused":
        return
    reason = refusal(KERNELS["triton"], shape, FULL)
    if reason is not None:
        raise UnsupportedCall(f"grouping=fused: {reason}; take grouping=separate")
