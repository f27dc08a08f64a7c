"""Random keys for queries, among the keys that they do not see otherwise.

The draw. A row is a query or a tile of queries. It has `n` candidates in ascending order, and takes m = min(wanted, n)
of them. It draws h = min(m, n - m) different candidates: those that it takes where h = m, else those that it leaves
out. In each round every row, in order, draws as many as it still lacks; candidates drawn twice count once. Rounds end
when no row lacks any. A draw takes the next number x of `numpy.random.PCG64(seed).random_raw()`, a stream that numpy
never changes, and gives candidate ((x >> 32) * n) >> 32. So every choice of m candidates is equally likely, but for a
bias of at most n / 2**32."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from attention.masks.rectangles import Rectangles, from_columns

Numbers = NDArray[np.int64]
GRANULARITIES = ("token", "tile", "block")
TILE = 128  # queries that share a draw


def random_keys(
    tokens: int, window: int, always: Numbers, random: int, granularity: str, block: int, seed: int, causal: bool
) -> Rectangles:
    """The rectangles of the random keys, by granularity as `dca` says. Queries see otherwise the keys with
    |q - k| <= window, and the keys `always`; a query of `always` sees every key."""
    rows, unit = 1 if granularity == "token" else TILE, block if granularity == "block" else 1
    wanted = max(1, random // unit) if random else 0
    start = np.arange(0, tokens, rows)
    stop = np.minimum(start + rows, tokens)
    unseen = np.ones(-(-tokens // unit), np.bool_)
    unseen[always // unit] = False
    free = np.flatnonzero(unseen)  # the units, each a key or a block, without any of `always`
    before = np.searchsorted(free, np.maximum(start - window, 0) // unit)  # free units that end before the window
    after = np.full(len(start), len(free)) if causal else np.searchsorted(free, -(-(stop + window) // unit))
    sees_all = np.searchsorted(always, stop) > np.searchsorted(always, start)
    candidates = np.where(sees_all, 0, before + len(free) - after)
    row, which = draw(candidates, wanted, seed)
    key = free[np.where(which < before[row], which, which - before[row] + after[row])]
    row, first, last = runs(row, key)
    return from_columns(start[row], stop[row], first * unit, np.minimum((last + 1) * unit, tokens))


def draw(candidates: Numbers, wanted: int, seed: int) -> tuple[Numbers, Numbers]:
    """For each row min(wanted, candidates) different numbers below its number of candidates: rows and numbers,
    sorted."""
    taken = np.minimum(candidates, wanted)
    inverse = taken > candidates - taken  # rows that draw what they leave out
    lacking = np.where(inverse, candidates - taken, taken)
    span = int(candidates.max(initial=0)) + 1
    source, found, goal = np.random.PCG64(seed), np.zeros(0, np.int64), lacking
    while lacking.any():
        row = np.repeat(np.arange(len(candidates)), lacking)
        high = source.random_raw(len(row)) >> np.uint64(32)
        number = (high * candidates[row].astype(np.uint64) >> np.uint64(32)).astype(np.int64)
        found = _distinct(np.concatenate([found, row * span + number]))
        lacking = goal - np.bincount(found // span, minlength=len(candidates))
    if inverse.any():
        found = np.sort(np.concatenate([found[~inverse[found // span]], _all_but(found, candidates * inverse, span)]))
    return found // span, found % span


def _distinct(numbers: Numbers) -> Numbers:
    """As numpy.unique, which takes ten times as long: it hashes integers."""
    numbers = np.sort(numbers)
    return numbers[np.append(True, numbers[1:] != numbers[:-1])]


def _all_but(found: Numbers, candidates: Numbers, span: int) -> Numbers:
    """The numbers of all rows that are not among `found`."""
    row = np.repeat(np.arange(len(candidates)), candidates)
    number = np.arange(len(row)) - np.repeat(np.cumsum(candidates) - candidates, candidates)
    return np.setdiff1d(row * span + number, found, assume_unique=True)


def runs(row: Numbers, key: Numbers) -> tuple[Numbers, Numbers, Numbers]:
    """Neighbouring keys of a row as one: rows, the first and the last key of each run."""
    if not len(row):
        return row, key, key
    first = np.append(True, (row[1:] != row[:-1]) | (key[1:] != key[:-1] + 1))
    last = np.append(first[1:], True)
    return row[first], key[first], key[last]
