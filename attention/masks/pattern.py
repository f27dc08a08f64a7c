"""A mask within one kernel call: the part that falls on a rank's queries and one owner's keys."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from attention.masks.band import FULL, Band, Interval
from attention.masks.rectangles import HI, K0, K1, LO, Q0, Q1, UNBOUNDED, Rectangles, band_of, pairs

Entry = tuple[Interval, tuple[Interval, ...]]  # queries, and the keys that they see side by side


@dataclass(frozen=True, eq=False)
class Round:
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

    full = False  # as of a band
    edges = 0

    def pairs(self, *_: int) -> int:
        return self.all_pairs

    @cached_property
    def all_pairs(self) -> int:
        return int(pairs(self.rectangles).sum())

    @cached_property
    def rounds(self) -> tuple[Round, ...]:
        """All rectangles as packed calls. Whole rectangles of the same queries are one entry. Bounds on one side are
        causal or, for the rows that see every key, whole; only rectangles with a lower bound need a kernel with
        windows."""
        by_band: dict[Band, list[Entry]] = {}
        whole: dict[Interval, list[Interval]] = {}
        for row in _without_trapezoids(self.rectangles).tolist():
            q, k, band = (row[Q0], row[Q1]), (row[K0], row[K1]), band_of(row)
            if band.full:
                whole.setdefault(q, []).append(k)
            else:
                by_band.setdefault(band, []).append((q, (k,)))
        if whole:
            by_band[FULL] = sorted((q, tuple(sorted(ks))) for q, ks in whole.items())
        found: list[Round] = []
        for band, entries in by_band.items():
            found += [Round(band, tuple(each)) for each in _disjoint(entries)]
        return tuple(found)


def _without_trapezoids(x: Rectangles) -> Rectangles:
    """Rectangles with an upper bound alone as a causal part, whose last row is the first that sees every key, and a
    whole part below it."""
    last = x[:, K1] - x[:, HI]  # the row after the first one that sees every key
    split = (x[:, LO] <= -UNBOUNDED) & (x[:, HI] < UNBOUNDED) & (last < x[:, Q1])
    above, below = x.copy(), x[split].copy()
    above[split, Q1] = last[split]
    below[:, Q0], below[:, HI] = last[split], UNBOUNDED
    found = np.concatenate([above, below])
    return found[np.lexsort((found[:, K0], found[:, Q0]))]


def _disjoint(entries: list[Entry]) -> list[list[Entry]]:
    """The entries, sorted by queries, in as few lists as possible in which queries are disjoint."""
    found: list[list[Entry]] = []
    for entry in sorted(entries):
        into = next((each for each in found if each[-1][0][1] <= entry[0][0]), None)
        if into is None:
            found.append([entry])
        else:
            into.append(entry)
    return found
