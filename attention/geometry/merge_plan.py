"""What has to be done with the parts of a result that come one by one and cover different tokens, when it is known
beforehand which: the first part of a token is kept as it is, one in between is combined with what is there into a wide
running result, and the last goes straight to the final one. Pure Python."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from attention.geometry.transfers import Intervals
from attention.geometry.weighted_lru import memo
from attention.masks.band import Interval

FEW = 8  # passes of a kind that are cheaper one by one, where they copy nothing


@dataclass(frozen=True)
class Pass:
    """Tokens `[start, stop)` of the result, which are those from `at` on of the part at hand. `kept`: the number of their
    first part and where they start in it, to be combined with while it is the only one. `first`, `last`: whether the part
    at hand is the tokens' first or last."""

    start: int
    stop: int
    at: int
    first: bool
    last: bool
    kept: tuple[int, int] | None = None

    def continues(self, before: Pass) -> bool:
        """Whether one pass can do both, `before` being that of the tokens before."""
        n = before.stop - before.start
        kept = before.kept and (before.kept[0], before.kept[1] + n)
        return (self.start, self.at, self.first, self.last, self.kept) == (
            before.stop, before.at + n, before.first, before.last, kept,
        )  # fmt: skip


@dataclass(frozen=True)
class Bundle:
    """Passes of one kind that are done together: the result's tokens, which those of the part at hand they are, and of which
    part, and where in it, the first ones to be combined with."""

    rows: Intervals
    at: Intervals
    first: bool
    last: bool
    kept: tuple[int, Intervals] | None

    @staticmethod
    def of(alike: Sequence[Pass]) -> Bundle:
        sizes = [x.stop - x.start for x in alike]
        kept = None
        if alike[0].kept:
            places = [x.kept[1] for x in alike if x.kept]
            kept = alike[0].kept[0], tuple((a, a + n) for a, n in zip(places, sizes, strict=True))
        at = tuple((x.at, x.at + n) for x, n in zip(alike, sizes, strict=True))
        return Bundle(tuple((x.start, x.stop) for x in alike), at, alike[0].first, alike[0].last, kept)


@dataclass(frozen=True)
class Passes:
    """`of[i]` are those of part i, and `bundles[i]` the same where many of a kind are one. `until[i]`: with which part the last pass reads the kept part i. `running`: what spans the
    tokens of three parts or more. `bare`: the tokens of none."""

    of: tuple[tuple[Pass, ...], ...]
    bundles: tuple[tuple[Bundle, ...], ...]
    until: tuple[int, ...]
    running: Interval
    bare: Intervals


@memo(lambda found, *_: 1 + sum(map(len, found.of)))
def passes(n: int, parts: tuple[Intervals, ...]) -> Passes:
    """For a result of `n` tokens. Each part has the tokens of its intervals, which are disjoint, side by side."""
    cuts = sorted({0, n, *(edge for intervals in parts for interval in intervals for edge in interval)})
    segments = list(pairwise(cuts))
    number_of = {start: i for i, (start, _) in enumerate(segments)}
    left = [0] * len(segments)  # parts still to come
    for intervals in parts:
        for i in _within(intervals, number_of, n):
            left[i] += 1
    bare = tuple(segment for segment, count in zip(segments, left, strict=True) if count == 0)
    several = [segment for segment, count in zip(segments, left, strict=True) if count > 2]
    seen: list[tuple[int, int] | None] = [None] * len(segments)  # the first part, and where the segment starts in it
    combined = [False] * len(segments)
    found = []
    until = list(range(len(parts)))
    for number, intervals in enumerate(parts):
        mine: list[Pass] = []
        at = 0
        for interval in intervals:
            for i in _within((interval,), number_of, n):
                start, stop = segments[i]
                left[i] -= 1
                kept = None if combined[i] else seen[i]
                one = Pass(start, stop, at, seen[i] is None, left[i] == 0, kept)
                if kept is not None:
                    until[kept[0]], combined[i] = number, True
                if seen[i] is None:
                    seen[i] = (number, at)
                at += stop - start
                if mine and one.continues(mine[-1]):
                    before = mine.pop()
                    one = Pass(before.start, stop, before.at, before.first, before.last, before.kept)
                mine.append(one)
        found.append(tuple(mine))
    running = (several[0][0], several[-1][1]) if several else (0, 0)
    return Passes(tuple(found), tuple(map(_bundled, found)), tuple(until), running, bare)


def _bundled(mine: tuple[Pass, ...]) -> tuple[Bundle, ...]:
    alike: dict[tuple[bool, bool, int | None], list[Pass]] = {}
    for each in mine:
        alike.setdefault((each.first, each.last, each.kept and each.kept[0]), []).append(each)
    found: list[Bundle] = []
    for several in alike.values():
        found += [Bundle.of(several)] if len(several) > FEW else [Bundle.of([each]) for each in several]
    return tuple(found)


def _within(intervals: Intervals, number_of: dict[int, int], n: int) -> Iterable[int]:
    """The numbers of the segments that intervals consist of."""
    for start, stop in intervals:
        if start < stop:
            yield from range(number_of[start], number_of[stop] if stop < n else len(number_of))
