"""Masks of one or few rectangles: full, causal, sliding windows, chunks, prefix LM, a window with global tokens, and any list
of rectangles."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import numpy as np

from attention.masks.band import CAUSAL, Band
from attention.masks.checks import Count, Flag, Positive, whole_number, whole_numbers, within
from attention.masks.mask import Banded, family
from attention.masks.overlap import sharing
from attention.masks.rectangles import UNBOUNDED, Column, Rectangles, from_columns, rectangle, trimmed

Part = tuple[tuple[int, int], tuple[int, int], tuple[int, int]]  # queries, keys, band


def full() -> Banded:
    """Every query sees every key."""
    return Banded()


def causal() -> Banded:
    """k <= q"""
    return Banded(CAUSAL)


def sliding_window(left: int, right: int = 0) -> Banded:
    """q - left <= k <= q + right; -1 is unbounded.

    A window of (0, 0) is the diagonal. Raises ValueError for a bound below -1."""
    return Banded(Band(whole_number("left", left, -1), whole_number("right", right, -1)))


@family
def chunked(tokens: int, chunk: Positive) -> Rectangles:
    """k <= q and k // chunk == q // chunk

    The chunked attention of Llama 4. The last chunk may be short. Raises ValueError for a chunk below 1."""
    start = np.arange(0, tokens, chunk)
    stop = np.minimum(start + chunk, tokens)
    return from_columns(start, stop, start, stop, hi=0)


@family
def prefix_lm(tokens: int, prefix: Count) -> Rectangles:
    """k <= q or k < prefix

    Raises ValueError for a negative prefix; when built, for one longer than the sequence."""
    within("prefix", prefix, tokens)
    return from_columns([0, prefix], [prefix, tokens], 0, [prefix, tokens], hi=[UNBOUNDED, 0])


@family
def global_window(tokens: int, window: Count, global_tokens: Count, causal: Flag = False) -> Rectangles:
    """|q - k| <= window, or k < global_tokens, or q < global_tokens; with causal, k <= q, too

    A window of 0 is the diagonal. Raises ValueError for a negative number; when built, for more global tokens than the
    sequence has."""
    within("global_tokens", global_tokens, tokens)
    return window_and_globals(tokens, window, np.array([0]), np.array([global_tokens]), causal)


def window_and_globals(tokens: int, window: int, start: Column, stop: Column, causal: bool) -> Rectangles:
    """|q - k| <= window, or q or k is global; with `causal`, k <= q, too. start, stop: of the runs of global tokens,
    disjoint and sorted. Of n runs the rectangles are at most (n + 1) * (2 n + 1)."""
    after, before = np.append(0, stop), np.append(start, tokens)  # between the runs
    hi = 0 if causal else UNBOUNDED
    rows = from_columns(start, stop, 0, tokens, hi=hi)
    queries, upto = after[:, None], before[:, None]
    columns = from_columns(queries, upto, start, stop, hi=hi)
    windows = from_columns(queries, upto, after, before, -window, 0 if causal else window)
    return np.concatenate([rows, columns, windows])


def _disjoint(name: str, parts: Any) -> tuple[Part, ...]:
    """The parts as tuples of ints; no two share a pair."""
    if isinstance(parts, str) or not isinstance(parts, Iterable):
        raise ValueError(
            f"{name}={parts!r}: must be a list of [[q0,q1],[k0,k1],[left,right]], such as [[[0,8],[0,8],[-1,0]]]"
        )
    checked = tuple(_part(f"rectangle {number}", part) for number, part in enumerate(parts))
    shared = sharing(_rows(checked))
    if shared is not None:
        first, second = shared
        raise ValueError(
            f"rectangles {first} and {second}, {checked[first]} and {checked[second]}: share a (query, key) pair; "
            "each pair may be in one rectangle only, so cut one of the two"
        )
    return checked


def _part(name: str, part: Any) -> Part:
    try:
        q, k, band = part
        (_, _), (_, _), (_, _) = q, k, band
    except (TypeError, ValueError):
        raise ValueError(f"{name}, {part}: must be [[q0,q1],[k0,k1],[left,right]]") from None
    (q0, q1), (k0, k1) = whole_numbers(f"{name} queries", q), whole_numbers(f"{name} keys", k)
    left, right = whole_numbers(f"{name} band", band, -1)
    if q0 > q1 or k0 > k1:
        raise ValueError(f"{name}, queries {[q0, q1]} and keys {[k0, k1]}: each must be [start,stop], start <= stop")
    return (q0, q1), (k0, k1), (left, right)


def _rows(parts: Sequence[Part]) -> Rectangles:
    return np.array([rectangle(q, k, Band(*band)) for q, k, band in parts], np.int64).reshape(-1, 6)


@family
def rectangles(tokens: int, parts: Annotated[Sequence[Part], _disjoint]) -> Rectangles:
    """Any list of ((q0, q1), (k0, k1), (left, right)), each a band aligned bottom-right in its rectangle.

    Queries [q0, q1) see those keys of [k0, k1) with q - q1 - left <= k - k1 <= q - q1 + right; -1 is unbounded. A query
    in no rectangle sees no key. Raises ValueError where two rectangles share a pair; when built, for a rectangle that
    reaches beyond the sequence."""
    for number, (q, k, _) in enumerate(parts):
        if max(q[1], k[1]) > tokens:
            raise ValueError(
                f"rectangle {number}, queries {list(q)} and keys {list(k)}: the sequence has {tokens} tokens; "
                f"end both at {tokens} or before"
            )
    return trimmed(_rows(parts))
