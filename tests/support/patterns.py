"""Patterns of one kernel call, for tests of kernels that take them."""

import itertools

import numpy as np

from attention.masks.pattern import Pattern
from attention.masks.rectangles import UNBOUNDED, pairs, rectangles

FREE = (-UNBOUNDED, UNBOUNDED)


def kept(pattern: Pattern) -> np.ndarray:
    """The pairs of a pattern, bool `[n_q, n_k]`."""
    keep = np.zeros((pattern.n_q, pattern.n_k), bool)
    for q0, q1, k0, k1, lo, hi in pattern.rectangles.tolist():
        distance = np.arange(k0, k1) - np.arange(q0, q1)[:, None]
        inside = (distance >= lo) & (distance <= hi)
        assert not (keep[q0:q1, k0:k1] & inside).any(), "no pair is in two rectangles"
        keep[q0:q1, k0:k1] |= inside
    return keep


def _pattern(n_q: int, n_k: int, rows: list[tuple[int, ...]]) -> Pattern:
    return Pattern(n_q, n_k, rectangles(rows))


def window_and_global(tokens: int, window: int, globals_: int) -> Pattern:
    """Causal: the last `window` keys and the first `globals_`."""
    rows = [(0, tokens, 0, tokens, 1 - window, 0), (window, tokens, 0, globals_, -UNBOUNDED, -window)]
    return _pattern(tokens, tokens, rows)


def documents(lengths: list[int]) -> Pattern:
    """Causal within each document."""
    starts = np.cumsum([0, *lengths]).tolist()
    rows = [(a, b, a, b, -UNBOUNDED, 0) for a, b in itertools.pairwise(starts)]
    return _pattern(starts[-1], starts[-1], rows)


def prefix_documents(lengths: list[int], prefix: int) -> Pattern:
    rows = []
    start = 0
    for n in lengths:
        p = min(prefix, n)
        rows += [
            (start, start + n, start, start + p, *FREE),
            (start + p, start + n, start + p, start + n, -UNBOUNDED, 0),
        ]
        start += n
    return _pattern(start, start, rows)


PATTERNS = {
    "causal": _pattern(384, 384, [(0, 384, 0, 384, -UNBOUNDED, 0)]),
    "full": _pattern(256, 512, [(0, 256, 0, 512, *FREE)]),
    "window_and_global": window_and_global(1000, 200, 64),
    "window_and_global_tile": window_and_global(1024, 256, 128),
    "documents": documents([5, 300, 1, 1, 128, 127, 400, 62]),
    "prefix_documents": prefix_documents([200, 17, 300, 90], 50),
    "global_rows": _pattern(
        640, 640, [(0, 100, 0, 640, *FREE), (100, 640, 0, 100, *FREE), (100, 640, 100, 640, -150, 150)]
    ),
    "rows_without_keys": _pattern(700, 500, [(130, 200, 0, 500, *FREE), (400, 600, 100, 480, -300, -100)]),
    "nothing": _pattern(200, 300, []),
    "one_row": _pattern(1, 700, [(0, 1, 3, 600, *FREE)]),
}


def random_pattern(seed: int) -> Pattern:
    """Disjoint rectangles with bands: a grid of random cuts, some of whose cells have a band."""
    rng = np.random.default_rng(seed)
    n_q, n_k = (int(x) for x in rng.integers(1, 900, 2))
    q_cuts, k_cuts = (
        sorted({0, n, *(int(rng.integers(0, n + 1)) // s * s for s in rng.choice([1, 64, 128], 4))}) for n in (n_q, n_k)
    )
    rows = []
    for a, b in itertools.pairwise(q_cuts):
        for c, d in itertools.pairwise(k_cuts):
            middle, kind = c - a + int(rng.integers(-200, 200)), rng.integers(5)
            wide = int(rng.integers(0, 300))
            bands = [FREE, (-UNBOUNDED, middle), (middle, UNBOUNDED), (middle - wide, middle)]
            if kind < 4:
                rows.append((a, b, c, d, *bands[kind]))
    found = _pattern(n_q, n_k, rows)
    assert pairs(found.rectangles).sum() == kept(found).sum()
    return found
