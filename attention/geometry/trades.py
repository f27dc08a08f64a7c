"""Shards of equally many tokens and nearly as many (query, key) pairs, for any mask and any length. Each rank starts with
a contiguous shard. Then ranks with many pairs trade tokens with ranks with few: both give as many, from their part with
the most and with the fewest pairs a token. So what moves is little, and most keys of a rank stay its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attention.geometry.layouts import Shard
from attention.masks.rectangles import EXACT, HI, K0, K1, LO, Q0, Q1, UNBOUNDED, Rectangles

EVEN = 1.01  # the most pairs of a rank over the mean at which trading ends
ENOUGH = 1.02  # at which nothing finer is tried
STARTS = (1, 4, 16)  # parts of a rank before it trades: with more, what it gives has more or fewer pairs a token
GRAINS = (128, 16, 1)  # a trade is a multiple of so many tokens: kernels work by tiles
GRAINS_OF_RANK = 16  # at least, but for single tokens

Numbers = NDArray[np.int64]
Pairs = NDArray[Any]  # int64, or float64 where sums may pass it


class PairsBefore:
    """The pairs of all queries before a position. A query's pairs are linear in its position between the ends of
    rectangles and of their bounds (`at`), so the sums are quadratic."""

    def __init__(self, x: Rectangles, tokens: int):
        first = np.minimum(x[:, K1], x[:, Q0] + x[:, HI] + 1) - np.maximum(x[:, K0], x[:, Q0] + x[:, LO])
        banded = np.flatnonzero((x[:, LO] > -UNBOUNDED) | (x[:, HI] < UNBOUNDED))
        start, stop = x[banded, Q0], x[banded, Q1]
        whole = np.clip(
            x[banded, K1] - 1 - x[banded, HI], start, stop
        )  # until here a query sees a key more than the last
        later = np.clip(x[banded, K0] - x[banded, LO], start, stop)  # from here on it no longer sees the first one
        end = first.copy()
        end[banded] += whole - start - (stop - later)
        steps_at, steps = np.concatenate([x[:, Q0], x[:, Q1]]), np.concatenate([first, -end])
        slopes_at, slopes = np.concatenate([start, whole, later, stop]), np.repeat([1, -1, -1, 1], len(banded))
        if 4 * len(x) > tokens:  # quicker than to sort the ends
            self.at = np.arange(tokens + 1)
        else:
            self.at = np.unique(np.concatenate([[0, tokens], steps_at, slopes_at]))
            steps_at, slopes_at = np.searchsorted(self.at, steps_at), np.searchsorted(self.at, slopes_at)
        kind = np.int64 if tokens <= EXACT else np.float64
        step, slope = (
            np.bincount(at, by, len(self.at)).astype(kind) for at, by in ((steps_at, steps), (slopes_at, slopes))
        )
        gap = np.append(np.diff(self.at), 0).astype(kind)
        self.slope = np.cumsum(slope)
        self.row = np.cumsum(step + np.append(0, (self.slope * gap)[:-1]))
        self.sum = np.append(0, np.cumsum(self._added(slice(None), gap))[:-1])

    def __call__(self, position: Numbers) -> Pairs:
        i = np.searchsorted(self.at, position, "right") - 1
        return self.sum[i] + self._added(i, position - self.at[i])

    def _added(self, i: slice | Numbers, n: Pairs) -> Pairs:
        return self.row[i] * n + self.slope[i] * (n * (n - 1) // 2)


@dataclass(frozen=True, eq=False)
class Parts:
    """Parts [start, stop) of the sequence and the rank of each."""

    start: Numbers
    stop: Numbers
    owner: Numbers

    @staticmethod
    def contiguous(tokens: int, world: int, n: int, grain: int) -> Parts:
        """Each rank's n parts, multiples of the grain but for the last."""
        each = tokens // world
        borders = np.append(np.arange(n) * (each // grain) // n * grain, each) + np.arange(world)[:, None] * each
        return Parts(borders[:, :-1].ravel(), borders[:, 1:].ravel(), np.repeat(np.arange(world), n))

    def given(self, part: Numbers, at_end: NDArray[np.bool_], many: Numbers, to: Numbers) -> Parts:
        """With so many tokens of the end or else of the start of each of these parts given to other ranks."""
        start, stop = self.start.copy(), self.stop.copy()
        first = np.where(at_end, stop[part] - many, start[part])
        stop[part] -= many * at_end
        start[part] += many * ~at_end
        parts = (start, first), (stop, first + many), (self.owner, to)
        return Parts(*map(np.concatenate, parts))

    def kept(self) -> Parts:
        """Without the empty ones."""
        some = self.start < self.stop
        return Parts(self.start[some], self.stop[some], self.owner[some])

    def shards(self, world: int) -> tuple[Shard, ...]:
        """By rank, in order; neighbours are one range."""
        shards: list[list[range]] = [[] for _ in range(world)]
        order = np.argsort(self.start)
        for start, stop, rank in zip(*(x[order].tolist() for x in (self.start, self.stop, self.owner)), strict=True):
            if shards[rank] and shards[rank][-1].stop == start:
                start = shards[rank].pop().start
            shards[rank].append(range(start, stop))
        return tuple(map(tuple, shards))


def even_shards(x: Rectangles, tokens: int, world: int, parts: int | None) -> tuple[Shard, ...]:
    """By rank, its ranges in order. Of several grains and numbers of parts the first ones that are even enough, else
    the most even ones. tokens: a multiple of the world. parts: of a rank at the start; None: the fewest."""
    each = tokens // world
    before = PairsBefore(x, tokens)
    best, least = Parts.contiguous(tokens, world, 1, 1), np.inf
    for n in (parts,) if parts else STARTS:
        for grain in GRAINS:
            if least > ENOUGH and (grain == 1 or each >= grain * GRAINS_OF_RANK):
                start = Parts.contiguous(tokens, world, n, grain).kept()
                traded, uneven = _traded(before, start, tokens, world, grain)
                if uneven < least:
                    best, least = traded, uneven
    return best.shards(world)


def _traded(before: PairsBefore, parts: Parts, tokens: int, world: int, grain: int) -> tuple[Parts, float]:
    """The parts after trades, and the most pairs of a rank over the mean. In a round the rank with the most pairs trades
    with the one with the fewest, the second with the second, and so on; excess halves in each, so that their number is
    logarithmic in the world; a part moves at a time."""
    mean = before(np.array([tokens]))[0] / world
    for _ in range(2 * world.bit_length() + 8 + len(parts.start) // world):
        pairs = before(parts.stop) - before(parts.start)
        loads = np.bincount(parts.owner, pairs, world)
        if loads.max() <= mean * EVEN:
            break
        order = np.argsort(-loads, kind="stable")
        high, low = order[: world // 2], order[::-1][: world // 2]
        above = loads[high] > mean * EVEN
        high, low = high[above], low[above]
        by = np.lexsort((pairs / (parts.stop - parts.start), parts.owner))
        first = np.searchsorted(parts.owner[by], np.arange(world + 1))
        dense, sparse = by[first[high + 1] - 1], by[first[low]]
        gap = loads[high] - loads[low]
        sizes = np.minimum(*(parts.stop[at] - parts.start[at] for at in (dense, sparse))) // grain * grain
        dense_end, sparse_end = _end(before, parts, dense, sizes, 1), _end(before, parts, sparse, sizes, -1)
        moved = _difference(before, parts, (dense, sparse), (dense_end, sparse_end))
        many = _nearest(moved, np.minimum(loads[high] - mean, gap / 2), sizes // grain, grain)
        useful = (moved(many) > 0) & (moved(many) < gap)
        if not useful.any():
            break
        high, low, dense, sparse, dense_end, sparse_end, many = (
            each[useful] for each in (high, low, dense, sparse, dense_end, sparse_end, many)
        )
        parts = parts.given(dense, dense_end, many, low).given(sparse, sparse_end, many, high).kept()
    loads = np.bincount(parts.owner, before(parts.stop) - before(parts.start), world)
    return parts, float(loads.max() / mean) if mean else 1.0


def _end(before: PairsBefore, parts: Parts, at: Numbers, sizes: Numbers, sign: int) -> NDArray[np.bool_]:
    """Whether so many tokens at the end of each of these parts have more pairs (sign -1: fewer) than at its start."""
    start, stop = parts.start[at], parts.stop[at]
    at_end, at_start = before(stop) - before(stop - sizes), before(start + sizes) - before(start)
    return np.asarray(sign * at_end > sign * at_start)


def _difference(
    before: PairsBefore, parts: Parts, at: tuple[Numbers, Numbers], ends: tuple[NDArray[np.bool_], NDArray[np.bool_]]
) -> Callable[[Numbers], Pairs]:
    """The pairs of so many tokens at the chosen ends of the first parts, less those of the second ones."""
    signs = [np.where(end, -1, 1) for end in ends]
    borders = [np.where(end, parts.stop[part], parts.start[part]) for part, end in zip(at, ends, strict=True)]
    known = [before(border) for border in borders]

    def moved(many: Numbers) -> Pairs:
        first, second = (
            sign * (before(border + sign * many) - pairs)
            for sign, border, pairs in zip(signs, borders, known, strict=True)
        )
        return first - second

    return moved


def _nearest(moved: Callable[[Numbers], Pairs], wanted: NDArray[np.float64], most: Numbers, grain: int) -> Numbers:
    """How many tokens, up to `most` grains, move nearly as many pairs as are wanted."""
    below, above = np.zeros_like(most), most
    for _ in range(int(most.max(initial=0)).bit_length()):
        middle = (below + above) // 2
        enough = moved(middle * grain) >= wanted
        below, above = np.where(enough, below, middle), np.where(enough, middle, above)
    below, above = below * grain, above * grain
    return np.where(np.abs(moved(below) - wanted) < np.abs(moved(above) - wanted), below, above)
