"""A mask within one kernel call: the part that falls on a rank's queries and one owner's keys."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import numpy as np

from attention.masks.band import FULL, Band, Interval
from attention.masks.rectangles import K0, K1, Q0, Q1, UNBOUNDED, Rectangles, band_of, from_columns, in_order, pairs

T = TypeVar("T")
Entry = tuple[Interval, tuple[Interval, ...]]  # queries, and the keys that they see side by side


class Round(NamedTuple):
    """Calls that can be one packed call: the entries' queries are disjoint. `band` is aligned bottom-right in each;
    an entry with several key intervals has no band."""

    band: Band
    entries: tuple[Entry, ...]


@dataclass(frozen=True, eq=False)
class Pattern:
    """`rectangles` within `n_q` queries and `n_k` keys, in the order in which they lie for the call. Compared by
    identity, so that what is derived from a pattern can be kept with it."""

    n_q: int
    n_k: int
    rectangles: Rectangles
    kept: dict[Any, Any] = field(default_factory=dict, repr=False)  # what kernels derive from it

    def keep(self, key: Any, make: Callable[[], T]) -> T:
        """What a kernel derives from the pattern: made at the first call, then kept with it."""
        if key not in self.kept:
            self.kept[key] = make()
        kept: T = self.kept[key]
        return kept

    def pairs(self, *_: int) -> int:
        return int(pairs(self.rectangles).sum())

    @cached_property
    def rounds(self) -> tuple[Round, ...]:
        """All rectangles as packed calls. Whole rectangles of the same queries are one entry. Bounds on one side are
        causal or, for the rows that see every key, whole; only rectangles with a lower bound need a kernel with
        windows."""
        banded: dict[Band, list[Entry]] = {}
        whole: dict[Interval, list[Interval]] = {}
        for row in _without_trapezoids(self.rectangles).tolist():
            q, k, band = (row[Q0], row[Q1]), (row[K0], row[K1]), band_of(row)
            if band.full:
                whole.setdefault(q, []).append(k)
            else:
                banded.setdefault(band, []).append((q, (k,)))
        if whole:
            banded[FULL] = [(q, tuple(keys)) for q, keys in whole.items()]
        return tuple(Round(band, entries) for band in banded for entries in _disjoint(banded[band]))


def _without_trapezoids(x: Rectangles) -> Rectangles:
    """Rectangles with an upper bound alone as a causal part, whose last row is the first that sees every key, and a
    whole part below it."""
    q0, q1, k0, k1, lo, hi = x.T
    last = np.where(
        (lo <= -UNBOUNDED) & (hi < UNBOUNDED), k1 - hi, q1
    )  # the row after the first one that sees every key
    above = from_columns(q0, np.minimum(last, q1), k0, k1, lo, hi)
    below = from_columns(np.maximum(last, q0), q1, k0, k1, lo, hi)
    return in_order(np.concatenate([above, below]), (K0, Q0))


def _disjoint(entries: list[Entry]) -> list[tuple[Entry, ...]]:
    """The entries, sorted by queries, in as few groups as possible in which queries are disjoint."""
    groups: list[list[Entry]] = []
    for entry in sorted(entries):
        for group in groups:
            if group[-1][0][1] <= entry[0][0]:
                group.append(entry)
                break
        else:
            groups.append([entry])
    return list(map(tuple, groups))
