"""Rectangles with a band: the common form of all masks. Many are cut, counted and joined at once, by numpy.

`Rectangles` is an int64 array `[n, 6]`, a row for each rectangle: queries `[q0, q1)` see those keys of `[k0, k1)` with
`lo <= k - q <= hi`. A bound that cuts nothing is -UNBOUNDED or UNBOUNDED. Positions are global, or local to a shard; no
pair is in two rectangles. The cost is linear in the number of rectangles and does not depend on the number of tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from attention.masks.band import Band, Interval

Rectangles = NDArray[np.int64]
Column = NDArray[np.int64]
Q0, Q1, K0, K1, LO, HI = range(6)
UNBOUNDED = 1 << 40
EXACT = 1 << 31  # tokens whose pairs fit int64
MOST_JOINED = 4096  # above this number, only adjacent rectangles without a band are joined


def rectangles(rows: Iterable[Sequence[int]]) -> Rectangles:
    """The rectangles of these rows (q0, q1, k0, k1, lo, hi), trimmed; rectangles without a pair are left out."""
    return trimmed(np.array(list(rows), np.int64).reshape(-1, 6))


def from_columns(
    q0: ArrayLike, q1: ArrayLike, k0: ArrayLike, k1: ArrayLike, lo: ArrayLike = -UNBOUNDED, hi: ArrayLike = UNBOUNDED
) -> Rectangles:
    """The rectangles of these columns, trimmed. A column is an array, or one number for all rows."""
    columns = np.broadcast_arrays(*(np.asarray(x, np.int64) for x in (q0, q1, k0, k1, lo, hi)))
    return _trimmed(*(column.reshape(-1) for column in columns))


def rectangle(q: Interval, k: Interval, band: Band) -> tuple[int, ...]:
    """The row of a band that is aligned bottom-right in a rectangle."""
    shift = k[1] - q[1]
    lo = max(shift - band.left, -UNBOUNDED) if band.left >= 0 else -UNBOUNDED
    hi = min(shift + band.right, UNBOUNDED) if band.right >= 0 else UNBOUNDED
    return (*q, *k, lo, hi)


def band_of(row: Sequence[int]) -> Band:
    """The band of a trimmed rectangle, aligned bottom-right in it."""
    shift = int(row[K1] - row[Q1])
    left = shift - int(row[LO]) if row[LO] > -UNBOUNDED else -1
    right = int(row[HI]) - shift if row[HI] < UNBOUNDED else -1
    return Band(left, right)


def trimmed(x: Rectangles) -> Rectangles:
    """The rectangles without the queries and keys that have no pair; bounds that cut nothing become unbounded."""
    return _trimmed(*x.T)


def _trimmed(q0: Column, q1: Column, k0: Column, k1: Column, lo: Column, hi: Column) -> Rectangles:
    q0, q1 = np.maximum(q0, k0 - hi), np.minimum(q1, k1 - lo)
    k0, k1 = np.maximum(k0, q0 + lo), np.minimum(k1, q1 + hi)
    lo = np.where(lo <= k0 - q1 + 1, -UNBOUNDED, lo)
    hi = np.where(hi >= k1 - 1 - q0, UNBOUNDED, hi)
    kept = (q0 < q1) & (k0 < k1)
    found = np.stack([q0, q1, k0, k1, lo, hi], 1)
    return found if kept.all() else found[kept]


def pairs(x: Rectangles) -> NDArray[np.int64]:
    """The (query, key) pairs of each rectangle `[n]`; exact: beyond 2**31 tokens an array of Python's ints."""
    if x[:, :LO].max(initial=0) > EXACT:
        x = x.astype(object)
    found: NDArray[np.int64] = (x[:, Q1] - x[:, Q0]) * (x[:, K1] - x[:, K0])
    banded = np.flatnonzero((x[:, LO] > -UNBOUNDED) | (x[:, HI] < UNBOUNDED))
    found[banded] = _within_band(x[banded])
    return found


def _within_band(x: Rectangles) -> NDArray[np.int64]:
    n, m = x[:, Q1] - x[:, Q0], x[:, K1] - x[:, K0]

    def upto(bound: NDArray[np.int64]) -> NDArray[np.int64]:
        """The number of pairs with k - q <= bound: the sum over queries i < n of clamp(first + i, 0, m)."""
        first = np.clip(bound + x[:, Q0] - x[:, K0] + 1, -n, m)
        return _ramp(first + n - 1, m) - _ramp(first - 1, m)

    found: NDArray[np.int64] = upto(x[:, HI]) - upto(x[:, LO] - 1)
    return found


def _ramp(upto: NDArray[np.int64], m: NDArray[np.int64]) -> NDArray[np.int64]:
    """The sum over all j <= upto of clamp(j, 0, m)."""
    low = np.clip(upto, 0, m)
    found: NDArray[np.int64] = low * (low + 1) // 2 + np.maximum(upto - m, 0) * m
    return found


def placed(x: Rectangles, places: ArrayLike, keys: bool) -> tuple[Rectangles, NDArray[np.int64]]:
    """Moves intervals of the queries (with `keys`: of the keys) to other positions. Returns the parts of the rectangles in
    these intervals at their new positions, and for each part the index of its interval. places: (start, stop, new start)
    of disjoint intervals, sorted by start."""
    starts, stops, at = np.asarray(places, np.int64).reshape(-1, 3).T
    low, high = (K0, K1) if keys else (Q0, Q1)
    first, last = np.searchsorted(stops, x[:, low], "right"), np.searchsorted(starts, x[:, high], "left")
    many = np.maximum(last - first, 0)
    x = np.repeat(x, many, 0)
    which = np.arange(len(x)) - np.repeat(np.cumsum(many) - many, many) + np.repeat(first, many)
    shift = (at - starts)[which]
    x[:, low] = np.maximum(x[:, low], starts[which]) + shift
    x[:, high] = np.minimum(x[:, high], stops[which]) + shift
    for bound in (LO, HI):
        bounded = np.abs(x[:, bound]) < UNBOUNDED
        x[bounded, bound] += (shift if keys else -shift)[bounded]
    kept = has_pairs(x)
    return trimmed(x[kept]), which[kept]


def has_pairs(x: Rectangles) -> NDArray[np.bool_]:
    """Whether a rectangle has any pair, for each `[n]`."""
    q0, q1, k0, k1, lo, hi = x.T
    q0, q1 = np.maximum(q0, k0 - hi), np.minimum(q1, k1 - lo)
    found: NDArray[np.bool_] = (lo <= hi) & (q0 < q1) & (np.maximum(k0, q0 + lo) < np.minimum(k1, q1 + hi))
    return found


def in_order(x: Rectangles) -> Rectangles:
    """Sorted by queries, then keys."""
    return x[np.lexsort((x[:, K0], x[:, Q1], x[:, Q0]))]


def joined(x: Rectangles) -> Rectangles:
    """Joins neighbours if one rectangle with one band has exactly the same pairs; sorted."""
    x = _whole_beside(in_order(x))
    if len(x) > MOST_JOINED:
        return x
    for order in ((K0, Q1, Q0), (Q0, K0), (Q0, K1)):
        x = x[np.lexsort([x[:, column] for column in order])]
        rows = x.tolist()
        found: list[list[int]] = []
        for row in rows:
            one = _one(found[-1], row) if found else None
            if one is None:
                found.append(row)
            else:
                found[-1] = one
        if len(found) < len(rows):
            x = np.array(found, np.int64).reshape(-1, 6)
    return in_order(x)


def _whole_beside(x: Rectangles) -> Rectangles:
    """Joins rectangles without a band that have the same queries and adjacent keys; `x` is sorted."""
    if len(x) < 2:
        return x
    whole = (x[:, LO] <= -UNBOUNDED) & (x[:, HI] >= UNBOUNDED)
    same = (x[1:, Q0] == x[:-1, Q0]) & (x[1:, Q1] == x[:-1, Q1]) & (x[1:, K0] == x[:-1, K1]) & whole[1:] & whole[:-1]
    first = np.flatnonzero(np.concatenate([[True], ~same]))
    found = x[first]
    found[:, K1] = x[np.concatenate([first[1:] - 1, [len(x) - 1]]), K1]
    return found


def _one(a: list[int], b: list[int]) -> list[int] | None:
    """The one rectangle that has exactly the pairs of a and b, or None."""
    beside = (a[Q0], a[Q1]) == (b[Q0], b[Q1]) and (a[K1] == b[K0] or b[K1] == a[K0])
    above = a[Q1] == b[Q0] or b[Q1] == a[Q0]
    if not beside and not above:
        return None
    hull = [min(a[Q0], b[Q0]), max(a[Q1], b[Q1]), min(a[K0], b[K0]), max(a[K1], b[K1])]
    for band in dict.fromkeys(((a[LO], a[HI]), (b[LO], b[HI]))):
        if all(_meets(x, band) for x in (a, b)) and _pairs([*hull, *band]) == _pairs(a) + _pairs(b):
            return [*hull, *band]
    return None


def _meets(x: list[int], band: tuple[int, int]) -> bool:
    """Whether all pairs of a rectangle are within a band."""
    if (x[LO], x[HI]) == band:
        return True
    return _pairs([*x[:4], max(x[LO], band[0]), min(x[HI], band[1])]) == _pairs(x)


def _pairs(row: list[int]) -> int:
    q0, q1, k0, k1, lo, hi = row
    n, m = q1 - q0, k1 - k0

    def ramp(upto: int) -> int:
        low = min(max(upto, 0), m)
        return low * (low + 1) // 2 + max(upto - m, 0) * m

    def upto(bound: int) -> int:
        first = min(max(bound + q0 - k0 + 1, -n), m)
        return ramp(first + n - 1) - ramp(first - 1)

    return max(0, upto(hi) - upto(lo - 1))
