"""Calls made of smaller ones: results over the same queries are merged by their LSEs, gradients are summed. The backward takes
each part's gradients with the final out and lse, so they add up to the exact gradients of the whole.

A kernel that does one dense rectangle only (full, causal and square, or with a small explicit mask) gets packed batches
sequence by sequence, a rectangular causal mask as a full and a square part, and windows in chunks of queries."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import groupby, islice
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from attention.masks.band import CAUSAL, FULL, Band, Interval, Intervals, tile
from attention.reduction.grad_sum import OverlappingSum
from attention.reduction.parts import Accumulator, Sum
from attention.tensors import TOKENS, empty_lse, empty_tokens, result_like, take, tokens

if TYPE_CHECKING:
    from attention.kernels.interface import Call

WINDOW_CHUNK = 512  # queries per part of a window, whose explicit mask is [512, 512 + window]

Tensors = Sequence[Tensor]  # q, k, v of a forward; dout, q, k, v, out, lse of a backward
Compute = Callable[..., Any]


class CallPart(NamedTuple):
    q: Intervals
    k: Intervals
    call: Call
    overlapping: bool = False  # whether a key occurs twice

    def of(self, tensors: Tensors) -> list[Tensor]:
        sides = "qkk" if len(tensors) == 3 else "qqkkql"  # l: the lse of queries
        return [
            take(x, self.k if y == "k" else self.q, -1 if y == "l" else TOKENS)
            for x, y in zip(tensors, sides, strict=True)
        ]


def by_parts(compute: Compute, tensors: Tensors, parts: Sequence[CallPart], into: Any) -> Any:
    """The results of a forward or a backward, `compute`, from those of its parts. Queries without a part have out 0 and lse
    -inf, and gradients without one are 0."""
    if tensors[0].dim() == 3:
        return batch_of_one(partial(by_parts, compute), tensors, parts, into)
    rows, keys = [part.q for part in parts], [part.k for part in parts]
    q, k, v = tensors if len(tensors) == 3 else tensors[1:4]
    totals: list[Sum | OverlappingSum]
    if len(tensors) == 3:
        totals = [Accumulator(result_like(q, v), rows, into)]
    elif any(part.overlapping for part in parts):
        totals = [Sum([q], rows, into and into[:1]), OverlappingSum([k, v], keys, parts[0].call.deterministic)]
    else:
        totals = [Sum([q], rows, into and into[:1]), Sum([k, v], keys, into and into[1:])]
    for part in parts:
        results = iter(compute(part.of(tensors), part.call))
        for total in totals:
            total.add(*islice(results, len(total.dims)))
    return tuple(x for total in totals for x in total.result())


def by_element(forward: Compute, tensors: Tensors, call: Call, into: Any) -> Any:
    """(out, lse) of batch elements with different numbers of keys, by a `forward` that takes one number for all: a call for each
    element, or for neighbours of equal length. `call.lengths` are on the CPU."""
    q, k, v = tensors
    out, lse = into or (empty_tokens(result_like(q, v), tokens(q)), empty_lse(q))
    lengths, first, total = call.lengths  # type: ignore[misc]
    n, stop = tokens(q), 0
    for length, equal in groupby(lengths.tolist()):
        start, stop = stop, stop + len(list(equal))
        end, parts = min(max(length, 0), total), []
        piece = tile(call.mask, (end - n, end), (first, min(first + tokens(k), end)))
        if piece:
            (a, b), (c, d), band = piece
            parts = [CallPart(((a - end + n, b - end + n),), ((c - first, d - first),), call.under(band))]
        by_parts(forward, [x[start:stop] for x in tensors], parts, (out[start:stop], lse[start:stop]))
    return out, lse


def batch_of_one(compute: Compute, tensors: Tensors, how: Any, into: Any) -> Any:
    """`compute`, which takes tensors with a batch dim, of tensors without."""
    results = compute([x[None] for x in tensors], how, into and tuple(x[None] for x in into))
    return into or tuple(x[0] for x in results)


def rectangles_of(call: Call, sq: int, sk: int) -> list[CallPart]:
    """The parts of a call, each full, causal and square, or a band over a small rectangle."""
    parts, q, k = [], 0, 0
    for n_q, n_k in call.sequences(sq, sk):
        for rows, keys, mask in cut(call.mask, (q, q + n_q), (k, k + n_k)):
            parts.append(CallPart((rows,), (keys,), call.under(mask)))
        q, k = q + n_q, k + n_k
    return parts


def cut(mask: Band, q: Interval, k: Interval) -> Iterator[tuple[Interval, Interval, Band]]:
    """Disjoint rectangles (queries, keys, mask) that cover the pairs of the mask between queries and keys of one sequence."""
    (a, b), (c, d) = q, k
    square = min(b - a, d - c)
    if mask.windowed:
        chunk, shift = min(WINDOW_CHUNK, d - c), d - b
        for start in range(a, b, chunk or 1):
            piece = tile(mask, (start + shift, min(start + chunk, b) + shift), k)
            if piece:
                (i, j), keys, band = piece
                rows = i - shift, j - shift
                # a window, cut to a chunk, may be full or causal
                yield from [(rows, keys, band)] if band.windowed else cut(band, rows, keys)
    elif mask.full and square:
        yield q, k, FULL
    elif square:
        if square < d - c:
            yield q, (c, d - square), FULL
        yield (b - square, b), (d - square, d), CAUSAL


def band_matrix(mask: Band, sq: int, sk: int, device: torch.device) -> Tensor:
    """The mask as a boolean `[sq, sk]`, for small rectangles and tests."""
    keep, shift = torch.ones(sq, sk, dtype=torch.bool, device=device), sk - sq
    if mask.left >= 0:
        keep = keep.triu(shift - mask.left)
    return keep.tril(shift + mask.right) if mask.right >= 0 else keep
