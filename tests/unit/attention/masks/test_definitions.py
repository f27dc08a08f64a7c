"""Each mask has exactly the pairs of its definition, and counts them."""

import itertools
import random

import numpy as np
import pytest
import torch

from attention import masks
from attention.masks.mask import Mask
from attention.masks.pattern import Pattern
from tests.support.mask_definitions import DEFINITIONS, random_parameters
from tests.support.masks import built
from tests.support.patterns import kept

LENGTHS = [1, 2, 17, 100, 131, 700]


def drawn(name: str, S: int, seed: int) -> tuple[Mask, np.ndarray]:
    """A mask with random parameters, and its definition."""
    parameters = random_parameters(name, S, random.Random(f"{name} {S} {seed}"))
    return built({"name": name, **parameters}), DEFINITIONS[name](S, **parameters)


@pytest.mark.parametrize("name", DEFINITIONS)
def test_a_mask_has_the_pairs_of_its_definition_each_once(name):
    for S, seed in [(n, seed) for n in LENGTHS for seed in range(8 if n < 200 else 1)]:
        mask, expected = drawn(name, S, seed)
        assert (kept(Pattern(S, S, mask.rectangles(S))) == expected).all(), mask
        assert (mask.dense(S).numpy() == expected).all()
        assert mask.pairs(S) == expected.sum()
        assert mask.density(S) == expected.mean()
        assert mask.is_causal(S) == (not np.triu(expected, 1).any())
        again, _ = drawn(name, S, seed)
        assert mask == again and hash(mask) == hash(again)


def test_every_mask_has_an_independent_definition():
    assert set(masks.names()) == {*DEFINITIONS, "dca"}  # its random keys have tests of their own


@pytest.mark.parametrize("seed", range(20))
def test_and_is_the_intersection(seed):
    draw = random.Random(seed)
    (a, in_a), (b, in_b) = (drawn(draw.choice(list(DEFINITIONS)), 64, seed + 1000 * i) for i in range(2))
    assert (kept(Pattern(64, 64, (a & b).rectangles(64))) == (in_a & in_b)).all(), f"{a} & {b}"


@pytest.mark.parametrize("tokens", [2**32, 2**39 + 3])
def test_pairs_of_very_long_sequences_are_exact(tokens):
    assert masks.full().pairs(tokens) == tokens**2 and masks.full().density(tokens) == 1
    assert masks.causal().pairs(tokens) == tokens * (tokens + 1) // 2
    assert masks.prefix_lm(tokens - 1).pairs(tokens) == (tokens - 1) ** 2 + tokens
    assert masks.causal().picture(tokens, 4).endswith("██████▒▒")


def test_rectangles_grow_with_the_tokens_not_with_their_square():
    most = {  # rectangles for a tile of 128 queries
        masks.block_sparse("local_window"): 1,
        masks.block_sparse("dilated_sparse", causal=True): 8 * 13,  # 4 a side for each doubling of the distance
        masks.dca(4096, 64, 16, "tile"): 17,
        masks.global_window(4096, 64): 1,
    }
    for mask, rectangles in most.items():
        assert len(mask.build(1 << 20)) <= rectangles * 8192, mask


def test_a_mask_is_made_by_name_and_parameters_or_any_list():
    made = masks.make("documents", lengths=[3, 5], inner={"name": "sliding_window", "left": 2})
    assert made == masks.documents([3, 5], masks.sliding_window(2))
    assert masks.make("documents", lengths=[8], inner="full") == masks.documents([8], masks.full())
    assert masks.documents([3, 5]) == masks.documents(np.array([3, 5])) == masks.documents(torch.tensor([3, 5]))


ERRORS = {
    "mask=documnts: .*did you mean documents": lambda: masks.make("documnts"),
    "length=3: .*did you mean lengths": lambda: masks.make("documents", length=3),
    "full has no parameters": lambda: masks.make("full", window=3),
    "mask=documents: needs lengths": lambda: masks.make("documents"),
    "left=-2: must be at least -1": lambda: masks.sliding_window(-2),
    "prefix=9: the sequence has 8 tokens": lambda: masks.prefix_lm(9).pairs(8),
    "lengths=5: must be a list": lambda: masks.documents(5),
    r"lengths\[1\]=-4: must be at least 0": lambda: masks.documents([3, -4]),
    r"lengths=\[3, 4\]: sums to 7.*9 tokens; give lengths that sum to 9": lambda: masks.documents([3, 4]).pairs(9),
    "inner=chunked.*must be full": lambda: masks.documents([3], masks.chunked(2)),
    "global_tokens=9: the sequence has 8 tokens": lambda: masks.global_window(2, 9).pairs(8),
    "causal=1: must be true or false": lambda: masks.global_window(2, 9, 1),
    "pattern=dilated: did you mean dilated_sparse": lambda: masks.block_sparse("dilated"),
    "selector=learned: .*hidden states.*attention.masks.learned": lambda: masks.dca(2, 4, 4, selector="learned"),
    "inner=.*has no name": lambda: masks.make("documents", lengths=[3], inner={"left": 3}),
    r"prefixes\[0\]=4: document 0 has 3 tokens": lambda: masks.prefix_lm_documents([3, 4], [4, 0]).pairs(7),
    r"prefixes=\[3\]: there are 1 for 2": lambda: masks.prefix_lm_documents([3, 4], [3]).pairs(7),
    r"prompt\+answers=2\+\[3\]: sums to 5": lambda: masks.shared_prompt(2, [3]).pairs(6),
    r"rectangle 0, queries \[0, 4\] and keys \[0, 9\].*5 tokens": lambda: masks.rectangles(
        [((0, 4), (0, 9), (-1, 0))]
    ).pairs(5),
    "tokens=1.5: must be a whole number": lambda: masks.causal().pairs(1.5),
    "rectangle 0, .*must be": lambda: masks.rectangles([((3, 1), (0, 9))]),
}


@pytest.mark.parametrize("message", ERRORS)
def test_bad_parameters_are_refused_with_value_rule_and_way_out(message):
    with pytest.raises(ValueError, match=message):
        ERRORS[message]()


def test_empty_masks_are_defined():
    assert masks.rectangles([]).pairs(7) == 0
    assert masks.documents([]).pairs(0) == 0
    assert not masks.rectangles([((0, 2), (3, 5), (-1, -1))]).dense(7)[2:].any()


def test_two_rectangles_that_share_a_pair_are_found():
    draw = random.Random(0)
    bands = [(-1, -1), (-1, 0), (0, -1), (1, 2), (0, 0)]
    refused = 0
    for _ in range(100):
        parts = []
        for _ in range(draw.randint(2, 4)):
            (a, b), (c, d) = (sorted(draw.sample(range(17), 2)) for _ in range(2))
            parts.append(((a, b), (c, d), draw.choice(bands)))
        alone = [DEFINITIONS["rectangles"](16, [part]) for part in parts]
        sharing = [(i, j) for i, j in itertools.combinations(range(len(parts)), 2) if (alone[i] & alone[j]).any()]
        try:
            masks.rectangles(parts)
            assert not sharing, parts
        except ValueError as error:
            refused += 1
            assert any(f"rectangles {i} and {j}," in str(error) for i, j in sharing), (parts, error)
    assert 15 < refused < 85
