"""The work of a mask, counted: the pairs that its packed calls and its tiles compute, against the pairs that it keeps."""

from __future__ import annotations

import pytest
import torch

from attention import masks
from attention.kernels.interface import Call
from attention.kernels.patterns import _parts
from attention.kernels.tile_lists import TILE, tiles_of
from attention.masks.pattern import Pattern

TOKENS = 2048
DOCUMENTS = [5, 300, 1, 700, 128, 127, 787]  # sum to TOKENS
CASES = [  # (name, parameters, the most pairs of its tiles for each pair of the mask: what they have, and a little)
    ("sliding_window", {"left": 100, "right": 60}, 3.5),
    ("documents", {"lengths": DOCUMENTS, "inner": masks.sliding_window(90)}, 3.5),
    ("prefix_lm_documents", {"lengths": DOCUMENTS, "prefixes": [2, 100, 1, 0, 64, 127, 300]}, 3.5),
    ("dca", {"window": 256, "global_tokens": 16, "random": 128, "causal": True}, 3.5),
    ("dca", {"window": 256, "global_tokens": 16, "random": 32, "granularity": "tile"}, 7.0),
    ("block_sparse", {"pattern": "dilated_sparse"}, 1.0),
    ("rectangles", {"parts": [[[0, 700], [100, 900], [-1, -1]], [[700, 2048], [0, 2048], [-1, 0]]]}, 3.5),
]


@pytest.mark.parametrize("name, parameters, bound", CASES, ids=[f"{name}{i}" for i, (name, *_) in enumerate(CASES)])
def test_a_mask_costs_few_pairs_that_it_leaves_out(name, parameters, bound):
    """Packed calls have each pair once; a kernel that computes the whole rectangle of a causal call does at most twice as much.
    A tile that is seen in part is computed whole."""
    mask = masks.make(name, **parameters)
    pattern = Pattern(TOKENS, TOKENS, mask.rectangles(TOKENS))
    calls = [part.call for part in _parts(Call(1.0, pattern=pattern), torch.empty(1, TOKENS, 1, 8))]
    lengths = [(call.mask, q, k) for call in calls for q, k in zip(call.q_lengths, call.k_lengths, strict=True)]
    assert sum(band.pairs(q, k) for band, q, k in lengths) == mask.pairs(TOKENS)
    unwindowed = [(q * k, band.pairs(q, k)) for band, q, k in lengths if not band.windowed]
    assert sum(x for x, _ in unwindowed) <= 2 * sum(x for _, x in unwindowed)
    tiles = tiles_of(pattern)
    assert (len(tiles.partial) + len(tiles.full)) * TILE * TILE <= bound * mask.pairs(TOKENS)
