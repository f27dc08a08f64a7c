"""Which parts cover which tokens of a sum, in ranges that one kernel can handle. Pure Python."""

from __future__ import annotations

from dataclasses import dataclass

from attention.geometry.transfers import Intervals, side_by_side
from attention.memo import MOST_PARTS, memo

MOST = 16  # entries that one kernel adds up


@dataclass(frozen=True)
class Entry:
    """Tokens `[start, stop)` of the sum are the tokens from `at` on of part number `part`."""

    part: int
    start: int
    stop: int
    at: int


@dataclass(frozen=True)
class SumRange:
    """Tokens `[start, stop)` of the sum, and the entries that overlap them."""

    start: int
    stop: int
    entries: tuple[Entry, ...]


@memo(lambda found, *_: 1 + sum([len(each.entries) for each in found]), subjects=MOST_PARTS)
def ranges(n: int, parts: tuple[Intervals, ...], most: int = MOST) -> tuple[SumRange, ...]:
    """`[0, n)` in as few ranges as possible, each overlapping at most `most` entries. No token may have more than
    `most` parts."""
    entries = []
    for number, intervals in enumerate(parts):
        for (start, stop), (at, _) in zip(intervals, side_by_side(intervals), strict=True):
            if stop > start:
                entries.append(Entry(number, start, stop, at))
    if len(entries) <= most:
        return (SumRange(0, n, tuple(entries)),)
    found: list[SumRange] = []
    begin, held = 0, dict.fromkeys(e for e in entries if e.start <= 0)
    for cut in sorted({e.start for e in entries} | {e.stop for e in entries} | {n}):
        if not 0 < cut < n:
            continue
        alive = [e for e in held if e.stop > cut]
        new = [e for e in entries if e.start == cut]
        if len(held) + len(new) > most:
            found.append(SumRange(begin, cut, tuple(held)))
            begin, held = cut, dict.fromkeys(alive)
        held |= dict.fromkeys(new)
    found.append(SumRange(begin, n, tuple(held)))
    return tuple(found)
