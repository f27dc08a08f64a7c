"""Patterns of one kernel call, for tests of kernels that take them."""

import random

import numpy as np

from attention import masks
from attention.masks.mask import Mask
from attention.masks.pattern import Pattern
from attention.masks.rectangles import UNBOUNDED, rectangles
from tests.support.mask_definitions import DEFINITIONS, random_parameters
from tests.support.masks import built

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


def _of(mask: Mask, tokens: int) -> Pattern:
    return Pattern(tokens, tokens, mask.rectangles(tokens))


PATTERNS = {
    "causal": _of(masks.causal(), 384),
    "full": _pattern(256, 512, [(0, 256, 0, 512, *FREE)]),
    "window_and_global": _of(masks.global_window(199, 64, causal=True), 1000),
    "window_and_global_tile": _pattern(
        1024, 1024, [(0, 1024, 0, 1024, -255, 0), (256, 1024, 0, 128, -UNBOUNDED, -256)]
    ),
    "documents": _of(masks.documents([5, 300, 1, 1, 128, 127, 400, 62]), 1024),
    "prefix_documents": _of(masks.prefix_lm_documents([200, 17, 300, 90], [50, 17, 50, 50]), 607),
    "global_rows": _of(masks.global_window(150, 100), 640),
    "rows_without_keys": _pattern(700, 500, [(130, 200, 0, 500, *FREE), (400, 600, 100, 480, -300, -100)]),
    "nothing": _pattern(200, 300, []),
    "one_row": _pattern(1, 700, [(0, 1, 3, 600, *FREE)]),
}


def random_pattern(seed: int) -> Pattern:
    """Of a random mask; every other one of random rectangles."""
    draw = random.Random(seed)
    tokens, name = draw.randint(1, 900), draw.choice(list(DEFINITIONS)) if seed % 2 else "rectangles"
    return _of(built({"name": name, **random_parameters(name, tokens, draw)}), tokens)
