"""Which rectangles of two lists overlap: for intersections, and for rectangles that share a pair. Memory is linear in the
rectangles and in those that overlap."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from attention.masks.rectangles import K0, K1, LO, Q0, Q1, Rectangles, has_pairs, in_order, trimmed

COMPARED = 1 << 17  # pairs of rectangles at a time
Rows = NDArray[np.int64]


def both(a: Rectangles, b: Rectangles) -> Rectangles:
    """The intersection: the pairs that are in a and in b. Each two overlapping rectangles give their intersection."""
    if len(a) > len(b):
        a, b = b, a
    parts = [trimmed(cut[has_pairs(cut)]) for first, second in overlaps(a, b) for cut in [_cut(a[first], b[second])]]
    return in_order(np.concatenate([a[:0], *parts]))


def sharing(x: Rectangles) -> tuple[int, int] | None:
    """The numbers of two rectangles that share a (query, key) pair, or None."""
    for first, second in overlaps(x, x):
        other = first < second
        first, second = first[other], second[other]
        shared = np.flatnonzero(has_pairs(_cut(x[first], x[second])))
        if len(shared):
            return int(first[shared[0]]), int(second[shared[0]])
    return None


def overlaps(a: Rectangles, b: Rectangles) -> Iterator[tuple[Rows, Rows]]:
    """The numbers (row of a, row of b) of all rectangles that overlap, bands aside; some at a time.

    The rows of b are taken by classes of alike size, each between two powers of two on both axes. A class lies in strips
    of queries as high as its highest rectangle, which reaches at most into the next strip; a strip is sorted by keys. So
    of the part of a strip that is compared with a row of a, most overlaps it."""
    high, wide = (np.frexp(b[:, end] - b[:, start])[1] for start, end in ((Q0, Q1), (K0, K1)))
    for height, width in np.unique(np.stack([high, wide], 1), axis=0).tolist():
        rows = np.flatnonzero((high == height) & (wide == width))
        starts, key = np.unique(b[rows, K0], return_inverse=True)
        strips, strip = np.unique(b[rows, Q0] >> height, return_inverse=True)
        place = strip * len(starts) + key
        order = np.argsort(place, kind="stable")
        rows, place = rows[order], place[order]
        top, end = np.searchsorted(strips, (a[:, Q0] >> height) - 1), np.searchsorted(strips << height, a[:, Q1])
        left, right = np.searchsorted(starts, a[:, K0] - (1 << width), "right"), np.searchsorted(starts, a[:, K1])
        for row, at in _runs(top, end):
            low, stop = (np.searchsorted(place, at * len(starts) + x[row]) for x in (left, right))
            for i, j in _runs(low, stop):
                first, second = row[i], rows[j]
                x, y = a[first], b[second]
                meet = (x[:, Q0] < y[:, Q1]) & (y[:, Q0] < x[:, Q1]) & (x[:, K0] < y[:, K1]) & (y[:, K0] < x[:, K1])
                yield first[meet], second[meet]


def _runs(start: Rows, stop: Rows) -> Iterator[tuple[Rows, Rows]]:
    """All (i, j) with start[i] <= j < stop[i], some at a time."""
    many = np.maximum(stop - start, 0)
    upto = np.cumsum(many)
    first = 0
    while first < len(many):
        base = upto[first] - many[first]
        last = max(first + 1, int(np.searchsorted(upto, base + COMPARED, "right")))
        some = many[first:last]
        i = np.repeat(np.arange(first, last), some)
        yield i, np.arange(len(i)) + (start - upto + many + base)[i]
        first = last


def _cut(a: Rectangles, b: Rectangles) -> Rectangles:
    """Row by row, what lies in both."""
    found = np.minimum(a, b)
    for column in (Q0, K0, LO):
        found[:, column] = np.maximum(a[:, column], b[:, column])
    return found
