"""A mask cut at the queries of one rank and the keys that it computes against: one sorted sweep for all steps, in numpy.

A place is a run of equally spaced tokens: `start, start + step, ..` below `stop` lie at `at, at + 1, ..` of a shard or of a
buffer of keys. At spacing s, pairs with local positions i and j have k - q = s (j - i) + const. So a band stays a band, and
striped shards need no case of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from attention.geometry.layouts import Chunks, CuSeqlens, Layout, Shard
from attention.masks.band import Band, Intervals
from attention.masks.mask import built
from attention.masks.rectangles import HI, K0, K1, LO, Q0, Q1, UNBOUNDED, Rectangles, pairs
from attention.memo import memo

if TYPE_CHECKING:
    from attention.geometry.schedules import Problem

Column = NDArray[np.int64]
Rows = NDArray[np.int64]  # [n, ...]
Cut = NDArray[np.int64]  # [8, n]: q0 q1 k0 k1 lo hi in local positions, the buffer of the keys, the mask's rectangle
BUFFER, SOURCE = 6, 7


@dataclass(frozen=True, eq=False)
class Places:
    """`[n]` each, sorted by the residue of the start, then by the start; no token is in two places of one `of`.

    of: the shard or buffer in which the tokens lie."""

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
        number, cu = np.array(table, np.int64)[:, None, :], np.array(cu_seqlens, np.int64)  # [W, 1, chunks]
        first, size = cu[:-1, None], np.diff(cu)[:, None] // number.size  # [sequences, 1]
        start = first + number * size
        at = np.cumsum(np.broadcast_to(size, start.shape[1:])).reshape(start.shape[1:]) - size
        rank = np.arange(len(table))[:, None, None]
        at, of = np.broadcast_to(at, start.shape), np.broadcast_to(rank, start.shape)
        return Places.sorted(start.ravel(), (start + size).ravel(), at.ravel(), of.ravel())

    @staticmethod
    def of_shards(shards: Sequence[Shard]) -> Places:
        """of: the number of the shard."""
        step = max((r.step for shard in shards for r in shard if len(r) > 1), default=1)
        rows = [(r.start, r.stop if r.step == step else r.start + 1, len(r)) for shard in shards for r in shard]
        start, stop, many = np.array(rows, np.int64).reshape(-1, 3).T
        of = np.repeat(np.arange(len(shards)), [len(shard) for shard in shards])
        stop = np.where(many > 0, stop, start)
        at = np.cumsum(many) - many
        at -= at[np.searchsorted(of, of)]
        return Places.sorted(start, stop, at, of, step)

    def where(self, kept: NDArray[np.bool_]) -> Places:
        return Places(self.start[kept], self.stop[kept], self.at[kept], self.of[kept], self.step)

    def only(self, of: int) -> Places:
        return self.where(self.of == of)

    def numbered(self, of: Column | int) -> Places:
        """With other numbers of shards or buffers."""
        return replace(self, of=np.broadcast_to(np.asarray(of, np.int64), self.of.shape))

    def beside(self, other: Places) -> Places:
        """These places and those of other buffers."""
        columns = ((self.start, other.start), (self.stop, other.stop), (self.at, other.at), (self.of, other.of))
        start, stop, at, of = (np.concatenate(both) for both in columns)
        return Places.sorted(start, stop, at, of, self.step)

    def meeting(self, low: Column, high: Column) -> tuple[Column, Column]:
        """All pairs (row, place) in which the tokens `[low, high)` of the row overlap with the place."""
        if not len(self.start) or not len(low):
            return np.zeros(0, np.int64), np.zeros(0, np.int64)
        residue = self.start % self.step
        number = np.concatenate([[0], np.cumsum(residue[1:] != residue[:-1])])
        # the places of each residue by themselves, in one sorted column
        apart = (1 + max(int(self.stop.max()), int(high.max()))) * np.arange(number[-1] + 1)
        first = np.searchsorted(self.stop + apart[number], (low[:, None] + apart).ravel(), "right")
        last = np.searchsorted(self.start + apart[number], (high[:, None] + apart).ravel(), "left")
        many = np.maximum(last - first, 0)
        before = np.cumsum(many) - many
        row = np.repeat(np.arange(len(many)), many)
        return row // len(apart), np.arange(len(row)) + (first - before)[row]

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


@memo(lambda found, *_: len(found.start), 1 << 20)
def layout_places(layout: Layout, cu_seqlens: CuSeqlens, world: int) -> Places:
    layout.check(cu_seqlens, world)
    if isinstance(layout.split, Chunks) and layout.inner == 1:
        whole = cu_seqlens if layout.per_sequence else (0, cu_seqlens[-1])
        return Places.in_chunks(layout.split.table(world), whole)
    return Places.of_shards(layout.shards(cu_seqlens, world))


def key_places(problem: Problem) -> Places:
    return layout_places(problem.layout, problem.cu_seqlens, problem.world)


def query_places(problem: Problem, rank: int | None = None) -> Places:
    """Of one rank, or of all."""
    found = layout_places(problem.q_layout, problem.cu_seqlens, problem.world)
    return found if rank is None else found.only(rank)


def mask_rows(problem: Problem) -> Rectangles:
    """The mask's rectangles over all positions."""
    if not isinstance(problem.form, Band):
        return problem.form.rectangles(problem.cu_seqlens[-1])
    return _band_rows(problem.form, problem.cu_seqlens)


def _band_rows(band: Band, cu_seqlens: CuSeqlens) -> Rectangles:
    cu = np.array(cu_seqlens, np.int64)
    x = np.empty((len(cu) - 1, 6), np.int64)
    x[:, Q0] = x[:, K0] = cu[:-1]
    x[:, Q1] = x[:, K1] = cu[1:]
    x[:, LO] = -band.left if band.left >= 0 else -UNBOUNDED
    x[:, HI] = band.right if band.right >= 0 else UNBOUNDED
    return x


def forget() -> None:
    """Empties the caches, so that the next cut builds the mask's rectangles again."""
    for kept in (built, layout_places, needs_by_rank, remote_needs_by_rank):
        kept.cache_clear()


# Which keys a rank needs


@memo(lambda found, *_: len(found), 1 << 20)
def needs_by_rank(problem: Problem) -> NDArray[np.int64]:
    """The global positions of the keys that some query of each rank sees: `[n, 3]` (start, stop, rank), sorted, disjoint."""
    mask = mask_rows(problem)
    if problem.q_layout.replicated:
        rank = np.repeat(np.arange(problem.world), len(mask))
        low, high = np.tile(mask[:, K0], problem.world), np.tile(mask[:, K1], problem.world)
    else:
        row, q = query_places(problem).within(mask[:, Q0], mask[:, Q1])
        rank, last = q.of, q.start + (q.lengths - 1) * q.step
        low = np.maximum(mask[row, K0], q.start + mask[row, LO])
        high = np.minimum(mask[row, K1], last + mask[row, HI] + 1)
    return _joined(low, high, rank, problem.cu_seqlens[-1] + 1)


def _joined(low: Column, high: Column, of: Column, apart: int) -> NDArray[np.int64]:
    """Disjoint, sorted intervals `[n, 3]` of each `of`; adjacent ones are joined. apart: above every position."""
    kept = low < high
    low, high = (low + of * apart)[kept], (high + of * apart)[kept]
    if not len(low):
        return np.zeros((0, 3), np.int64)
    order = np.argsort(low, kind="stable")
    low, high = low[order], np.maximum.accumulate(high[order])
    new = np.flatnonzero(low[1:] > high[:-1])
    start, stop = low[np.append(0, new + 1)], high[np.append(new, len(low) - 1)]
    of = start // apart
    return np.stack([start - of * apart, stop - of * apart, of], 1)


@memo(lambda found, *_: len(found), 1 << 20)
def remote_needs_by_rank(problem: Problem) -> NDArray[np.int64]:
    """As `needs_by_rank`, without the keys that a rank holds itself."""
    found, held, apart = needs_by_rank(problem), key_places(problem), problem.cu_seqlens[-1] + 1
    order = np.argsort(held.start + held.of * apart)
    start, stop = (held.start + held.of * apart)[order], (held.stop + held.of * apart)[order]
    none = np.zeros(len(start) + 1, np.int64)
    gaps = Places(np.append(0, stop), np.append(start, apart * problem.world), none, none)
    row, parts = gaps.within(found[:, 0] + found[:, 2] * apart, found[:, 1] + found[:, 2] * apart)
    rank = found[row, 2]
    return np.stack([parts.start - rank * apart, parts.stop - rank * apart, rank], 1)


def intervals_by(at: Column, lengths: Column, of: Column, count: int) -> list[Intervals]:
    """For each of `count` shards its intervals, where adjacent ones are joined. Rows are sorted by `of`, then by `at`."""
    end = at + lengths
    new = np.append(len(at) > 0, (at[1:] != end[:-1]) | (of[1:] != of[:-1]))
    first = np.flatnonzero(new)
    last = np.append(first[1:], len(at))[: len(first)] - 1
    rows = list(zip(at[first].tolist(), end[last].tolist(), strict=True))
    border = np.searchsorted(of[first], np.arange(count + 1)).tolist()
    return [tuple(rows[a:b]) for a, b in pairwise(border)]


def rank_pairs(problem: Problem, rank: int) -> int:
    """The (query, key) pairs that a rank computes."""
    mask = mask_rows(problem)
    row, q = query_places(problem, rank).within(mask[:, Q0], mask[:, Q1])
    x = mask[row]
    if q.step == 1:
        x[:, Q0], x[:, Q1] = q.start, q.stop
        return int(pairs(x).sum())
    many = q.lengths
    each = np.repeat(np.arange(len(many)), many)
    query = q.start[each] + (np.arange(len(each)) - (np.cumsum(many) - many)[each]) * q.step
    seen = np.minimum(x[each, K1], query + x[each, HI] + 1) - np.maximum(x[each, K0], query + x[each, LO])
    return int(np.maximum(seen, 0).sum())


def bands(problem: Problem) -> set[Band]:
    """The bands of all ranks' rectangles against the whole sequence, aligned bottom-right in each."""
    whole = np.array([0, problem.cu_seqlens[-1], 0, 0])[:, None]
    x = cut(mask_rows(problem), query_places(problem), Places(*whole))
    return set(bands_of(settled(x)))


# What a rank computes


def cut(mask: Rectangles, q: Places, k: Places, by_queries: bool = False) -> Cut:
    """The mask's parts at each pair of a query and a key place, sorted by buffer, queries, keys. A part's buffer is the `of` of
    its keys, or `by_queries` that of its queries."""
    s = q.step
    assert s == k.step or not len(k.start), "queries and keys are spaced alike"
    row, i = q.meeting(mask[:, Q0], mask[:, Q1])
    q0, q1 = np.maximum(mask[row, Q0], q.start[i]), np.minimum(mask[row, Q1], q.stop[i])
    k0, k1 = np.maximum(mask[row, K0], q0 + mask[row, LO]), np.minimum(mask[row, K1], q1 + mask[row, HI])
    kept = np.flatnonzero((q0 < q1) & (k0 < k1))
    part, j = k.meeting(k0[kept], k1[kept])
    part = kept[part]
    k0, k1 = np.maximum(k0[part], k.start[j]), np.minimum(k1[part], k.stop[j])
    i, q0, q1, row = i[part], q0[part], q1[part], row[part]
    from_q, from_k, q_at, k_at = q.start[i], k.start[j], q.at[i], k.at[j]
    lo, hi = mask[row, LO] - from_k + from_q, mask[row, HI] - from_k + from_q
    q0, q1, k0, k1 = q0 - from_q, q1 - from_q, k0 - from_k, k1 - from_k
    if s > 1:
        q0, q1, k0, k1, lo, hi = -(-q0 // s), -(-q1 // s), -(-k0 // s), -(-k1 // s), -(-lo // s), hi // s
        lo[mask[row, LO] <= -UNBOUNDED] = -UNBOUNDED
        hi[mask[row, HI] >= UNBOUNDED] = UNBOUNDED
    moved = k_at - q_at
    buffer = q.of[i] if by_queries else k.of[j]
    columns = [q0 + q_at, q1 + q_at, k0 + k_at, k1 + k_at, lo + moved, hi + moved, buffer, row]
    x = _trimmed(np.stack(columns))
    return x[:, np.lexsort((x[K0], x[Q0], x[BUFFER]))]


def _trimmed(x: Cut) -> Cut:
    q0, q1, k0, k1, lo, hi = x[:BUFFER]
    x[Q0], x[Q1] = np.maximum(q0, k0 - hi), np.minimum(q1, k1 - lo)
    x[K0], x[K1] = np.maximum(k0, x[Q0] + lo), np.minimum(k1, x[Q1] + hi)
    kept = (x[Q0] < x[Q1]) & (x[K0] < x[K1]) & (lo <= hi)
    return x if kept.all() else x[:, kept]


def keys_by_buffer(x: Cut) -> NDArray[np.int64]:
    """`[n, 3]`: the keys of each buffer that some query sees, as (start, stop, buffer); sorted, disjoint."""
    return _joined(x[K0], x[K1], x[BUFFER], int(x[K1].max(initial=0)) + 1)


def side_by_side(x: Cut, keys: NDArray[np.int64]) -> Cut:
    """The parts with their keys where they lie once the given keys of each buffer are put side by side."""
    start, stop, of = keys.T
    before = np.cumsum(stop - start) - (stop - start)
    shift = before - before[np.searchsorted(of, of)] - start
    apart = int(x[K1].max(initial=0)) + 1
    x = x.copy()
    x[K0:BUFFER] += shift[np.searchsorted(start + of * apart, x[K0] + x[BUFFER] * apart, "right") - 1]
    return x


def renumbered(x: Cut, buffer: Column) -> Cut:
    """The parts in the order of other numbers of their buffers."""
    order = np.argsort(buffer, kind="stable")
    x = x[:, order]
    x[BUFFER] = buffer[order]
    return x


def merged(x: Cut) -> Cut:
    """Joins neighbours of one mask rectangle in one buffer, if one rectangle with one band has exactly their pairs."""
    if x.shape[1] < 2 or not ((x[BUFFER, 1:] == x[BUFFER, :-1]) & (x[SOURCE, 1:] == x[SOURCE, :-1])).any():
        return x
    return _above(_beside(x))


def _alike(a: Cut, b: Cut) -> NDArray[np.bool_]:
    found: NDArray[np.bool_] = (a[BUFFER] == b[BUFFER]) & (a[SOURCE] == b[SOURCE])
    return found


def _beside(x: Cut) -> Cut:
    """Same queries, adjacent keys, no bound that cuts between: whole runs at once."""
    a, b = x[:, :-1], x[:, 1:]
    one = _alike(a, b) & (a[Q0] == b[Q0]) & (a[Q1] == b[Q1]) & (a[K1] == b[K0])
    one &= (a[HI] >= a[K1] - 1 - a[Q0]) & (b[LO] <= b[K0] - b[Q1] + 1)
    if not one.any():
        return x
    first = np.flatnonzero(np.append(True, ~one))
    last = np.append(first[1:], x.shape[1]) - 1
    joined = x[:, first]
    joined[K1], joined[HI] = x[K1, last], x[HI, last]
    return joined


def _above(x: Cut) -> Cut:
    """Adjacent queries. In the hull of both, query q sees the keys from max(k0, q + lo) to min(k1, q + hi + 1). These ends are
    linear in q between the queries at which a bound begins to cut, so they are those of both rectangles if they are equal at
    each one's first and last query."""
    if x.shape[1] < 2:
        return x
    at = np.flatnonzero(_alike(x[:, :-1], x[:, 1:]) & (x[Q1, :-1] == x[Q0, 1:]))
    if not len(at):
        return x
    a, b = x[:, at], x[:, at + 1]
    k0, k1 = np.minimum(a[K0], b[K0]), np.maximum(a[K1], b[K1])
    hi = np.where(_cuts_above(a), a[HI], np.where(_cuts_above(b), b[HI], _free(a, b, K1, HI, np.maximum, np.minimum)))
    lo = np.where(_cuts_below(a), a[LO], np.where(_cuts_below(b), b[LO], _free(a, b, K0, LO, np.minimum, np.maximum)))
    same = np.ones(len(at), bool)
    for y in (a, b):
        for query in (y[Q0], y[Q1] - 1):
            same &= np.minimum(k1, query + hi + 1) == np.minimum(y[K1], query + y[HI] + 1)
            same &= np.maximum(k0, query + lo) == np.maximum(y[K0], query + y[LO])
    if not same.any():
        return x
    join = np.zeros(x.shape[1] - 1, bool)
    join[at] = same
    begins = np.flatnonzero(join & np.append(True, ~join[:-1]))  # of each chain every second pair
    chain = begins[np.maximum(np.searchsorted(begins, np.arange(len(join)), "right") - 1, 0)]
    join &= (np.arange(len(join)) - chain) % 2 == 0
    into, chosen = np.flatnonzero(join), join[at]
    x = x.copy()
    x[Q1, into] = b[Q1, chosen]
    x[K0, into], x[K1, into], x[LO, into], x[HI, into] = k0[chosen], k1[chosen], lo[chosen], hi[chosen]
    return np.delete(x, into + 1, 1)


def _cuts_above(x: Cut) -> NDArray[np.bool_]:
    """Whether the upper bound takes a key from some query."""
    found: NDArray[np.bool_] = x[HI] < x[K1] - 1 - x[Q0]
    return found


def _cuts_below(x: Cut) -> NDArray[np.bool_]:
    found: NDArray[np.bool_] = x[LO] > x[K0] - x[Q1] + 1
    return found


def _free(a: Cut, b: Cut, end: int, bound: int, loose: np.ufunc, tight: np.ufunc) -> Column:
    """The bound of the hull where neither rectangle's bound cuts."""
    found: Column = np.where(a[end] == b[end], loose(a[bound], b[bound]), tight(a[bound], b[bound]))
    return found


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
    found: list[int] = group.tolist()
    return found


def first_alike(x: Cut, count: int) -> tuple[list[int], list[int]]:
    """For each of `count` buffers the first one before it, without a break, whose rectangles equal its own: most steps of a
    ring share their blocks. And where each buffer's rectangles begin."""
    border = np.searchsorted(x[BUFFER], np.arange(count + 1))
    many = np.diff(border)
    before = np.append(0, many[:-1])
    same = many == before
    at = np.flatnonzero(np.repeat(same, many))
    if len(at):
        rows = [*range(BUFFER), SOURCE]
        differs = (x[rows][:, at] != x[rows][:, at - many[x[BUFFER, at]]]).any(0)
        same[x[BUFFER, at[differs]]] = False
    return np.maximum.accumulate(np.where(same, 0, np.arange(count))).tolist(), border.tolist()
