"""Masks of one or few rectangles: full, causal, sliding windows, chunks, prefix LM, and any list of rectangles."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from attention.masks.band import Band
from attention.masks.checks import set_whole, whole_number, whole_numbers, within
from attention.masks.mask import Banded, Mask
from attention.masks.overlap import sharing
from attention.masks.rectangles import UNBOUNDED, Rectangles, from_columns, rectangle, trimmed

Part = tuple[tuple[int, int], tuple[int, int], tuple[int, int]]  # queries, keys, band


def full() -> Banded:
    """Every query sees every key."""
    return Banded()


def causal() -> Banded:
    """k <= q"""
    return Banded(-1, 0)


def sliding_window(left: int, right: int = 0) -> Banded:
    """q - left <= k <= q + right; -1 is unbounded.

    A window of (0, 0) is the diagonal. Raises ValueError for a bound below -1."""
    return Banded(whole_number("left", left, -1), whole_number("right", right, -1))


def chunked(chunk: int) -> Mask:
    """k <= q and k // chunk == q // chunk

    The chunked attention of Llama 4. The last chunk may be short. Raises ValueError for a chunk below 1."""
    return Chunked(chunk)


def prefix_lm(prefix: int) -> Mask:
    """k <= q or k < prefix

    Raises ValueError for a negative prefix; when built, for one longer than the sequence."""
    return PrefixLM(prefix)


def rectangles(parts: Sequence[Part]) -> Mask:
    """Any list of ((q0, q1), (k0, k1), (left, right)), each a band aligned bottom-right in its rectangle.

    Queries [q0, q1) see those keys of [k0, k1) with q - q1 - left <= k - k1 <= q - q1 + right; -1 is unbounded. A query
    in no rectangle sees no key. Raises ValueError where two rectangles share a pair; when built, for a rectangle that
    reaches beyond the sequence."""
    if isinstance(parts, str) or not isinstance(parts, Iterable):
        raise ValueError(
            f"parts={parts!r}: must be a list of [[q0,q1],[k0,k1],[left,right]], such as [[[0,8],[0,8],[-1,0]]]"
        )
    return Listed(tuple(_part(number, part) for number, part in enumerate(parts)))


@dataclass(frozen=True)
class Chunked(Mask):
    chunk: int

    name: ClassVar[str] = "chunked"

    def __post_init__(self) -> None:
        set_whole(self, "chunk", least=1)

    def build(self, tokens: int) -> Rectangles:
        start = np.arange(0, tokens, self.chunk)
        stop = np.minimum(start + self.chunk, tokens)
        return from_columns(start, stop, start, stop, hi=0)


@dataclass(frozen=True)
class PrefixLM(Mask):
    prefix: int

    name: ClassVar[str] = "prefix_lm"

    def __post_init__(self) -> None:
        set_whole(self, "prefix")

    def build(self, tokens: int) -> Rectangles:
        within("prefix", self.prefix, tokens)
        return from_columns([0, self.prefix], [self.prefix, tokens], 0, [self.prefix, tokens], hi=[UNBOUNDED, 0])


@dataclass(frozen=True)
class Listed(Mask):
    parts: tuple[Part, ...]

    name: ClassVar[str] = "rectangles"

    def __post_init__(self) -> None:
        shared = sharing(self._rows())
        if shared is not None:
            first, second = sorted(shared)
            raise ValueError(
                f"rectangles {first} and {second}, {self.parts[first]} and {self.parts[second]}: share a (query, key) pair; "
                "each pair may be in one rectangle only, so cut one of the two"
            )

    def build(self, tokens: int) -> Rectangles:
        for number, (q, k, _) in enumerate(self.parts):
            if max(q[1], k[1]) > tokens:
                raise ValueError(
                    f"rectangle {number}, queries {list(q)} and keys {list(k)}: the sequence has {tokens} tokens; "
                    f"end both at {tokens} or before"
                )
        return trimmed(self._rows())

    def _rows(self) -> Rectangles:
        return np.array([rectangle(q, k, Band(*band)) for q, k, band in self.parts], np.int64).reshape(-1, 6)


def _part(number: int, part: Any) -> Part:
    """A rectangle of the list, checked, as tuples of ints."""
    try:
        q, k, band = part
        (_, _), (_, _), (_, _) = q, k, band
    except (TypeError, ValueError):
        raise ValueError(f"rectangle {number}, {part}: must be [[q0,q1],[k0,k1],[left,right]]") from None
    q, k = whole_numbers(f"rectangle {number} queries", q), whole_numbers(f"rectangle {number} keys", k)
    left, right = whole_numbers(f"rectangle {number} band", band, -1)
    if q[0] > q[1] or k[0] > k[1]:
        raise ValueError(
            f"rectangle {number}, queries {list(q)} and keys {list(k)}: each must be [start,stop], start <= stop"
        )
    return (q[0], q[1]), (k[0], k[1]), (left, right)
