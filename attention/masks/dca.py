"""Dynamic Context Allocation: a window, global tokens, and random keys, which are drawn among the keys that a query does not
see otherwise.

The draw. A row is a query or a tile of queries. It has `n` candidates in ascending order, and takes m = min(wanted, n)
of them. It draws h = min(m, n - m) different candidates: those that it takes where h = m, else those that it leaves
out. In each round every row, in order, draws as many as it still lacks; candidates drawn twice count once. Rounds end
when no row lacks any. A draw takes the next number x of `numpy.random.PCG64(seed).random_raw()`, a stream that numpy
never changes, and gives candidate ((x >> 32) * n) >> 32. So every choice of m candidates is equally likely, but for a
bias of at most n / 2**32."""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np

from attention.masks.checks import Count, Counts, Flag, Positive, one_of, whole_numbers, within
from attention.masks.mask import family
from attention.masks.plain import window_and_globals
from attention.masks.rectangles import Column, Rectangles, from_columns, spread

GRANULARITIES = ("token", "tile", "block")
TILE = 128  # queries that share a draw
MOST_BLOCK = 64


def _static(name: str, value: Any) -> str:
    if one_of("static", "learned")(name, value) == "learned":
        raise ValueError(
            "selector=learned: chooses global tokens from a model's hidden states, which a mask by parameters does not "
            "have; take attention.masks.learned.learned(hidden, score, window), or selector=static"
        )
    return "static"


@family
def dca(
    tokens: int,
    window: Count,
    global_tokens: Count,
    random: Count,
    granularity: Annotated[str, one_of(*GRANULARITIES)] = "block",
    seed: Count = 0,
    causal: Flag = False,
    selector: Annotated[str, _static] = "static",
    block: Positive = 64,
) -> Rectangles:
    """|q - k| <= window // 2, or k < global_tokens, or q < global_tokens, or k in R(q); with causal, k <= q, too

    R(q) is drawn with `seed` among the keys that the rest of the mask leaves out:

    - granularity=token: `random` single keys for each query.
    - granularity=tile: `random` single keys for each tile of 128 queries, of those that no query of the tile sees
      otherwise.
    - granularity=block: max(1, random // block) blocks of `block` keys for each tile of 128 queries (none for
      random=0), of the blocks in which no query of the tile sees a key otherwise. Block j has the keys
      [j * block, (j + 1) * block); the last may be short.

    With `causal` they are keys before the query, or the tile. A tile with a global query draws none, as that query sees
    all of these keys. Where fewer are left, R(q) has all of them. The draw, as above, is the same on every
    machine.

    Raises ValueError for a negative number, an unknown granularity, and selector=learned, for which hidden states are
    needed: `attention.masks.learned` makes that mask. When built, for more global tokens than the sequence has."""
    within("global_tokens", global_tokens, tokens)
    return with_random_keys(tokens, window, np.arange(global_tokens), random, granularity, block, seed, causal)


def _positions(name: str, values: Any) -> tuple[int, ...]:
    return tuple(sorted(set(whole_numbers(name, values))))


@family
def chosen_globals(
    tokens: int,
    window: Count,
    global_positions: Annotated[Counts, _positions],
    random: Count = 0,
    seed: Count = 0,
    causal: Flag = False,
) -> Rectangles:
    """|q - k| <= window // 2, or q or k is one of global_positions, or k in R(q); with causal, k <= q, too

    R(q) is as in `dca` with granularity=block: `random` keys in blocks of at most 64 for each tile of 128 queries."""
    if global_positions:
        within("the last of global_positions, plus 1,", global_positions[-1] + 1, tokens)
    chosen, block = np.array(global_positions, np.int64), min(MOST_BLOCK, max(1, random))
    return with_random_keys(tokens, window, chosen, random, "block", block, seed, causal)


def with_random_keys(
    tokens: int, window: int, always: Column, random: int, granularity: str, block: int, seed: int, causal: bool
) -> Rectangles:
    """The rectangles of DCA, with random keys by granularity as `dca` says. always: the global tokens, sorted. Queries see
    otherwise the keys with |q - k| <= window // 2, and the keys `always`; a query of `always` sees every key."""
    window //= 2
    _, first, last = runs(np.zeros_like(always), always)
    rest = window_and_globals(tokens, window, first, last + 1, causal)
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
    drawn = from_columns(start[row], stop[row], first * unit, np.minimum((last + 1) * unit, tokens))
    return np.concatenate([rest, drawn])


def draw(candidates: Column, wanted: int, seed: int) -> tuple[Column, Column]:
    """For each row min(wanted, candidates) different numbers below its number of candidates: rows and numbers,
    sorted."""
    taken = np.minimum(candidates, wanted)
    inverse = taken > candidates - taken  # rows that draw what they leave out
    lacking = np.where(inverse, candidates - taken, taken)
    span = int(candidates.max(initial=0)) + 1
    source, chosen, goal = np.random.PCG64(seed), np.zeros(0, np.int64), lacking
    while lacking.any():
        row = np.repeat(np.arange(len(candidates)), lacking)
        high = source.random_raw(len(row)) >> np.uint64(32)
        number = (high * candidates[row].astype(np.uint64) >> np.uint64(32)).astype(np.int64)
        chosen = _distinct(np.concatenate([chosen, row * span + number]))
        lacking = goal - np.bincount(chosen // span, minlength=len(candidates))
    if inverse.any():
        row, number = spread(candidates * inverse)
        rest = np.setdiff1d(row * span + number, chosen, assume_unique=True)
        chosen = np.sort(np.concatenate([chosen[~inverse[chosen // span]], rest]))
    return chosen // span, chosen % span


def _distinct(numbers: Column) -> Column:
    """As numpy.unique, which takes ten times as long: it hashes integers."""
    numbers = np.sort(numbers)
    return numbers[np.append(True, numbers[1:] != numbers[:-1])]


def runs(row: Column, key: Column) -> tuple[Column, Column, Column]:
    """Neighbouring keys of a row as one: rows, the first and the last key of each run."""
    apart = (row[1:] != row[:-1]) | (key[1:] != key[:-1] + 1)
    first, last = (np.append(*ends)[: len(row)] for ends in ((True, apart), (apart, True)))
    return row[first], key[first], key[last]
