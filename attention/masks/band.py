"""Masks as bands. Under `Band(left, right)`, query `i` of `Sq` sees the keys `j` of `Sk` with
`i + Sk - Sq - left <= j <= i + Sk - Sq + right` (aligned bottom-right); -1 is unbounded. Full, causal and
sliding-window attention are bands. A rectangular tile of a band, trimmed, is a band again, so one geometry serves every
layout. Pure Python, no torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

Interval = tuple[int, int]  # [start, stop)
Intervals = tuple[Interval, ...]
UNBOUNDED = 1 << 40


@dataclass(frozen=True)
class Band:
    left: int = -1
    right: int = -1

    @staticmethod
    def of(causal: bool = False, window: tuple[int, int] = (-1, -1)) -> Band:
        """The band of `causal` and `window` together; causal sets the right bound to 0.

        Raises ValueError for a window below -1."""
        left, right = window
        if left < -1 or right < -1:
            raise ValueError(
                f"window={tuple(window)}: each side must be -1 (unbounded) or a number of tokens; "
                "give for instance window=[512,0]"
            )
        return Band(left, 0 if causal else right)

    @cached_property
    def full(self) -> bool:
        return self.left < 0 and self.right < 0

    @property
    def edges(self) -> int:
        """The number of bounds: 0, 1 or 2."""
        return (self.left >= 0) + (self.right >= 0)

    @cached_property
    def causal(self) -> bool:
        """Plain causal: no left bound."""
        return self.left < 0 and self.right == 0

    @cached_property
    def windowed(self) -> bool:
        return self.left >= 0 or self.right > 0

    def pairs(self, sq: int, sk: int) -> int:
        """The number of (query, key) pairs that the band keeps in an `sq` by `sk` rectangle."""
        lo, hi = self.bounds(sk - sq)
        pairs: int = pairs_below(sq, sk, hi) - pairs_below(sq, sk, lo - 1)
        return pairs

    def bounds(self, shift: int = 0) -> tuple[int, int]:
        """(lo, hi) of `lo <= k - q <= hi`, where the last query is aligned to the key `shift` after it."""
        lo = max(shift - self.left, -UNBOUNDED) if self.left >= 0 else -UNBOUNDED
        return lo, min(shift + self.right, UNBOUNDED) if self.right >= 0 else UNBOUNDED

    def describe(self) -> str:
        if self.full:
            return "full"
        return "causal" if self.causal else f"window ({self.left}, {self.right})"


FULL = Band()
CAUSAL = Band(-1, 0)


def pairs_below(n: Any, m: Any, shift: Any) -> Any:
    """Pairs with `j <= i + shift`, `0 <= i < n`, `0 <= j < m`: the sum over i of clamp(i + shift + 1, 0, m). For ints, or for
    columns of them."""
    shift = _positive(shift + n) - n
    shift = m - _positive(m - shift)  # -n to m
    return _triangle(shift + n) - _triangle(shift) - _triangle(shift + n - m)


def _positive(x: Any) -> Any:
    return x * (x > 0)


def _triangle(x: Any) -> Any:
    return _positive(x) * (x + 1) >> 1


def narrower(a: Band, b: Band) -> Band:
    """The intersection."""
    sides = (a.left, b.left), (a.right, b.right)
    return Band(*(min((bound for bound in side if bound >= 0), default=-1) for side in sides))


def tile(mask: Band, q: Interval, k: Interval) -> tuple[Interval, Interval, Band] | None:
    """The part of a band within queries `q` and keys `k`: (queries, keys, mask), or None where no pair is left.

    `q` and `k` are positions in one sequence, in which query i is aligned to key i. Rows and columns without a pair are
    trimmed. The mask is relative to the trimmed tile, aligned bottom-right; a bound that cuts nothing becomes -1."""
    (a, b), (c, d) = q, k
    if mask.right >= 0:
        a = max(a, c - mask.right)
    if mask.left >= 0:
        b = min(b, d + mask.left)
    if a >= b or c >= d:
        return None
    if mask.left >= 0:
        c = max(c, a - mask.left)
    if mask.right >= 0:
        d = min(d, b + mask.right)
    if c >= d:
        return None
    right = mask.right + b - d if mask.right >= 0 else -1
    left = mask.left + d - b if mask.left >= 0 else -1
    if right >= b - a - 1:  # the first row already sees the last key
        right = -1
    if left >= d - c - 1:  # the last row still sees the first key
        left = -1
    if left < 0 and right <= 0:  # the common case: a new Band would take as long as the rest of this function
        return (a, b), (c, d), CAUSAL if right == 0 else FULL
    return (a, b), (c, d), Band(left, right)
