"""Kernel calls for a rank's query chunks, which attend nested prefixes of the same keys: `separate` (one call for each
chunk), `packed` (one varlen call for all) or `fused` (our Triton kernel, which reads each KV tile once)."""

from __future__ import annotations

from torch import Tensor

from attention.errors import UnsupportedCall
from attention.executors.plan import LocalCall, Plan
from attention.geometry.options import GatherOptions, Options
from attention.kernels import KERNELS, Shape, refusal
from attention.kernels.interface import Pair
from attention.masks.band import FULL, Intervals
from attention.tensors import put_, take


def forward(q: Tensor, keys: Tensor, values: Tensor, calls: tuple[LocalCall, ...], plan: Plan, into: Pair) -> None:
    """All calls of a step, over disjoint queries; writes out and lse to `into`."""
    how = plan.options.grouping
    if how == "separate" or len(calls) < 2 or len({each.call.mask for each in calls}) > 1:
        _separate(q, keys, values, calls, plan, into)
    elif how == "packed":
        _packed(q, keys, values, calls, plan, into)
    else:
        _fused(q, keys, values, calls, plan, into)


def _put(into: Pair, rows: Intervals, out: Tensor, lse: Tensor) -> None:
    put_(into[0], rows, out)
    put_(into[1], rows, lse, -1)


def _separate(q: Tensor, keys: Tensor, values: Tensor, calls: tuple[LocalCall, ...], plan: Plan, into: Pair) -> None:
    for each in calls:
        qkv = (take(q, each.q), take(keys, each.k), take(values, each.k))
        if len(each.q) == 1:
            plan.kernel.forward(*qkv, each.call, into=(take(into[0], each.q), take(into[1], each.q, -1)))
        else:
            _put(into, each.q, *plan.kernel.forward(*qkv, each.call))


def _packed(q: Tensor, keys: Tensor, values: Tensor, calls: tuple[LocalCall, ...], plan: Plan, into: Pair) -> None:
    """One varlen call. A key is copied once for each chunk that sees it."""
    rows = tuple(interval for each in calls for interval in each.q)
    columns = tuple(interval for each in calls for interval in each.k)
    first = calls[0].call
    if q.dim() == 3:
        q_lengths = [n for each in calls for n in each.call.q_lengths or ()]
        k_lengths = [n for each in calls for n in each.call.k_lengths or ()]
        call = first.of_packed(first.mask, q_lengths, k_lengths, q.device)
        _put(into, rows, *plan.kernel.forward(take(q, rows), take(keys, columns), take(values, columns), call))
        return
    batch = q.shape[0]
    q_lengths = [b - a for a, b in rows] * batch
    k_lengths = [b - a for a, b in columns] * batch
    call = first.of_packed(first.mask, q_lengths, k_lengths, q.device)
    out, lse = plan.kernel.forward(
        take(q, rows).flatten(0, 1), take(keys, columns).flatten(0, 1), take(values, columns).flatten(0, 1), call
    )
    _put(into, rows, out.unflatten(0, (batch, -1)), lse.unflatten(1, (batch, -1)).transpose(0, 1))


def _fused(q: Tensor, keys: Tensor, values: Tensor, calls: tuple[LocalCall, ...], plan: Plan, into: Pair) -> None:
    from attention.kernels.triton_grouped import grouped_forward

    if q.dim() == 4:
        rows = tuple(interval for each in calls for interval in each.q)
        ends = [each.k[0][1] for each in calls]
        _put(into, rows, *grouped_forward(take(q, rows), keys, values, ends, plan.scale))
        return
    for chunks in zip(*(_by_sequence(each) for each in calls), strict=True):  # all chunks of one sequence
        rows = tuple(row for row, _ in chunks)
        start = chunks[0][1][0]
        ends = [stop - start for _, (_, stop) in chunks]
        prefix = ((start, start + max(ends)),)
        out, lse = grouped_forward(
            take(q, rows)[None], take(keys, prefix)[None], take(values, prefix)[None], ends, plan.scale
        )
        _put(into, rows, out[0], lse[0])


def _by_sequence(each: LocalCall) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """(queries, keys) of each sequence of a packed call, from intervals in which neighbours were joined."""
    return list(zip(_split(each.q, each.call.q_lengths or ()), _split(each.k, each.call.k_lengths or ()), strict=True))


def _split(intervals: Intervals, lengths: tuple[int, ...]) -> list[tuple[int, int]]:
    found = []
    pieces = list(intervals)
    for n in lengths:
        start, stop = pieces[0]
        found.append((start, start + n))
        pieces[0:1] = [(start + n, stop)] if start + n < stop else []
    return found


def check(options: Options, shape: Shape) -> None:
    """Raises UnsupportedCall when grouping=fused cannot run here or for this shape."""
    if not isinstance(options, GatherOptions) or options.grouping != "fused":
        return
    reason = refusal(KERNELS["triton"], shape, FULL)
    if reason is not None:
        raise UnsupportedCall(f"grouping=fused: {reason}; take grouping=separate")
