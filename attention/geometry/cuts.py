"""A mask cut at the queries of one rank and the keys that it computes against: one sorted sweep for all steps, in numpy.

A place is a run of equally spaced tokens: `start, start + step, ..` below `stop` lie at `at, at + 1, ..` of a shard or of a
buffer of keys. At spacing s, pairs with local positions i and j have k - q = s (j - i) + const. So a band stays a band, and
striped shards need no case of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attention.geometry.intervals import Column, union
from attention.geometry.layouts import Chunks, CuSeqlens, Layout, Shard
from attention.masks.band import Band
from attention.masks.rectangles import HI, K0, K1, LO, Q0, Q1, UNBOUNDED, Rectangles, pairs, rectangle

Cut = NDArray[np.int64]  # [8, n]: q0 q1 k0 k1 lo hi in local positions, the buffer, the mask's rectangle
BUFFER, SOURCE = 6, 7


@dataclass(frozen=True, eq=False)
class Places:
    """`[n]` each, sorted by the residue of the start, then by the start; no token is in two places of one `of`.

    of: the number of the shard or buffer in which the tokens lie."""

    start: Column
    stop: Column
    at: Column
    of: Column
    step: int = 1

    @staticmethod
    def sorted(start: Column, stop: Column, at: Column, of: Column, step: int = 1) -> Places:
        """Without empty places."""
        order = np.lexsort((start, start % step)) if step > 1 else np.argsort(start, kind="stable")
        order = order[stop[order] > start[order]]
        return Places(start[order], stop[order], at[order], of[order], step)

    @staticmethod
    def in_chunks(table: Sequence[Sequence[int]], cu_seqlens: CuSeqlens) -> Places:
        """Every sequence in equal chunks, of which rank r holds those with the numbers `table[r]`."""
        number, cu = np.array(table, np.int64), np.array(cu_seqlens, np.int64)[:, None]
        rank, i = np.divmod(np.argsort(number, axis=None), number.shape[1])  # of each chunk of a sequence
        first, size = cu[:-1], (cu[1:] - cu[:-1]) // number.size
        kept = size[:, 0] > 0
        first, size = first[kept], size[kept]  # [sequences, 1]
        start = first + size * np.arange(number.size)
        at, of = first // len(table) + size * i, np.zeros_like(start) + rank
        return Places(start.ravel(), (start + size).ravel(), at.ravel(), of.ravel())

    @staticmethod
    def of_shards(shards: Sequence[Shard]) -> Places:
        """of: the number of the shard."""
        step = max((r.step for shard in shards for r in shard if len(r) > 1), default=1)
        rows = [(r.start, r.stop if r.step == step else r.start + 1, len(r)) for shard in shards for r in shard]
        start, stop, lengths = np.array(rows, np.int64).reshape(-1, 3).T
        of = np.repeat(np.arange(len(shards)), [len(shard) for shard in shards])
        return Places.sorted(start, np.where(lengths > 0, stop, start), _before(lengths, of), of, step)

    @staticmethod
    def side_by_side(rows: NDArray[np.int64]) -> Places:
        """The tokens of rows (start, stop, buffer), one row after another in each buffer. Rows and places are sorted by buffer."""
        start, stop, of = rows.T
        return Places(start, stop, _before(stop - start, of), of)

    def where(self, kept: NDArray[Any]) -> Places:
        return Places(self.start[kept], self.stop[kept], self.at[kept], self.of[kept], self.step)

    def only(self, of: int) -> Places:
        """Those of one shard or buffer, which becomes number 0."""
        return self.where(self.of == of).numbered(0)

    def numbered(self, of: Column | int) -> Places:
        """With other numbers of shards or buffers."""
        return Places(self.start, self.stop, self.at, self.of * 0 + of, self.step)

    def meeting(self, low: Column, high: Column) -> tuple[Column, Column]:
        """All pairs (row, place) in which the tokens `[low, high)` of the row overlap with the place."""
        if not len(self.start) or not len(low):
            return np.zeros(0, np.int64), np.zeros(0, np.int64)
        start, stop, residues = self.start, self.stop, 1
        if self.step > 1:  # the places of each residue by themselves, in one sorted column
            residue = start % self.step
            number = np.append(0, np.cumsum(residue[1:] != residue[:-1]))
            residues = number[-1] + 1
            apart = (1 + max(int(stop.max()), int(high.max()))) * np.arange(residues)
            start, stop = start + apart[number], stop + apart[number]
            low, high = (low[:, None] + apart).ravel(), (high[:, None] + apart).ravel()
        first = stop.searchsorted(low, "right")
        many = np.maximum(start.searchsorted(high) - first, 0)
        row = np.arange(len(many)).repeat(many)
        i = np.arange(len(row)) + (first + many - many.cumsum())[row]
        return row // residues, i

    def within(self, low: Column, high: Column) -> tuple[Column, Places]:
        """The parts of the places in the tokens `[low, high)` of each row: (row, parts); a part keeps its place's `of` and
        has its own `at`. Parts are in the order of the rows."""
        row, i = self.meeting(low, high)
        start, stop, step = self.start[i], np.minimum(self.stop[i], high[row]), self.step
        skipped = np.maximum(-(-(low[row] - start) // step), 0)
        parts = Places(start + skipped * step, stop, self.at[i] + skipped, self.of[i], step)
        kept = parts.start < parts.stop
        return row[kept], Places(parts.start[kept], stop[kept], parts.at[kept], parts.of[kept], step)

    @property
    def lengths(self) -> Column:
        return -(-(self.stop - self.start) // self.step)


def _before(lengths: Column, of: Column) -> Column:
    """The tokens before each row in its buffer. of: the buffers, ascending."""
    before = np.cumsum(lengths) - lengths
    return before - before[np.searchsorted(of, of)]


def places_of(layout: Layout, cu_seqlens: CuSeqlens, world: int) -> Places:
    """Where each rank holds the tokens of the sequence."""
    if isinstance(layout.split, Chunks) and layout.inner == 1:
        whole = cu_seqlens if layout.per_sequence else (0, cu_seqlens[-1])
        return Places.in_chunks(layout.split.table(world), whole)
    return Places.of_shards(layout.shards(cu_seqlens, world))


def band_rows(band: Band, cu_seqlens: CuSeqlens) -> Rectangles:
    """A band within every sequence, with bounds also where they cut nothing."""
    cu = np.array(cu_seqlens, np.int64)[:, None]
    x = np.empty((len(cu) - 1, 6), np.int64)
    x[:, [Q0, K0]], x[:, [Q1, K1]] = cu[:-1], cu[1:]
    x[:, LO:] = rectangle((0, 0), (0, 0), band)[LO:]
    return x


def needed(mask: Rectangles, q: Places) -> NDArray[np.int64]:
    """The global positions of the keys that some query of each rank sees: `[n, 3]` (start, stop, rank), sorted, disjoint."""
    row, q = q.within(mask[:, Q0], mask[:, Q1])
    last = q.start + (q.lengths - 1) * q.step
    low = np.maximum(mask[row, K0], q.start + mask[row, LO])
    return union(low, np.minimum(mask[row, K1], last + mask[row, HI] + 1), q.of)


def without(needs: NDArray[np.int64], held: Places) -> NDArray[np.int64]:
    """As `needed`, without the keys that a rank holds itself; it needs all of these."""
    apart = int(held.stop.max(initial=0)) + 1
    # each rank's positions by themselves, in one column: an edge of both ends what it begins
    edges = [x + of * apart for x, of in ((needs[:, :2], needs[:, 2:]), (held.start, held.of), (held.stop, held.of))]
    start, stop = np.sort(np.concatenate([x.ravel() for x in edges])).reshape(-1, 2).T
    rank = start // apart
    rows = np.stack([start - rank * apart, stop - rank * apart, rank], 1)
    return rows[start < stop]


def pairs_of(mask: Rectangles, q: Places) -> int:
    """The (query, key) pairs of these queries, which lie in runs of neighbours."""
    row, q = q.within(mask[:, Q0], mask[:, Q1])
    x = mask[row]
    x[:, Q0], x[:, Q1] = q.start, q.stop
    return int(pairs(x).sum())


def cut(mask: Rectangles, q: Places, k: Places) -> Cut:
    """The mask's parts at each pair of a query and a key place, sorted by buffer, queries, keys. A part's buffer is the sum of
    the numbers `of` of its queries and its keys, of which one is usually 0."""
    s = q.step
    assert s == k.step or not len(k.start), "queries and keys are spaced alike"
    row, i = q.meeting(mask[:, Q0], mask[:, Q1])
    q0, q1, k0, k1, lo, hi = mask[row].T
    q0, q1 = np.maximum(q0, q.start[i]), np.minimum(q1, q.stop[i])
    k0, k1 = np.maximum(k0, q0 + lo), np.minimum(k1, q1 + hi)
    part, j = k.meeting(k0, k1)
    i, row, lo, hi = i[part], row[part], lo[part], hi[part]
    from_q, from_k = q.start[i], k.start[j]
    shift = from_q - from_k
    x = np.empty((8, len(part)), np.int64)
    x[Q0], x[Q1] = q0[part] - from_q, q1[part] - from_q
    x[K0], x[K1] = np.maximum(k0[part] - from_k, 0), np.minimum(k1[part], k.stop[j]) - from_k
    x[LO], x[HI], x[BUFFER], x[SOURCE] = lo + shift, hi + shift, q.of[i] + k.of[j], row
    if s > 1:
        x[:HI], x[HI] = -(-x[:HI] // s), x[HI] // s
        x[LO, lo <= -UNBOUNDED] = -UNBOUNDED
        x[HI, hi >= UNBOUNDED] = UNBOUNDED
    to_q, to_k = q.at[i], k.at[j]
    x[:K0] += to_q
    x[K0:LO] += to_k
    x[LO:BUFFER] += to_k - to_q
    # without the queries and keys that have no pair
    q0, q1, k0, k1, lo, hi = x[:BUFFER]
    x[Q0], x[Q1] = np.maximum(q0, k0 - hi), np.minimum(q1, k1 - lo)
    x[K0], x[K1] = np.maximum(k0, q0 + lo), np.minimum(k1, q1 + hi)
    kept = (q0 < q1) & (k0 < k1) & (lo <= hi)
    if not kept.all():
        x = x[:, kept]
    return x[:, np.lexsort((x[K0], x[Q0], x[BUFFER]))]


def keys_by_buffer(x: Cut) -> NDArray[np.int64]:
    """`[n, 3]`: the keys of each buffer that some query sees, as (start, stop, buffer); sorted, disjoint."""
    return union(x[K0], x[K1], x[BUFFER])


def with_keys(x: Cut, keys: NDArray[np.int64]) -> Cut:
    """The parts with their keys where they lie once these keys of each buffer (start, stop, buffer) are put side by side."""
    places = Places.side_by_side(keys)
    apart = int(x[K1].max(initial=0)) + 1
    i = np.searchsorted(places.start + places.of * apart, x[K0] + x[BUFFER] * apart, "right") - 1
    x[K0:BUFFER] += (places.at - places.start)[i]
    return x


# The parts of one mask rectangle in one buffer that are one rectangle with one band


def merged(x: Cut) -> Cut:
    """Joins neighbours of one mask rectangle in one buffer, if one rectangle with one band has exactly their pairs."""
    if not _alike(x).any():
        return x
    x[HI, x[HI] > x[K1] - 1 - x[Q0]] = UNBOUNDED  # cuts nothing, nor would it in a rectangle with fewer queries
    x[LO, x[LO] < x[K0] - x[Q1] + 1] = -UNBOUNDED
    return _above(_beside(x))


def _alike(x: Cut) -> NDArray[np.bool_]:
    """Of each part but the last, whether the next one is of the same mask rectangle and buffer."""
    alike: NDArray[np.bool_] = (x[BUFFER:, 1:] == x[BUFFER:, :-1]).all(0)
    return alike


def _beside(x: Cut) -> Cut:
    """Same queries, adjacent keys, no bound that cuts between: whole runs at once."""
    a, b = x[:, :-1], x[:, 1:]
    one = _alike(x) & (a[Q0] == b[Q0]) & (a[Q1] == b[Q1]) & (a[K1] == b[K0])
    one &= (a[HI] >= a[K1] - 1 - a[Q0]) & (b[LO] <= b[K0] - b[Q1] + 1)
    if not one.any():
        return x
    first, last = np.concatenate([[True], ~one]), np.concatenate([~one, [True]])
    joined = x[:, first]
    joined[K1], joined[HI] = x[K1, last], x[HI, last]
    return joined


def _above(x: Cut) -> Cut:
    """Pairs of adjacent queries. In the hull of both, query q sees the keys from max(k0, q + lo) to min(k1, q + hi + 1). These
    ends are linear in q between the queries at which a bound begins to cut, so they are those of both rectangles if they are
    equal at each one's first and last query."""
    (i,) = (_alike(x) & (x[Q1, :-1] == x[Q0, 1:])).nonzero()
    if not len(i):
        return x
    both = x[:, [i, i + 1]]  # [8, 2, n]
    k0, k1, lo, hi = both[K0].min(0), both[K1].max(0), both[LO].max(0), both[HI].min(0)
    query = np.array([both[Q0], both[Q1] - 1])  # [first or last, 2, n]
    ends = np.minimum(k1, query + hi + 1) == np.minimum(both[K1], query + both[HI] + 1)
    starts = np.maximum(k0, query + lo) == np.maximum(both[K0], query + both[LO])
    same = (ends & starts).all((0, 1))
    joined, last = [], -2  # of a chain every second pair
    for n, part in enumerate(np.where(same, i, -1).tolist()):
        if part > last + 1:
            joined.append(n)
            last = part
    first = i[joined]
    x[Q1, first] = x[Q1, first + 1]
    x[K0:BUFFER, first] = np.array([k0, k1, lo, hi])[:, joined]
    kept = np.ones(x.shape[1], bool)
    kept[first + 1] = False
    return x[:, kept]


def settled(x: Cut) -> Cut:
    """Bounds that cut nothing become unbounded. But one query at the end of a causal bound stays causal, although it sees all
    keys: so a packed call has it beside the others."""
    one = (x[HI] == x[K1] - x[Q1]) & (x[LO] <= -UNBOUNDED // 2)
    x[HI, (x[HI] >= x[K1] - 1 - x[Q0]) & ~one] = UNBOUNDED
    x[LO, x[LO] <= x[K0] - x[Q1] + 1] = -UNBOUNDED
    return x


def bands_of(x: Cut) -> list[Band]:
    """The band of each rectangle, aligned bottom-right; equal ones are one object."""
    shift = x[K1] - x[Q1]
    left = np.where(x[LO] > -UNBOUNDED, shift - x[LO], -1)
    right = np.where(x[HI] < UNBOUNDED, x[HI] - shift, -1)
    known: dict[tuple[int, int], Band] = {}
    return [
        known.get(sides) or known.setdefault(sides, Band(*sides))
        for sides in zip(left.tolist(), right.tolist(), strict=True)
    ]


def groups_of(x: Cut) -> list[int]:
    """The number of each rectangle among those of its mask rectangle: a packed call has each sequence once."""
    order = np.argsort(x[SOURCE], kind="stable")
    source = x[SOURCE, order]
    group = np.empty(len(order), np.int64)
    group[order] = np.arange(len(order)) - np.searchsorted(source, source)
    return group.tolist()  # type: ignore[no-any-return]
