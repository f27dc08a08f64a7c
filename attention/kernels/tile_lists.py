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
from attention.masks.rectangles import HI, K0, K1, LO, Q0, Q1, Rectangles, pairs, spread

TILE = 128
FAR = 1 << 30  # a bound beyond all keys, in int32
Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Tiles:
    """The tiles of a pattern that hold a pair. partial and full: `[n, 2]` (tile of queries, tile of keys), in order. A
    tile is full where every query of it sees every key; one that extends past the last query or key is partial.
    shape: the numbers of tiles of queries and of keys. cut: the rectangles that partial tiles need, cut at tiles of queries.
    band: (lo, hi), where `lo <= k - q <= hi` alone says what is seen within all partial tiles."""

    shape: tuple[int, int]
    partial: Ints
    full: Ints
    cut: Rectangles
    band: tuple[int, int] | None

    @property
    def intervals(self) -> int:
        """The most intervals of keys that a query needs within partial tiles."""
        return most_at_once(self.cut)


@dataclass(frozen=True, eq=False)
class TileLists:
    """For each tile of queries its tiles of keys, or the other way round. partial and full: (counts, indices), int32 `[rows]`
    and `[rows, width]`; of row r the first counts[r] indices are valid, and ascend. A long list is cut in parts: row
    `tiles + i` continues row origin[i], so the kernel is given a copy of tile origin[i] behind the others."""

    partial: tuple[Any, Any]
    full: tuple[Any, Any]
    tiles: int
    origin: Any  # int64 [parts beyond the first], ascending


def tiles_of(pattern: Pattern) -> Tiles:
    """The tiles of a pattern; kept with it."""
    return pattern.keep("tiles", lambda: _tiles(pattern))


def _tiles(pattern: Pattern) -> Tiles:
    shape = -(-pattern.n_q // TILE), -(-pattern.n_k // TILE)
    rows = _cut_at_tiles(pattern.rectangles)
    q0, q1, k0, k1, lo, hi = rows.T
    owner, column = _ranges(np.maximum(k0, q0 + lo) // TILE, -(-np.minimum(k1, q1 + hi) // TILE))
    # the tiles within the keys that all queries see, where the queries are a whole tile
    start = -(-np.maximum(k0, q1 - 1 + lo) // TILE)
    stop = np.where(q1 - q0 == TILE, np.minimum(k1, q0 + hi + 1) // TILE, 0)
    edge = np.flatnonzero((column < start[owner]) | (column >= stop[owner]))
    inside = np.full(len(owner), TILE * TILE)
    x, key = rows[owner[edge]], column[edge] * TILE
    x[:, K0], x[:, K1] = np.maximum(x[:, K0], key), np.minimum(x[:, K1], key + TILE)
    inside[edge] = pairs(x)
    tile = q0[owner] // TILE * shape[1] + column
    order = np.argsort(tile, kind="stable")
    tile = tile[order]
    first = np.flatnonzero(np.diff(tile, prepend=-1))
    tile = tile[first]
    if len(tile):  # several rows may fill a tile together
        inside = np.add.reduceat(inside[order], first)
    partial = inside < TILE * TILE
    needed = np.zeros(len(rows), bool)
    needed[owner[order[np.repeat(partial, np.diff(first, append=len(order)))]]] = True
    cut, tiles = rows[needed], np.stack(np.divmod(tile, max(1, shape[1])), 1)
    return Tiles(shape, tiles[partial], tiles[~partial], cut, _band(cut, tiles[partial], inside[partial], pattern))


def _cut_at_tiles(x: Rectangles) -> Rectangles:
    """The rectangles, cut at every tile of queries; sorted by queries."""
    owner, tile = _ranges(x[:, Q0] // TILE, -(-x[:, Q1] // TILE))
    rows = x[owner]
    rows[:, Q0], rows[:, Q1] = np.maximum(rows[:, Q0], tile * TILE), np.minimum(rows[:, Q1], tile * TILE + TILE)
    return rows[np.argsort(rows[:, Q0], kind="stable")]


def _band(rows: Rectangles, tiles: Ints, inside: Ints, pattern: Pattern) -> tuple[int, int] | None:
    """The one band of all rows, if it keeps no other pair of the tiles. inside: the pairs that the rows keep."""
    if not len(rows) or (rows[:, LO:] != rows[0, LO:]).any():
        return None
    x = np.tile(rows[0], (len(tiles), 1))
    x[:, [Q0, K0]] = tiles * TILE
    x[:, [Q1, K1]] = np.minimum(tiles * TILE + TILE, (pattern.n_q, pattern.n_k))
    lo, hi = np.clip(rows[0, LO:], -FAR, FAR).tolist()
    return (lo, hi) if (pairs(x) == inside).all() else None


def most_at_once(rows: Rectangles) -> int:
    """The most rectangles that have a query in common."""
    at = np.concatenate([rows[:, Q1] * 2, rows[:, Q0] * 2 + 1])  # ends before starts
    step = np.repeat([-1, 1], len(rows))
    return int(np.cumsum(step[np.argsort(at, kind="stable")]).max(initial=0))


def listed(tiles: Tiles, by_keys: bool = False, most: int = FAR) -> TileLists:
    """For each tile of queries its tiles of keys; by_keys: for each tile of keys its tiles of queries. most: the longest part
    of a list, with first the partial tiles, then the full ones."""
    partial, full = (x[:, ::-1] if by_keys else x for x in (tiles.partial, tiles.full))
    rows, columns = tiles.shape[::-1] if by_keys else tiles.shape
    entries = np.concatenate([2 * partial[:, 0] * columns + partial[:, 1], (2 * full[:, 0] + 1) * columns + full[:, 1]])
    row_and_kind, column = np.divmod(np.sort(entries), max(1, columns))
    row, is_full = row_and_kind // 2, row_and_kind % 2 == 1
    counts = np.bincount(row, minlength=rows)
    more = np.maximum(0, (counts - 1) // most)  # parts beyond the first
    part = _position(row, counts) // most
    row = np.where(part == 0, row, rows + (np.cumsum(more) - more)[row] + part - 1)
    total = rows + int(more.sum())
    partial_lists, full_lists = (_padded(row[kind], column[kind], total) for kind in (~is_full, is_full))
    return TileLists(partial_lists, full_lists, rows, np.repeat(np.arange(rows), more))


def _padded(row: Ints, column: Ints, rows: int) -> tuple[Any, Any]:
    """(counts, indices) of these entries, of which each row's columns ascend."""
    counts = np.bincount(row, minlength=rows)
    width = max(2, int(counts.max(initial=0)))  # at width 1 the stride of the last dim would be ambiguous
    indices = np.zeros((rows, width), np.int32)
    order = np.argsort(row, kind="stable")
    indices[row[order], _position(row[order], counts)] = column[order]
    return counts.astype(np.int32), indices


def _position(row: Ints, counts: Ints) -> Ints:
    """The place of each entry within its row; entries lie row by row."""
    return np.arange(len(row)) - (np.cumsum(counts) - counts)[row]


def row_intervals(rows: Rectangles, n_q: int, device: torch.device) -> Tensor:
    """The keys that each query sees in these rectangles: int32 `[n, 2 * most_at_once]`, start and stop of each
    interval, in order; those that a query lacks are (0, 0) and stand first. n is n_q, rounded up to a whole tile."""
    most = max(1, most_at_once(rows))
    table = torch.zeros(-(-n_q // TILE) * TILE * most, 2, dtype=torch.int32, device=device)
    if len(rows):
        x = uploaded(np.clip(rows, -FAR, FAR).astype(np.int32), device)
        lengths = (x[:, Q1] - x[:, Q0]).long()
        total = int((rows[:, Q1] - rows[:, Q0]).sum())
        owner = torch.repeat_interleave(lengths, output_size=total)
        row, place = x[owner], torch.arange(total, device=device)
        query = row[:, Q0] + place - (lengths.cumsum(0) - lengths)[owner]
        start = torch.maximum(row[:, K0], query + row[:, LO])
        stop = torch.minimum(row[:, K1], query + row[:, HI] + 1)
        order = (query * (1 << 32) + start).argsort()
        query = query[order]
        slot = (query + 1) * most - (torch.searchsorted(query, query, right=True) - place)
        table[slot] = torch.stack([start, stop], 1)[order].int()
    return table.view(-1, 2 * most)


def _ranges(start: Ints, stop: Ints) -> tuple[Ints, Ints]:
    """(i, x) for each x of [start[i], stop[i])."""
    owner, number = spread(np.maximum(stop - start, 0))
    return owner, number + start[owner]
