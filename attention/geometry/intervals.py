"""Intervals of tokens: a few as tuples of (start, stop), many as columns of numpy. Without torch."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from attention.masks.band import Interval, Intervals

Column = NDArray[np.int64]


def length(intervals: Intervals) -> int:
    """The number of their tokens."""
    total = 0
    for start, stop in intervals:  # called very often: a loop takes half the time of a sum over a generator
        total += stop - start
    return total


def side_by_side(intervals: Intervals) -> Intervals:
    """Where the tokens of `intervals` lie when they are put one after another."""
    placed = []
    at = 0
    for start, stop in intervals:
        placed.append((at, at + stop - start))
        at += stop - start
    return tuple(placed)


def joined(intervals: Iterable[Interval]) -> Intervals:
    """The intervals in the given order, each joined with the next one if that starts where it ends."""
    merged: list[Interval] = []
    first, last = 0, -1  # no interval starts below 0
    for start, stop in intervals:
        if start != last:
            if last >= 0:
                merged.append((first, last))
            first = start
        last = stop
    return (*merged, (first, last)) if last >= 0 else ()


def by_number(of: Column, count: int, lengths: Column, *starts: Column) -> list[tuple[Intervals, ...]]:
    """For each of the numbers below `count` its intervals, as they lie at each of the `starts`. Neighbours that are adjacent at
    all of these are joined. `of`: the number of each interval, ascending."""
    apart = of[1:] != of[:-1]
    for start in starts:
        apart = apart | (start[1:] != start[:-1] + lengths[:-1])
    first = np.flatnonzero(np.append(len(of) > 0, apart))
    last = np.append(first[1:], len(of))[: len(first)] - 1
    columns = [tuple(zip(x[first].tolist(), (x + lengths)[last].tolist(), strict=True)) for x in starts]
    borders = np.searchsorted(of[first], np.arange(count + 1)).tolist()
    return [tuple(column[a:b] for column in columns) for a, b in pairwise(borders)]


def union(start: Column, stop: Column, of: Column) -> NDArray[np.int64]:
    """`[n, 3]`, sorted: the disjoint, merged intervals (start, stop, number) of each number."""
    apart = int(stop.max(initial=0)) + 1
    kept = start < stop
    low, high = (start + of * apart)[kept], (stop + of * apart)[kept]
    if not len(low):
        return np.zeros((0, 3), np.int64)
    order = np.argsort(low, kind="stable")
    low, high = low[order], np.maximum.accumulate(high[order])
    new = np.flatnonzero(low[1:] > high[:-1])
    low, high = low[np.append(0, new + 1)], high[np.append(new, len(high) - 1)]
    of = low // apart
    return np.stack([low - of * apart, high - of * apart, of], 1)
