"""The masks as boolean matrices, straight from their definitions and without code of `attention`: each pair (q, k) by itself.

`DEFINITIONS[name](S, **parameters)` is `[S, S]`, by numpy. `random_parameters(name, S, draw)` draws parameters that are valid
for a sequence of S tokens."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np

Dense = np.ndarray


def places(S: int) -> tuple[Dense, Dense]:
    """q as a column, k as a row."""
    return np.arange(S)[:, None], np.arange(S)[None, :]


def band(distance: Dense, left: int, right: int) -> Dense:
    """-1 is unbounded."""
    return ((left < 0) | (distance >= -left)) & ((right < 0) | (distance <= right))


def full(S):
    return np.ones((S, S), bool)


def causal(S):
    q, k = places(S)
    return k <= q


def sliding_window(S, left, right=0):
    q, k = places(S)
    return band(k - q, left, right)


def chunked(S, chunk):
    q, k = places(S)
    return (k <= q) & (k // chunk == q // chunk)


def prefix_lm(S, prefix):
    q, k = places(S)
    return (k <= q) | (k < prefix)


def _documents(S, lengths) -> tuple[Dense, Dense]:
    """Each token's document, and its position in it."""
    assert sum(lengths) == S
    document = np.array([number for number, length in enumerate(lengths) for _ in range(length)], int)
    position = np.array([i for length in lengths for i in range(length)], int)
    return document, position


def documents(S, lengths, inner=(-1, 0)):
    """inner: the (left, right) of a band."""
    document, at = _documents(S, lengths)
    return (document[:, None] == document[None, :]) & band(at[None, :] - at[:, None], *inner)


def prefix_lm_documents(S, lengths, prefixes):
    document, at = _documents(S, lengths)
    prefix = np.array(prefixes, int)[document] if S else np.zeros(0, int)
    return (document[:, None] == document[None, :]) & ((at[None, :] <= at[:, None]) | (at < prefix)[None, :])


def block_causal_documents(S, lengths):
    document, _ = _documents(S, lengths)
    return document[None, :] <= document[:, None]


def shared_prompt(S, prompt, answers):
    q, k = places(S)
    part, _ = _documents(S, [prompt, *answers])
    return (k <= q) & ((part == 0)[None, :] | (part[None, :] == part[:, None]))


def rectangles(S, parts):
    seen = np.zeros((S, S), bool)
    for (q0, q1), (k0, k1), (left, right) in parts:
        distance = np.arange(k0 - k1, 0) - np.arange(q0 - q1, 0)[:, None]  # 0 in the last query and key
        seen[q0:q1, k0:k1] |= band(distance, left, right)
    return seen


def global_window(S, window, global_tokens, causal=False):
    q, k = places(S)
    seen = (abs(q - k) <= window) | (k < global_tokens) | (q < global_tokens)
    return seen & (k <= q) if causal else seen


def block_sparse(S, pattern, block=128, causal=False):
    q, k = places(S)
    tile_q, tile_k = q // block, k // block
    distance = abs(tile_q - tile_k)
    local = distance <= math.ceil(512 / block)
    if pattern == "local_window":
        seen = local
    elif pattern == "global_local":
        globals_ = math.ceil(64 / block)
        seen = local | (tile_q < globals_) | (tile_k < globals_)
    else:
        rate = np.array([2 ** max(0, math.floor(math.log2(max(d, 1))) - 2) for d in range(S)], int)
        seen = distance % rate[distance] == 0
    return seen & (k <= q) if causal else seen


DEFINITIONS: dict[str, Callable[..., Dense]] = {
    function.__name__: function
    for function in (
        full,
        causal,
        sliding_window,
        chunked,
        prefix_lm,
        documents,
        prefix_lm_documents,
        block_causal_documents,
        shared_prompt,
        global_window,
        block_sparse,
        rectangles,
    )
}


def lengths_of(S: int, draw: random.Random) -> list[int]:
    """Lengths that sum to S, some of them 0."""
    cuts = sorted(draw.randint(0, S) for _ in range(draw.randint(0, 6)))
    return [stop - start for start, stop in zip([0, *cuts], [*cuts, S], strict=True)]


def random_parameters(name: str, S: int, draw: random.Random) -> dict[str, Any]:
    def bound(least: int) -> int:
        return draw.choice([least, 0, draw.randint(0, S), draw.randint(0, 8)])

    lengths, causal, globals_ = lengths_of(S, draw), draw.random() < 0.5, min(bound(0), S)
    pattern = draw.choice(["local_window", "dilated_sparse", "global_local"])
    by_name: dict[str, dict[str, Any]] = {
        "sliding_window": {"left": bound(-1), "right": bound(-1)},
        "chunked": {"chunk": draw.randint(1, S + 2)},
        "prefix_lm": {"prefix": draw.randint(0, S)},
        "documents": {"lengths": lengths, "inner": draw.choice([(-1, -1), (-1, 0), (bound(-1), bound(-1))])},
        "prefix_lm_documents": {"lengths": lengths, "prefixes": [draw.randint(0, length) for length in lengths]},
        "block_causal_documents": {"lengths": lengths},
        "shared_prompt": {"prompt": lengths[0], "answers": lengths[1:]},
        "global_window": {"window": bound(0), "global_tokens": globals_, "causal": causal},
        "block_sparse": {"pattern": pattern, "block": draw.choice([1, 3, 8, 100, 128, 300]), "causal": causal},
        "dca": {  # without a definition here: its random keys have tests of their own
            "window": bound(0),
            "global_tokens": globals_,
            "random": draw.choice([0, 1, 5, 40]),
            "granularity": draw.choice(["token", "tile", "block"]),
            "seed": draw.randint(0, 9),
            "causal": causal,
            "block": draw.choice([1, 4, 32]),
        },
        "rectangles": {"parts": _random_rectangles(S, draw)},
    }
    return by_name.get(name, {})


def _random_rectangles(S: int, draw: random.Random) -> list:
    """Disjoint ones: cells of a grid, each with a band."""
    q = sorted({0, S, *(draw.randint(0, S) for _ in range(3))})
    k = sorted({0, S, *(draw.randint(0, S) for _ in range(3))})
    cells = [(a, b) for a in itertools.pairwise(q) for b in itertools.pairwise(k)]
    bands = [(-1, -1), (-1, 0), (0, -1), (2, 3), (0, 0)]
    found = [(a, b, draw.choice(bands)) for a, b in cells if draw.random() < 0.7]
    draw.shuffle(found)
    return found
