"""Shards of equally many tokens and nearly as many (query, key) pairs, for any mask and any length.

The sequence is a necklace: a string of tokens whose ends are joined. Some window of half of its tokens has half of its
pairs, because windows that start one after another cover every token as often. So the necklace is cut into this window
and the rest, which are necklaces of half of the ranks each, until each is of one rank. That needs two cuts for each
rank, the fewest for two measures (Alon, Splitting necklaces, 1987)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from attention.geometry.intervals import by_number
from attention.geometry.layouts import Shard
from attention.masks.rectangles import EXACT, HI, K0, K1, LO, Q0, Q1, Rectangles

EVEN = 1.02  # the most pairs of a rank over the mean at which nothing finer is tried
GRAINS = (128, 16, 1)  # a window starts at a multiple of so many tokens: kernels work by tiles
STARTS = 64  # of windows that are compared at once

Numbers = NDArray[np.int64]
Pairs = NDArray[Any]  # int64, or float64 where sums may pass it


class PairsBefore:
    """The pairs of all queries before a position. A query's pairs are linear in its position between the ends of
    rectangles and of their bounds (`at`), so the sums are quadratic."""

    def __init__(self, x: Rectangles, tokens: int):
        start, stop = x[:, Q0], x[:, Q1]
        first = np.minimum(x[:, K1], start + x[:, HI] + 1) - np.maximum(x[:, K0], start + x[:, LO])
        whole = np.clip(x[:, K1] - 1 - x[:, HI], start, stop)  # until here a query sees a key more than the last
        later = np.clip(x[:, K0] - x[:, LO], start, stop)  # from here on it no longer sees the first one
        last = first + (whole - start) - (stop - later)
        at, none = np.concatenate([[0], start, whole, later, stop]), np.zeros_like(first)
        order = np.argsort(at, kind="stable")
        self.at = at[order]
        gap: Pairs = np.diff(self.at, append=tokens).astype(np.int64 if tokens <= EXACT else np.float64)
        self.slope = np.cumsum(np.append(0, np.repeat([1, -1, -1, 1], len(x)))[order])
        steps = np.concatenate([[0], first, none, none, -last])[order]
        self.row = np.cumsum(steps + np.append(0, (self.slope * gap)[:-1]))
        self.sum = np.append(0, np.cumsum(self._added(slice(None), gap))[:-1])

    def __call__(self, position: Numbers) -> Pairs:
        i = np.searchsorted(self.at, position, "right") - 1
        return self.sum[i] + self._added(i, position - self.at[i])

    def _added(self, i: slice | Numbers, n: Pairs) -> Pairs:
        return self.row[i] * n + self.slope[i] * (n * (n - 1) // 2)


class Necklace:
    """All shards end to end, rank r's from r T / W on: each part of the sequence with its first token `start` lies from `at`
    on."""

    def __init__(self, at: Numbers, start: Numbers, tokens: int, pairs: PairsBefore):
        order = np.argsort(at)
        self.at, self.start, self.tokens, self.pairs = at[order], start[order], tokens, pairs
        self.lengths = np.diff(self.at, append=tokens)
        self.pairs_before = pairs(self.start)
        own = pairs(self.start + self.lengths) - self.pairs_before
        self.upto = np.cumsum(own) - own

    def before(self, position: Numbers) -> Pairs:
        """The pairs of all tokens that lie before a position."""
        i = np.searchsorted(self.at, position, "right") - 1
        return self.upto[i] + self.pairs(self.start[i] + position - self.at[i]) - self.pairs_before[i]

    def cut(self, positions: Numbers) -> tuple[Numbers, Numbers]:
        """(where a part begins, its first token) of all parts, cut at these positions."""
        positions = np.union1d(self.at, positions)
        i = np.searchsorted(self.at, positions, "right") - 1
        return positions, self.start[i] + positions - self.at[i]

    def uneven(self, world: int) -> float:
        """The most pairs of a rank over the mean."""
        by_rank = np.diff(self.before(np.arange(world + 1) * (self.tokens // world)))
        return float(by_rank.max() * world / by_rank.sum()) if by_rank.any() else 1.0

    def halved(self, ranks: Numbers, grain: int) -> Necklace:
        """Each stretch of the necklace is turned, so that the first half of its ranks has its share of the pairs. ranks: of each
        stretch."""
        length, half = ranks * (self.tokens // int(ranks.sum())), ranks // 2
        begin, window = np.cumsum(length) - length, length * half // ranks
        whole = self.before(begin + length) - self.before(begin)
        low, high, last, stretch = np.zeros_like(length), length, False, np.arange(len(ranks))
        while True:
            starts = (low + (high - low) * np.arange(STARTS + 1)[:, None] // STARTS) // grain * grain
            first, after = (self.before(begin + x % length) + whole * (x >= length) for x in (starts, starts + window))
            more = after - first - whole * (half / ranks)
            if last:
                turn = starts[np.abs(more).argmin(0), stretch] % length
                break
            crossing = np.diff(np.sign(more), axis=0, append=np.sign(more[-1:])) != 0
            near = np.minimum(starts, length - starts)  # so that parts lie together
            best = np.where(crossing, near, self.tokens + np.abs(more)).argmin(0)
            low, high = starts[best, stretch], starts[best + crossing[best, stretch], stretch]
            last = int((high - low).max()) <= STARTS * grain
        at, start = self.cut(np.concatenate([begin + turn, begin + (turn + window) % length]))
        i = np.searchsorted(begin, at, "right") - 1
        return Necklace(begin[i] + (at - begin[i] - turn[i]) % length[i], start, self.tokens, self.pairs)

    def shards(self, world: int) -> tuple[Shard, ...]:
        """By rank, in order; neighbours are one range."""
        n = self.tokens // world
        at, start = self.cut(np.arange(world) * n)
        order = np.lexsort((start, at // n))
        lengths = np.diff(at, append=self.tokens)
        shards = by_number(at[order] // n, world, lengths[order], start[order])
        return tuple(tuple(range(*interval) for interval in intervals) for (intervals,) in shards)


def even_shards(x: Rectangles, tokens: int, world: int) -> tuple[Shard, ...]:
    """By rank, its ranges in order. tokens: a multiple of the world. Contiguous shards, or windows of several grains: the
    first that are even enough, else the most even ones."""
    pairs, zero = PairsBefore(x, tokens), np.zeros(1, np.int64)
    best = contiguous = Necklace(zero, zero, tokens, pairs)
    for grain in GRAINS:
        if best.uneven(world) <= EVEN:
            break
        necklace, ranks = contiguous, np.array([world])
        while ranks.max() > 1:
            necklace = necklace.halved(ranks, grain)
            ranks = np.stack([ranks // 2, ranks - ranks // 2], 1).ravel()
            ranks = ranks[ranks > 0]
        best = min(best, necklace, key=lambda x: x.uneven(world))
    return best.shards(world)
