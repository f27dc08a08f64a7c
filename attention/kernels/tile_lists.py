"""The tiles of a pattern, for kernels with block sparsity: which tiles of 128 keys each tile of 128 queries sees in part,
and which wholly; and the keys that each query sees, as intervals, for the tiles that are seen in part.

numpy on the CPU, linear in the number of tiles that are seen. Kernels keep what they upload of them with the pattern."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attention.gpu.uploads import uploaded
from attention.masks.pattern import Pattern
from attention.masks.rectangles import HI, K0, K1, LO, Q0, Q1, Rectangles, pairs, trimmed

TILE = 128
FAR = 1 << 30  # a bound beyond all keys, in int32
LEAST_SPLIT = 32  # a list is cut in parts only where it is longer than this, and than twice the mean
Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Tiles:
    """The tiles of a pattern that hold a pair. partial and full: `[n, 2]` (tile of queries, tile of keys), in order. A
    tile is full where every query of it sees every key; one that extends past the last query or key is partial.
    rows: the rectangles cut at tiles of queries, `[m, 6]`; in_part: those of `rows` that some partial tile needs.
    band: (lo, hi), where `lo <= k - q <= hi` alone says what is seen within all partial tiles."""

    n_q: int
    n_k: int
    partial: Ints
    full: Ints
    rows: Rectangles
    in_part: NDArray[np.bool_]
    band: tuple[int, int] | None

    @property
    def intervals(self) -> int:
        """The most intervals of keys that a query needs within partial tiles."""
        return most_at_once(self.rows[self.in_part])


@dataclass(frozen=True, eq=False)
class Lists:
    """For each row of tiles, the tiles that it needs. counts: int32 `[rows]`; indices: int32 `[rows, width]`,
    ascending, of which the first counts[r] of row r are valid."""

    counts: Any
    indices: Any


@dataclass(frozen=True, eq=False)
class TileLists:
    """Lists by tiles of queries, or of keys. A long list is cut in parts: row `tiles + i` continues row origin[i], so
    the kernel is given a copy of tile origin[i] behind the others."""

    partial: Lists
    full: Lists
    tiles: int
    origin: Any  # int32 [parts beyond the first], ascending


def tiles_of(pattern: Pattern) -> Tiles:
    """The tiles of a pattern; kept with it."""
    if "tiles" not in pattern.kept:
        pattern.kept["tiles"] = _tiles(pattern)
    found: Tiles = pattern.kept["tiles"]
    return found


def _tiles(pattern: Pattern) -> Tiles:
    rows = cut_at_tiles(trimmed(pattern.rectangles))
    q0, q1, k0, k1, lo, hi = rows.T
    tile = q0 // TILE
    first, last = np.maximum(k0, q0 + lo), np.minimum(k1, q1 + hi)  # the keys that some query sees
    start, stop = first // TILE, -(-last // TILE)
    # the tiles within the keys that all queries see, where the queries are a whole tile
    whole_start = -(-np.maximum(k0, q1 - 1 + lo) // TILE)
    whole_stop = np.where(q1 - q0 == TILE, np.minimum(k1, q0 + hi + 1) // TILE, 0)
    whole_stop = np.maximum(np.minimum(whole_stop, stop), start)
    whole_start = np.minimum(np.maximum(whole_start, start), whole_stop)
    owner, column = _ranges(whole_start, whole_stop)
    full = tile[owner] * _many(pattern.n_k) + column
    before, left = _ranges(start, whole_start)
    after, right = _ranges(whole_stop, stop)
    owner, column = np.concatenate([before, after]), np.concatenate([left, right])
    key, inside, needs = _partial(rows, owner, column, tile, _many(pattern.n_k))
    filled = inside == TILE * TILE
    in_part = np.zeros(len(rows), bool)
    in_part[needs] = True
    partial, full = (_two(x, pattern.n_k) for x in (key[~filled], np.sort(np.concatenate([full, key[filled]]))))
    band = _band(rows[in_part], partial, inside[~filled], pattern)
    return Tiles(pattern.n_q, pattern.n_k, partial, full, rows, in_part, band)


def cut_at_tiles(x: Rectangles) -> Rectangles:
    """The rectangles, cut at every tile of queries; sorted by queries."""
    owner, tile = _ranges(x[:, Q0] // TILE, -(-x[:, Q1] // TILE))
    rows = x[owner]
    np.maximum(rows[:, Q0], tile * TILE, out=rows[:, Q0])
    np.minimum(rows[:, Q1], tile * TILE + TILE, out=rows[:, Q1])
    return rows[np.argsort(rows[:, Q0], kind="stable")]


def _partial(rows: Rectangles, owner: Ints, column: Ints, tile: Ints, width: int) -> tuple[Ints, Ints, Ints]:
    """The candidates (owner: row, column: tile of keys) as (tiles, the pairs in each, rows that those not filled need).
    Tiles are numbered tile of queries * width + tile of keys. Several rows may fill a tile together."""
    within = rows[owner]
    np.maximum(within[:, K0], column * TILE, out=within[:, K0])
    np.minimum(within[:, K1], column * TILE + TILE, out=within[:, K1])
    key = tile[owner] * width + column
    order = np.argsort(key, kind="stable")
    key, owner = key[order], owner[order]
    if not len(key):
        return key, key, owner
    first = np.flatnonzero(np.concatenate([[True], key[1:] != key[:-1]]))
    inside = np.add.reduceat(pairs(within[order]), first)
    needs = owner[np.repeat(inside < TILE * TILE, np.diff(np.append(first, len(key))))]
    return key[first], inside, needs


def _band(rows: Rectangles, tiles: Ints, inside: Ints, pattern: Pattern) -> tuple[int, int] | None:
    """The one band of all rows, if it keeps no other pair of the tiles. inside: the pairs that the rows keep."""
    if not len(rows) or (rows[:, LO:] != rows[0, LO:]).any():
        return None
    x = np.empty((len(tiles), 6), np.int64)
    x[:, Q0], x[:, K0] = tiles.T * TILE
    x[:, Q1], x[:, K1] = np.minimum(x[:, Q0] + TILE, pattern.n_q), np.minimum(x[:, K0] + TILE, pattern.n_k)
    x[:, LO:] = rows[0, LO:]
    lo, hi = np.clip(rows[0, LO:], -FAR, FAR).tolist()
    return (lo, hi) if (pairs(x) == inside).all() else None


def most_at_once(rows: Rectangles) -> int:
    """The most rectangles that have a query in common."""
    if not len(rows):
        return 0
    at = np.concatenate([rows[:, Q1] * 2, rows[:, Q0] * 2 + 1])  # ends before starts
    step = np.repeat([-1, 1], len(rows))
    return int(np.cumsum(step[np.argsort(at, kind="stable")]).max())


def by_queries(tiles: Tiles, most: int | None = None) -> TileLists:
    """For each tile of queries its tiles of keys. most: the longest part of a list; None: no list is cut."""
    return _listed(tiles.partial, tiles.full, _many(tiles.n_q), most)


def by_keys(tiles: Tiles, most: int | None = None) -> TileLists:
    """For each tile of keys its tiles of queries."""
    partial, full = (x[np.argsort(x[:, 1], kind="stable")][:, ::-1] for x in (tiles.partial, tiles.full))
    return _listed(partial, full, _many(tiles.n_k), most)


def balanced(tiles: Tiles, rows: int) -> int:
    """The longest part of a list, so that no row takes much longer than the mean of all."""
    mean = (len(tiles.partial) + len(tiles.full)) / max(1, rows)
    return max(LEAST_SPLIT, int(2 * mean) + 1)


def _listed(partial: Ints, full: Ints, rows: int, most: int | None) -> TileLists:
    n = np.bincount(partial[:, 0], minlength=rows)
    m = np.bincount(full[:, 0], minlength=rows)
    parts = np.ones(rows, np.int64) if most is None else np.maximum(1, -(-(n + m) // most))
    origin = np.repeat(np.arange(rows), parts - 1)
    base = rows + np.cumsum(parts - 1) - (parts - 1)  # where the second part of each list goes

    def row_of(entries: Ints, before: Ints, counts: Ints) -> Ints:
        row = entries[:, 0]
        if not len(origin):
            return row
        part = (np.arange(len(row)) - (np.cumsum(counts) - counts)[row] + before[row]) // (most or 1)
        return np.where(part == 0, row, base[row] + part - 1)

    total = rows + len(origin)
    lists = [
        _padded(row_of(entries, before, counts), entries[:, 1], total)
        for entries, before, counts in ((partial, np.zeros_like(n), n), (full, n, m))
    ]
    return TileLists(lists[0], lists[1], rows, origin.astype(np.int32))


def _padded(row: Ints, column: Ints, rows: int) -> Lists:
    counts = np.bincount(row, minlength=rows)
    width = max(2, int(counts.max(initial=0)))  # at width 1 the stride of the last dim would be ambiguous
    indices = np.zeros((rows, width), np.int32)
    if len(row) and (row[1:] < row[:-1]).any():
        order = np.argsort(row, kind="stable")
        row, column = row[order], column[order]
    indices[row, np.arange(len(row)) - (np.cumsum(counts) - counts)[row]] = column
    return Lists(counts.astype(np.int32), indices)


def row_intervals(rows: Rectangles, n_q: int, device: torch.device) -> Tensor:
    """The keys that each query sees in these rectangles: int32 `[n, 2 * most_at_once]`, start and stop of each
    interval, in order; those that a query lacks are (0, 0) and stand first. n is n_q, rounded up to a whole tile."""
    many = max(1, most_at_once(rows))
    table = torch.zeros(_many(n_q) * TILE * many, 2, dtype=torch.int32, device=device)
    if len(rows):
        x = uploaded(np.clip(rows, -FAR, FAR).astype(np.int32), device)
        lengths = (x[:, Q1] - x[:, Q0]).long()
        total = int((rows[:, Q1] - rows[:, Q0]).sum())
        of = torch.repeat_interleave(lengths, output_size=total)
        each = x[of]
        query = each[:, Q0] + torch.arange(total, device=device) - (lengths.cumsum(0) - lengths)[of]
        start = torch.maximum(each[:, K0], query + each[:, LO])
        stop = torch.minimum(each[:, K1], query + each[:, HI] + 1)
        slot = query * many
        if many > 1:
            order = (query * (1 << 32) + start).argsort()
            query, start, stop = query[order], start[order], stop[order]
            last = torch.searchsorted(query, query, right=True)
            slot = (query + 1) * many - (last - torch.arange(total, device=device))
        table[slot] = torch.stack([start, stop], 1).int()
    return table.view(-1, 2 * many)


def _many(tokens: int) -> int:
    return -(-tokens // TILE)


def _two(key: Ints, n_k: int) -> Ints:
    return np.stack(np.divmod(key, max(1, _many(n_k))), 1)


def _ranges(start: Ints, stop: Ints) -> tuple[Ints, Ints]:
    """(i, x) for each x of [start[i], stop[i])."""
    many = np.maximum(stop - start, 0)
    owner = np.repeat(np.arange(len(many)), many)
    return owner, np.arange(len(owner)) - (np.cumsum(many) - many)[owner] + start[owner]
