"""Finds two rectangles that share a pair. Only those that meet along one axis are compared, on the axis where fewer
meet, so that disjoint queries or disjoint keys cost a sort."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from attention.masks.rectangles import K0, K1, LO, Q0, Q1, Rectangles, has_pairs, trimmed

COMPARED = 1 << 20  # pairs of rectangles at a time
Rows = NDArray[np.int64]


def sharing(x: Rectangles) -> tuple[int, int] | None:
    """The numbers of two rectangles that share a (query, key) pair, or None."""
    numbers = np.flatnonzero(has_pairs(x))
    x = trimmed(x[numbers])
    by_queries, by_keys = _sorted(x, Q0, Q1), _sorted(x, K0, K1)
    order, many = by_queries if by_queries[1].sum() <= by_keys[1].sum() else by_keys
    x, numbers = x[order], numbers[order]
    for first, second in _meetings(many):
        cut = _cut(x[first], x[second])
        found = np.flatnonzero(has_pairs(cut))
        if len(found):
            return int(numbers[first[found[0]]]), int(numbers[second[found[0]]])
    return None


def _sorted(x: Rectangles, low: int, high: int) -> tuple[Rows, Rows]:
    """The order by where rectangles start on an axis, and for each in that order how many of the next ones start before
    it ends."""
    order = np.argsort(x[:, low], kind="stable")
    starts, stops = x[order, low], x[order, high]
    return order, np.searchsorted(starts, stops, "left") - np.arange(len(x)) - 1


def _meetings(many: Rows) -> Iterator[tuple[Rows, Rows]]:
    """The pairs of row numbers (i, j), i < j <= i + many[i], some at a time."""
    before = np.cumsum(many)
    start = 0
    while start < len(many):
        base = before[start] - many[start]
        stop = max(start + 1, int(np.searchsorted(before, base + COMPARED, "right")))
        some = many[start:stop]
        first = np.repeat(np.arange(start, stop), some)
        yield first, first + 1 + np.arange(len(first)) - np.repeat(np.cumsum(some) - some, some)
        start = stop


def _cut(a: Rectangles, b: Rectangles) -> Rectangles:
    """Row by row, what lies in both."""
    found = np.minimum(a, b)
    for column in (Q0, K0, LO):
        found[:, column] = np.maximum(a[:, column], b[:, column])
    return found
