"""Calls under a mask's pattern. A kernel that takes no patterns gets a few packed calls for the pattern's rectangles; their
results are merged by their LSE. The backward takes each packed call's gradients with the final out and lse, and sums them.
Time and memory are linear in the rectangles: there is no matrix of all pairs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from attention.errors import UnsupportedCall
from attention.geometry.intervals import joined, length
from attention.kernels.decompose import CallPart, by_parts
from attention.kernels.interface import Call, Into, Kernel, Pair, Shape, Tensors, Triple, Wrapped, lacks
from attention.masks.pattern import Entry, Pattern

ALONE = 4096  # keys from which a query interval is a call of its own, for which no keys are copied
MOST_GATHERED = 1 << 17  # keys of one call that are copied side by side, where queries see several intervals


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
        return pattern.keep(key, lambda: self.kernel.refuses_pattern(self.shape, pattern, call.deterministic))

    def check(self, call: Call) -> None:
        """Raises UnsupportedCall for a pattern that the kernel cannot do."""
        if call.pattern is None or not (own := self.why_rectangles(call)):
            return
        for packed in call.pattern.rounds:
            if reason := lacks(self, self.shape) or self.refuses(self.shape, packed.band):
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
        return _computed(self.kernel.forward, tensors, call, into)  # type: ignore[no-any-return]

    def gradients(self, tensors: Tensors, call: Call, into: Into = None) -> Triple:
        return _computed(self.kernel.backward, tensors, call, into)  # type: ignore[no-any-return]


def _computed(compute: Callable[..., Any], tensors: Tensors, call: Call, into: Any) -> Any:
    """By the packed calls of the pattern. One call that has all tokens of a single batch element takes them, and `into`, as they
    are."""
    parts, pattern = _parts(call, tensors[0]), call.pattern
    assert pattern is not None
    whole = ((0, pattern.n_q),), ((0, pattern.n_k),)
    if len(tensors[0]) > 1 or len(parts) > 1 or parts[0].overlapping or parts[0][:2] != whole:
        return by_parts(partial(_packed, compute), tensors, parts, into)
    results = compute(*(x[0] for x in tensors), parts[0].call, into and tuple(x[0] for x in into))
    return into or tuple(x[None] for x in results)


def _packed(compute: Callable[..., Any], tensors: Tensors, call: Call) -> list[Tensor]:
    """`compute`, which takes a packed batch, of the same tokens of each batch element: `[B, n, H, D]` as `[B * n, H, D]`, an LSE
    `[B, H, n]` as `[H, B * n]`."""
    batch = len(tensors[0])
    packed = [x.flatten(0, 1) if x.dim() == 4 else x.transpose(0, 1).flatten(1, 2) for x in tensors]
    results = compute(*packed, call)
    return [
        x.unflatten(0, (batch, -1)) if x.dim() == 3 else x.unflatten(1, (batch, -1)).transpose(0, 1) for x in results
    ]


def _parts(call: Call, x: Tensor) -> tuple[CallPart, ...]:
    """The packed calls of a pattern, kept with it. x: of the queries."""
    pattern = call.pattern
    assert pattern is not None and pattern.n_q == x.shape[1]
    key = (call.scale, call.softcap, call.deterministic, x.device, x.shape[0])
    return pattern.keep(key, lambda: tuple(_built(call, pattern, x.shape[0], x.device)))


def _built(call: Call, pattern: Pattern, batch: int, device: torch.device) -> Iterator[CallPart]:
    for packed in pattern.rounds:
        for entries in _limited(packed.entries):
            q, keys = zip(*entries, strict=True)
            k = tuple(interval for intervals in keys for interval in intervals)
            k_lengths = [length(intervals) for intervals in keys]
            overlapping = any(a[1] > b[0] for a, b in pairwise(sorted(k)))
            made = call.of_packed(packed.band, [b - a for a, b in q] * batch, k_lengths * batch, device)
            yield CallPart(joined(q), k if overlapping else joined(k), made, overlapping)


def _limited(entries: tuple[Entry, ...]) -> Iterator[list[Entry]]:
    """Entries in groups whose keys may be copied side by side. One with many keys in one interval is a group of its own,
    unless the entries' keys are beside each other, which need no copy."""
    if all(len(keys) == 1 for _, keys in entries) and len(joined(keys[0] for _, keys in entries)) == 1:
        yield list(entries)
        return
    group: list[Entry] = []
    copied = 0
    for entry in entries:
        n = length(entry[1])
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
