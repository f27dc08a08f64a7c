"""Rectangles with a band: the common form of all masks. Many are cut, counted and joined at once, by numpy.

`Rectangles` is an int64 array `[n, 6]`, a row for each rectangle: queries `[q0, q1)` see those keys of `[k0, k1)` with
`lo <= k - q <= hi`. A bound that cuts nothing is -UNBOUNDED or UNBOUNDED. Positions are global, or local to a shard; no
pair is in two rectangles. The cost is linear in the number of rectangles and does not depend on the number of tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attention.masks.band import UNBOUNDED, Band, Interval, pairs_below

Rectangles = NDArray[np.int64]
Column = NDArray[np.int64]
Q0, Q1, K0, K1, LO, HI = range(6)
EXACT = 1 << 30  # tokens whose pairs fit int64
MOST_JOINED = 4096  # above this number, only adjacent rectangles without a band are


def rectangles(rows: Iterable[Sequence[int]]) -> Rectangles:
    """The rectangles of these rows (q0, q1, k0, k1, lo, hi), trimmed; rectangles without a pair are left out."""
    return trimmed(np.array(list(rows), np.int64).reshape(-1, 6))


def from_columns(q0: Any, q1: Any, k0: Any, k1: Any, lo: Any = -UNBOUNDED, hi: Any = UNBOUNDED) -> Rectangles:
    """The rectangles of these columns, trimmed. A column is an array, or one number for all rows."""
    q0, q1, k0, k1, lo, hi = (column.reshape(-1) for column in np.broadcast_arrays(q0, q1, k0, k1, lo, hi))
    q0, q1 = np.maximum(q0, k0 - hi), np.minimum(q1, k1 - lo)
    k0, k1 = np.maximum(k0, q0 + lo), np.minimum(k1, q1 + hi)
    kept = (q0 < q1) & (k0 < k1) & (lo <= hi)
    if not kept.all():
        q0, q1, k0, k1, lo, hi = (column[kept] for column in (q0, q1, k0, k1, lo, hi))
    lo = np.where(lo <= k0 - q1 + 1, -UNBOUNDED, lo)
    hi = np.where(hi >= k1 - 1 - q0, UNBOUNDED, hi)
    return np.stack([q0, q1, k0, k1, lo, hi], 1)


def rectangle(q: Interval, k: Interval, band: Band) -> tuple[int, ...]:
    """The row of a band that is aligned bottom-right in a rectangle."""
    return (*q, *k, *band.bounds(k[1] - q[1]))


def band_of(row: Sequence[int]) -> Band:
    """The band of a trimmed rectangle, aligned bottom-right in it."""
    shift = row[K1] - row[Q1]
    return Band(shift - row[LO] if row[LO] > -UNBOUNDED else -1, row[HI] - shift if row[HI] < UNBOUNDED else -1)


def trimmed(x: Rectangles) -> Rectangles:
    """The rectangles without the queries and keys that have no pair; bounds that cut nothing become unbounded."""
    return from_columns(*x.T)


def spread(counts: Column) -> tuple[Column, Column]:
    """(row, number): for each row the numbers below its count."""
    row = np.repeat(np.arange(len(counts)), counts)
    return row, np.arange(len(row)) - (np.cumsum(counts) - counts)[row]


def pairs(x: Rectangles) -> NDArray[np.int64]:
    """The (query, key) pairs of each rectangle `[n]`; exact: beyond 2**30 tokens an array of Python's ints."""
    counts: NDArray[np.int64] = _pairs((x.astype(object) if x[:, :LO].max(initial=0) > EXACT else x).T)
    return counts


def _pairs(row: Any) -> Any:
    q0, q1, k0, k1, lo, hi = row
    n, m, shift = q1 - q0, k1 - k0, q0 - k0
    return pairs_below(n, m, hi + shift) - pairs_below(n, m, lo - 1 + shift)


def in_order(x: Rectangles, columns: Sequence[int] = (K0, Q1, Q0)) -> Rectangles:
    """Sorted by columns, of which the last one counts most: by queries, then keys."""
    return x[np.lexsort(x[:, columns].T)]


def joined(x: Rectangles) -> Rectangles:
    """Joins neighbours if one rectangle with one band has exactly the same pairs; sorted."""
    x = _beside(in_order(x))
    for columns in ((K0, Q1, Q0), (Q0, K0), (Q0, K1)) if len(x) <= MOST_JOINED else ():
        rows: list[list[int]] = []
        for row in in_order(x, columns).tolist():
            hull = _hull(rows[-1], row) if rows else None
            if hull is None:
                rows.append(row)
            else:
                rows[-1] = hull
        x = np.array(rows, np.int64).reshape(-1, 6)
    return in_order(x)


def _beside(x: Rectangles) -> Rectangles:
    """Joins rectangles without a band that have the same queries and adjacent keys; `x` is sorted."""
    whole = (x[:, LO] <= -UNBOUNDED) & (x[:, HI] >= UNBOUNDED)
    same = (x[1:, :K0] == x[:-1, :K0]).all(1) & (x[1:, K0] == x[:-1, K1]) & whole[1:] & whole[:-1]
    rows = x[~np.append(False, same)[: len(x)]]
    rows[:, K1] = x[~np.append(same, False)[: len(x)], K1]
    return rows


def _hull(a: list[int], b: list[int]) -> list[int] | None:
    """The one rectangle that has exactly the pairs of a and b, or None. b comes after a in one of the orders of `joined`."""
    if a[:K0] != b[:K0] and a[Q1] != b[Q0]:
        return None
    total = _pairs(a) + _pairs(b)
    sides = min(a[Q0], b[Q0]), max(a[Q1], b[Q1]), min(a[K0], b[K0]), max(a[K1], b[K1])
    for lo, hi in (a[LO:], b[LO:]):
        within = sum(_pairs([*x[:LO], max(x[LO], lo), min(x[HI], hi)]) for x in (a, b))
        if total == within == _pairs(hull := [*sides, lo, hi]):
            return hull
    return None
