"""The plan of merging partial results ("parts") that arrive one by one and cover different tokens, declared in advance.

A token's first part is kept as it is. Each further part is merged into a running result in the accumulation dtype, but
the last part is merged and rounded into the final result at once. So most tokens need one sweep over memory. Pure
Python."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from attention.geometry.transfers import Intervals
from attention.masks.band import Interval
from attention.memo import MOST_PARTS, memo

FEW = 8  # up to this number, sweeps of one kind are cheaper one by one, without copies


@dataclass(frozen=True)
class Sweep:
    """One sweep over the tokens `[start, stop)` of the result.

    at: where these tokens start in the current part.
    first, last: whether the current part is the first or the last one of these tokens.
    kept: (number of the kept part, start of these tokens in it), if these tokens have one earlier part, which was kept."""

    start: int
    stop: int
    at: int
    first: bool
    last: bool
    kept: tuple[int, int] | None = None

    def continues(self, before: Sweep) -> bool:
        """Whether one sweep can do both this sweep and `before`, the sweep of the preceding tokens."""
        n = before.stop - before.start
        kept = before.kept and (before.kept[0], before.kept[1] + n)
        return (self.start, self.at, self.first, self.last, self.kept) == (
            before.stop, before.at + n, before.first, before.last, kept,
        )  # fmt: skip


@dataclass(frozen=True)
class Bundle:
    """Sweeps of one kind, done together. rows: the tokens of the result. at: their places in the current part. kept: (number
    of the kept part, their places in it)."""

    rows: Intervals
    at: Intervals
    first: bool
    last: bool
    kept: tuple[int, Intervals] | None

    @staticmethod
    def of(alike: Sequence[Sweep]) -> Bundle:
        sizes = [x.stop - x.start for x in alike]
        kept = None
        if alike[0].kept:
            places = [x.kept[1] for x in alike if x.kept]
            kept = alike[0].kept[0], tuple((a, a + n) for a, n in zip(places, sizes, strict=True))
        at = tuple((x.at, x.at + n) for x, n in zip(alike, sizes, strict=True))
        return Bundle(tuple((x.start, x.stop) for x in alike), at, alike[0].first, alike[0].last, kept)


@dataclass(frozen=True)
class MergePlan:
    """n: the tokens of the result. of: the sweeps of each part. whole: whether the first part has all tokens.
    until: for each part, the number of the last part whose sweeps read it.
    running: the span of all tokens with three parts or more. bare: the tokens without a part."""

    n: int
    whole: bool
    of: tuple[tuple[Sweep, ...], ...]
    until: tuple[int, ...]
    running: Interval
    bare: Intervals

    @cached_property
    def bundles(self) -> tuple[tuple[Bundle, ...], ...]:
        """The sweeps of each part, with many of one kind as one."""
        return tuple(map(_bundled, self.of))


@memo(lambda found, *_: 1 + sum(map(len, found.of)), subjects=MOST_PARTS)
def merge_plan(n: int, parts: tuple[Intervals, ...]) -> MergePlan:
    """The plan for a result of `n` tokens. A part holds the tokens of its disjoint intervals, side by side."""
    segments, left = _segments(n, parts)
    number_of = {start: i for i, (start, _) in enumerate(segments)}
    running = _span(segments, left)
    bare = tuple(segment for segment, count in zip(segments, left, strict=True) if count == 0)
    seen: list[tuple[int, int] | None] = [None] * len(segments)  # the first part, and where the segment starts in it
    combined = [False] * len(segments)
    found = []
    until = list(range(len(parts)))
    for number, intervals in enumerate(parts):
        mine: list[Sweep] = []
        at = 0
        for interval in intervals:
            for i in _within((interval,), number_of, n):
                start, stop = segments[i]
                left[i] -= 1
                kept = None if combined[i] else seen[i]
                one = Sweep(start, stop, at, seen[i] is None, left[i] == 0, kept)
                if kept is not None:
                    until[kept[0]], combined[i] = number, True
                if seen[i] is None:
                    seen[i] = (number, at)
                at += stop - start
                if mine and one.continues(mine[-1]):
                    before = mine.pop()
                    one = Sweep(before.start, stop, before.at, before.first, before.last, before.kept)
                mine.append(one)
        found.append(tuple(mine))
    return MergePlan(n, parts[:1] == (((0, n),),), tuple(found), tuple(until), running, bare)


def running_span(n: int, parts: Sequence[Intervals]) -> Interval:
    """`running` of the merge plan, without the plan."""
    return _span(*_segments(n, parts))


def _span(segments: list[Interval], counts: list[int]) -> Interval:
    several = [segment for segment, count in zip(segments, counts, strict=True) if count > 2]
    return (several[0][0], several[-1][1]) if several else (0, 0)


def _segments(n: int, parts: Sequence[Intervals]) -> tuple[list[Interval], list[int]]:
    """The tokens, cut wherever a part begins or ends, and the number of parts of each segment. Most parts are alike."""
    alike = Counter(parts)
    cuts = sorted({0, n, *(edge for intervals in alike for interval in intervals for edge in interval)})
    segments = list(pairwise(cuts))
    number_of = {start: i for i, (start, _) in enumerate(segments)}
    counts = [0] * len(segments)
    for intervals, times in alike.items():
        for i in _within(intervals, number_of, n):
            counts[i] += times
    return segments, counts


def _bundled(mine: tuple[Sweep, ...]) -> tuple[Bundle, ...]:
    alike: dict[tuple[bool, bool, int | None], list[Sweep]] = {}
    for each in mine:
        alike.setdefault((each.first, each.last, each.kept and each.kept[0]), []).append(each)
    found: list[Bundle] = []
    for several in alike.values():
        found += [Bundle.of(several)] if len(several) > FEW else [Bundle.of([each]) for each in several]
    return tuple(found)


def _within(intervals: Intervals, number_of: dict[int, int], n: int) -> Iterable[int]:
    """The numbers of the segments that make up the intervals."""
    for start, stop in intervals:
        if start < stop:
            yield from range(number_of[start], number_of[stop] if stop < n else len(number_of))
