"""Calls under a mask's pattern. A kernel that takes no patterns gets a few packed calls for the pattern's rectangles; their
results are merged by their LSE. The backward takes each packed call's gradients with the final out and lse, and sums them.
Time and memory are linear in the rectangles: there is no matrix of all pairs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from attention.dtypes import accumulation_dtype
from attention.errors import UnsupportedCall
from attention.geometry.intervals import joined
from attention.kernels.interface import Call, Into, Kernel, Pair, Shape, Tensors, Triple, Wrapped, lacks
from attention.masks.band import Intervals
from attention.masks.pattern import Entry, Pattern
from attention.reduction.stepwise import Accumulator, Sum
from attention.tensors import add_, result_like, take, token_indices

ALONE = 4096  # keys from which a query interval is a call of its own, for which no keys are copied
MOST_GATHERED = 1 << 17  # keys of one call that are copied side by side, where queries see several intervals


@dataclass(frozen=True)
class PatternCall:
    """One packed call of a pattern, with its queries and its keys. Sequences of the call may share keys."""

    q: Intervals
    k: Intervals
    call: Call
    overlapping: bool  # whether a key occurs twice


class ForPatterns(Wrapped):
    """A kernel for calls under patterns. A kernel that takes patterns (it has tile lists, or intervals of each query)
    computes those that it can by itself; all others are computed by its packed calls.

    shape: of the calls. Raises ValueError in `check` for a pattern that the kernel can do in neither way."""

    writes = True

    def __init__(self, kernel: Kernel, shape: Shape):
        super().__init__(kernel)
        self.shape = replace(shape, packed=True)

    def why_rectangles(self, call: Call) -> str | None:
        """Why the kernel itself does not do the call's pattern, or None; kept with the pattern."""
        pattern = call.pattern
        if pattern is None:
            return None
        key = ("why rectangles", self.name, call.deterministic, self.shape)
        if key not in pattern.kept:
            pattern.kept[key] = self.kernel.refuses_pattern(self.shape, pattern, call.deterministic)
        reason: str | None = pattern.kept[key]
        return reason

    def check(self, call: Call) -> None:
        """Raises UnsupportedCall for a pattern that the kernel cannot do."""
        if call.pattern is None or not (own := self.why_rectangles(call)):
            return
        for each in call.pattern.rounds:
            if reason := lacks(self, self.shape) or self.refuses(self.shape, each.band):
                raise UnsupportedCall(
                    f"kernel={self.name}: {own}; nor by packed calls: {reason}; kernel=auto takes one that can"
                )

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: Call, into: Pair | None = None) -> Pair:
        if self.why_rectangles(call):
            return super().forward(q, k, v, call, into)
        return self.kernel.forward(q, k, v, call, into)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: Call, into: Into = None
    ) -> Triple:
        if self.why_rectangles(call):
            return super().backward(dout, q, k, v, out, lse, call, into)
        return self.kernel.backward(dout, q, k, v, out, lse, call, into)

    def attend(self, tensors: Tensors, call: Call, into: Pair | None = None) -> Pair:
        q, k, v = tensors
        parts = _parts(call, q)
        total = Accumulator(result_like(q, v), [part.q for part in parts], into)
        for part in parts:
            out, lse = self.kernel.forward(_side(q, part.q), _side(k, part.k), _side(v, part.k), part.call)
            total.add(_batched(out, q), _batched_lse(lse, q))
        return total.result()

    def gradients(self, tensors: Tensors, call: Call, into: Into = None) -> Triple:
        dout, q, k, v, out, lse = tensors
        parts = _parts(call, q)
        queries = Sum([q], [part.q for part in parts], into and into[:1])
        overlapping = any(part.overlapping for part in parts)
        keys = Overlapping(k, v, call.deterministic) if overlapping else Sum([k, v], [part.k for part in parts])
        for part in parts:
            dq, dk, dv = self.kernel.backward(
                _side(dout, part.q),
                _side(q, part.q),
                _side(k, part.k),
                _side(v, part.k),
                _side(out, part.q),
                _side_lse(lse, part.q),
                part.call,
            )
            queries.add(_batched(dq, q))
            if isinstance(keys, Overlapping):
                keys.add(part.k, _batched(dk, q), _batched(dv, q))
            else:
                keys.add(_batched(dk, q), _batched(dv, q))
        (dq,), (dk, dv) = queries.result(), keys.result()
        return dq, dk, dv


class Overlapping:
    """The sums of dk and dv over calls of which one may have a key several times, in the accumulation dtype."""

    def __init__(self, k: Tensor, v: Tensor, deterministic: bool):
        self.like = k, v
        self.deterministic = deterministic and k.is_cuda  # where index_add_ adds in any order
        self.totals = [torch.zeros(x.shape, dtype=accumulation_dtype(x.dtype), device=x.device) for x in (k, v)]

    def add(self, intervals: Intervals, dk: Tensor, dv: Tensor) -> None:
        for total, part in zip(self.totals, (dk, dv), strict=True):
            if self.deterministic:
                at = token_indices(intervals, total.device)
                total.transpose(0, 1).index_put_((at,), part.transpose(0, 1).to(total.dtype), accumulate=True)
            else:
                add_(total, intervals, part)

    def result(self) -> tuple[Tensor, Tensor]:
        dk, dv = (total.to(x.dtype) for total, x in zip(self.totals, self.like, strict=True))
        return dk, dv


def _parts(call: Call, q: Tensor) -> tuple[PatternCall, ...]:
    """The packed calls of a pattern, kept with it."""
    pattern = call.pattern
    assert pattern is not None and pattern.n_q == q.shape[1]
    key = (call.scale, call.softcap, call.deterministic, q.device, q.shape[0])
    if key not in pattern.kept:
        pattern.kept[key] = tuple(_built(call, pattern, q.shape[0], q.device))
    found: tuple[PatternCall, ...] = pattern.kept[key]
    return found


def _built(call: Call, pattern: Pattern, batch: int, device: torch.device) -> Iterator[PatternCall]:
    for each in pattern.rounds:
        for entries in _limited(each.entries):
            q = tuple(rows for rows, _ in entries)
            k = tuple(interval for _, keys in entries for interval in keys)
            q_lengths = [b - a for a, b in q] * batch
            k_lengths = [sum(b - a for a, b in keys) for _, keys in entries] * batch
            packed = call.of_packed(each.band, q_lengths, k_lengths, device)
            ends = sorted(k)
            overlapping = any(a[1] > b[0] for a, b in pairwise(ends))
            yield PatternCall(joined(q), k if overlapping else joined(k), packed, overlapping)


def _limited(entries: tuple[Entry, ...]) -> Iterator[list[Entry]]:
    """Entries in groups whose keys may be copied side by side. One with many keys in one interval is a group of its own,
    unless the entries' keys are beside each other, which need no copy."""
    if all(len(keys) == 1 for _, keys in entries) and len(joined(keys[0] for _, keys in entries)) == 1:
        yield list(entries)
        return
    group: list[Entry] = []
    copied = 0
    for entry in entries:
        n = sum(b - a for a, b in entry[1])
        if n >= ALONE and len(entry[1]) == 1:
            yield [entry]
            continue
        if group and copied + n > MOST_GATHERED:
            yield group
            group, copied = [], 0
        group.append(entry)
        copied += n
    if group:
        yield group


def _side(x: Tensor, intervals: Intervals) -> Tensor:
    """The tokens of a `[B, S, H, D]` as a packed `[B * n, H, D]`."""
    return take(x, intervals).flatten(0, 1)


def _side_lse(lse: Tensor, intervals: Intervals) -> Tensor:
    """The tokens of an LSE `[B, H, S]` as a packed `[H, B * n]`."""
    return take(lse, intervals, -1).transpose(0, 1).flatten(1, 2)


def _batched(x: Tensor, like: Tensor) -> Tensor:
    return x.unflatten(0, (like.shape[0], -1))


def _batched_lse(lse: Tensor, like: Tensor) -> Tensor:
    return lse.unflatten(1, (like.shape[0], -1)).transpose(0, 1)
