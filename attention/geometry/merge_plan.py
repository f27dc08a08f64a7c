"""The plan of merging partial results ("parts") that arrive one by one and cover different tokens, declared in advance.

A token's first part is kept as it is. Each further part is merged into a running result in the accumulation dtype, but
the last part is merged and rounded into the final result at once. So most tokens need one sweep over memory. Pure
Python."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from attention.masks.band import Interval, Intervals
from attention.memo import MOST_PARTS, memo

FEW = 8  # up to this number, sweeps of one kind are cheaper one by one, without copies


@dataclass(frozen=True)
class Sweep:
    """One sweep over the tokens `rows` of the result.

    at: where these tokens lie in the current part.
    first, last: whether the current part is the first or the last one of these tokens.
    kept: (number of the kept part, where these tokens lie in it), if they have one earlier part, which was kept."""

    rows: Intervals
    at: Intervals
    first: bool
    last: bool
    kept: tuple[int, Intervals] | None = None


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


@memo(lambda plan, *_: 1 + sum(map(len, plan.of)), subjects=MOST_PARTS)
def merge_plan(n: int, parts: tuple[Intervals, ...]) -> MergePlan:
    """The plan for a result of `n` tokens. A part holds the tokens of its disjoint intervals, side by side."""
    alike = Counter(parts)  # most are
    # the tokens are cut into segments wherever a part begins or ends
    edges = sorted({0, n, *(edge for intervals in alike for interval in intervals for edge in interval)})
    number_of = {edge: i for i, edge in enumerate(edges)}
    left = [0] * (len(edges) - 1)  # the parts that are still to come of each segment
    for intervals, times in alike.items():
        for start, stop in intervals:
            for i in range(number_of[start], number_of[stop]):
                left[i] += times
    several = [i for i, count in enumerate(left) if count > 2]
    running = (edges[several[0]], edges[several[-1] + 1]) if several else (0, 0)
    bare = tuple(segment for segment, count in zip(pairwise(edges), left, strict=True) if not count)
    # of each segment its only part so far, and where it lies there: None before the first part, empty once it is combined
    kept: list[tuple[int, int] | tuple[()] | None] = [None] * len(left)
    until, sweeps = list(range(len(parts))), []
    for number, intervals in enumerate(parts):
        by_kind: dict[tuple[bool, bool, int | None], list[Sequence[int]]] = {}
        at = 0
        for first, after in intervals:
            for i in range(number_of[first], number_of[after]):
                before, size = kept[i], edges[i + 1] - edges[i]
                left[i] -= 1
                one, place = before or (None, at)
                if one is not None:
                    until[one] = number
                kept[i] = (number, at) if before is None else ()
                spans = by_kind.setdefault((before is None, left[i] == 0, one), [])
                span = (edges[i], at, place)
                if spans and tuple(x + spans[-1][3] for x in spans[-1][:3]) == span:
                    spans[-1] = (*spans[-1][:3], spans[-1][3] + size)
                else:
                    spans.append((*span, size))
                at += size
        sweeps.append(tuple(sweep for kind, spans in by_kind.items() for sweep in _sweeps(*kind, spans)))
    return MergePlan(n, parts[:1] == (((0, n),),), tuple(sweeps), tuple(until), running, bare)


def _sweeps(first: bool, last: bool, kept: int | None, spans: list[Sequence[int]]) -> Iterator[Sweep]:
    """Sweeps of one kind over spans (start in the result, in the part, in the kept part, tokens)."""
    for together in [spans] if len(spans) > FEW else [[span] for span in spans]:
        rows, at, places = (tuple((span[i], span[i] + span[3]) for span in together) for i in range(3))
        yield Sweep(rows, at, first, last, None if kept is None else (kept, places))
