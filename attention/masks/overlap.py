"""Which rectangles of two lists overlap: for intersections, and for rectangles that share a pair. Memory is linear in the
rectangles and in those that overlap."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from attention.masks.rectangles import K0, K1, LO, Q0, Q1, Column, Rectangles, in_order, spread, trimmed

COMPARED = 1 << 17  # pairs of rectangles at a time


def both(a: Rectangles, b: Rectangles) -> Rectangles:
    """The intersection: the pairs that are in a and in b. Each two overlapping rectangles give their intersection."""
    if len(a) > len(b):
        a, b = b, a
    return in_order(np.concatenate([a[:0], *(_cut(a[i], b[j]) for i, j in overlaps(a, b))]))


def sharing(x: Rectangles) -> tuple[int, int] | None:
    """The numbers of two rectangles that share a (query, key) pair, or None."""
    for i, j in overlaps(x, x):
        i, j = i[i < j], j[i < j]
        for pair in zip(i.tolist(), j.tolist(), strict=True) if len(_cut(x[i], x[j])) else ():
            if len(_cut(*(x[[number]] for number in pair))):
                return pair
    return None


def overlaps(a: Rectangles, b: Rectangles) -> Iterator[tuple[Column, Column]]:
    """The numbers (row of a, row of b) of all rectangles that overlap, and of some that do not, bands aside; some at a time.

    The rows of b are taken by classes of alike size, each between two powers of two on both axes. A class lies in strips
    of queries as high as its highest rectangle, which reaches at most into the next strip; a strip is sorted by keys. So
    of the part of a strip that is compared with a row of a, most overlaps it."""
    keys = int(b[:, K1].max(initial=0))
    high, wide = (np.frexp(b[:, end] - b[:, start])[1] for start, end in ((Q0, Q1), (K0, K1)))
    for height, width in np.unique(np.stack([high, wide], 1), axis=0).tolist():
        rows = np.flatnonzero((high == height) & (wide == width))
        strips, strip = np.unique(b[rows, Q0] >> height, return_inverse=True)
        place = strip * keys + b[rows, K0]
        order = np.argsort(place, kind="stable")
        rows, place = rows[order], place[order]
        top, end = np.searchsorted(strips, (a[:, Q0] >> height) - 1), np.searchsorted(strips << height, a[:, Q1])
        left, right = np.maximum(a[:, K0] + 1 - (1 << width), 0), np.minimum(a[:, K1], keys)
        for row, at in _runs(top, end):
            low, stop = (np.searchsorted(place, at * keys + x[row]) for x in (left, right))
            for i, j in _runs(low, stop):
                yield row[i], rows[j]


def _runs(start: Column, stop: Column) -> Iterator[tuple[Column, Column]]:
    """All (i, j) with start[i] <= j < stop[i], some at a time."""
    many = np.maximum(stop - start, 0)
    upto = np.cumsum(many)
    first = 0
    while first < len(many):
        last = max(first + 1, int(np.searchsorted(upto, upto[first] - many[first] + COMPARED, "right")))
        i, number = spread(many[first:last])
        yield i + first, number + start[i + first]
        first = last


def _cut(a: Rectangles, b: Rectangles) -> Rectangles:
    """Row by row, what lies in both; rows that share no pair are left out."""
    x = np.minimum(a, b)
    for column in (Q0, K0, LO):
        x[:, column] = np.maximum(a[:, column], b[:, column])
    return trimmed(x)
