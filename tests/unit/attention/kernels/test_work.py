"""The work of a mask, counted: the pairs that its packed calls and its tiles compute, against the pairs that it keeps."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attention import masks
from attention.kernels.interface import Call
from attention.kernels.patterns import _parts
from attention.kernels.tile_lists import TILE, tiles_of
from attention.masks.mask import Mask
from attention.masks.pattern import Pattern

TOKENS = 2048
DOCUMENTS = [5, 300, 1, 700, 128, 127, 787]  # sum to TOKENS
PARAMETERS: dict[str, list[dict[str, Any]]] = {
    "full": [{}],
    "causal": [{}],
    "sliding_window": [{"left": 200}, {"left": 100, "right": 60}],
    "chunked": [{"chunk": 300}],
    "prefix_lm": [{"prefix": 500}],
    "documents": [{"lengths": DOCUMENTS}, {"lengths": DOCUMENTS, "inner": masks.sliding_window(90)}],
    "prefix_lm_documents": [{"lengths": DOCUMENTS, "prefixes": [2, 100, 1, 0, 64, 127, 300]}],
    "block_causal_documents": [{"lengths": DOCUMENTS}],
    "shared_prompt": [{"prompt": 1000, "answers": [500, 48, 300, 200]}],
    "global_window": [{"window": 128, "global_tokens": 16, "causal": causal} for causal in (False, True)],
    "dca": [{"window": 256, "global_tokens": 16, "random": 128, "causal": causal} for causal in (False, True)]
    + [{"window": 256, "global_tokens": 16, "random": 32, "granularity": "tile"}],
    "block_sparse": [
        {"pattern": pattern, "causal": causal}
        for pattern in ("local_window", "dilated_sparse", "global_local")
        for causal in (False, True)
    ],
    "rectangles": [{"parts": [[[0, 700], [100, 900], [-1, -1]], [[700, 2048], [0, 2048], [-1, 0]]]}],
}
CASES = [(name, parameters) for name, each in PARAMETERS.items() for parameters in each]
cases = pytest.mark.parametrize("name, parameters", CASES, ids=[f"{name}{i}" for i, (name, _) in enumerate(CASES)])


def pattern_of(mask: Mask) -> Pattern:
    return Pattern(TOKENS, TOKENS, mask.rectangles(TOKENS))


def test_every_mask_is_counted():
    assert set(PARAMETERS) == set(masks.names())


@cases
def test_packed_calls_compute_each_pair_of_the_mask_once(name, parameters):
    """As `dense` sums up to the mask's pairs, a kernel that skips what is outside a band does no other work. One that
    computes the whole rectangle of a causal call does at most about twice as much."""
    mask = masks.make(name, **parameters)
    calls = [part.call for part in _parts(Call(1.0, pattern=pattern_of(mask)), torch.empty(1, TOKENS, 1, 8))]
    kept = mask.pairs(TOKENS)
    lengths = [(call.mask, q, k) for call in calls for q, k in zip(call.q_lengths, call.k_lengths, strict=True)]
    assert sum(band.pairs(q, k) for band, q, k in lengths) == kept == int(mask.dense(TOKENS).sum())
    unwindowed = sum(q * k for band, q, k in lengths if not band.windowed)
    inside = sum(band.pairs(q, k) for band, q, k in lengths if not band.windowed)
    assert unwindowed <= 2 * inside, (unwindowed, inside)


@cases
def test_tiles_compute_few_pairs_that_the_mask_leaves_out(name, parameters):
    """A tile that is seen in part is computed whole. The bounds are what these masks have at 2,048 tokens, and a little."""
    mask = masks.make(name, **parameters)
    tiles = tiles_of(pattern_of(mask))
    n = len(tiles.partial) + len(tiles.full)
    keep = mask.dense(TOKENS).view(TOKENS // TILE, TILE, TOKENS // TILE, TILE)
    assert n == int(keep.any(3).any(1).sum()), "only tiles that hold a pair"
    assert len(tiles.full) == int(keep.all(3).all(1).sum())
    ratio = n * TILE * TILE / mask.pairs(TOKENS)
    bound = 1.0 if name in ("full", "block_sparse") and not parameters.get("causal") else 3.5
    if parameters.get("granularity") == "tile":
        bound = 7.0
    print(f"{name} {parameters}: {ratio:.2f}")
    assert ratio <= bound, f"tiles hold {ratio:.2f} times the mask's pairs, at most {bound}"
