"""Each mask has exactly the pairs of its definition, and counts them."""

import itertools
import random
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest

from attention import masks
from attention.masks.mask import Mask
from tests.support.mask_definitions import DEFINITIONS, random_parameters

LENGTHS = [1, 2, 17, 64, 100, 131, 700]


def drawn(name: str, S: int, seed: int) -> tuple[Mask, np.ndarray]:
    """A mask with random parameters, and its definition."""
    parameters = random_parameters(name, S, random.Random(f"{name} {S} {seed}"))
    expected = DEFINITIONS[name](S, **parameters)
    if name == "documents":
        parameters["inner"] = masks.sliding_window(*parameters["inner"])
    return getattr(masks, name)(**parameters), expected


def covered(mask: Mask, S: int) -> np.ndarray:
    """In how many rectangles each pair is."""
    found = np.zeros((S, S), int)
    distance = np.arange(S)[None, :] - np.arange(S)[:, None]
    for q0, q1, k0, k1, lo, hi in mask.rectangles(S).tolist():
        within = (distance >= lo) & (distance <= hi)
        found[q0:q1, k0:k1] += within[q0:q1, k0:k1]
    return found


@pytest.mark.parametrize("S", LENGTHS)
@pytest.mark.parametrize("name", DEFINITIONS)
def test_a_mask_has_the_pairs_of_its_definition_each_once(name, S):
    for seed in range(12 if S < 200 else 3):
        mask, expected = drawn(name, S, seed)
        found = covered(mask, S)
        assert found.max(initial=0) <= 1, f"{mask}: a pair is in two rectangles"
        assert (found == expected).all(), mask
        assert (mask.dense(S).numpy() == expected).all()
        assert mask.pairs(S) == expected.sum()
        assert mask.density(S) == expected.mean()
        assert mask.is_causal(S) == (not np.triu(expected, 1).any())


@pytest.mark.parametrize("name", DEFINITIONS)
def test_every_mask_is_a_function_with_a_definition_of_one_line(name):
    line = masks.names()[name]
    assert line and "\n" not in line and not line.endswith(".")


def test_every_mask_has_an_independent_definition():
    assert set(masks.names()) == {*DEFINITIONS, "dca"}  # its random keys have tests of their own
    assert set(masks.names()) < set(masks.__all__)


@pytest.mark.parametrize("seed", range(60))
def test_and_is_the_intersection(seed):
    draw = random.Random(seed)
    S = draw.choice([17, 64, 100])
    (a, in_a), (b, in_b) = (drawn(draw.choice(list(DEFINITIONS)), S, seed + 1000 * i) for i in range(2))
    assert (covered(a & b, S) == (in_a & in_b)).all(), f"{a} & {b}"
    assert (a & b).pairs(S) == (in_a & in_b).sum()


def test_memory_of_an_intersection_is_that_of_what_overlaps():
    """Of 300 million pairs of rectangles 37,031 overlap; each mask has rectangles over all queries or all keys."""
    a, b = (masks.dca(20, 4, 50, "token", seed=seed) for seed in (1, 2))
    expected = (a.dense(400) & b.dense(400)).numpy()
    tracemalloc.start()
    try:
        (a & b).rectangles(400)
        assert tracemalloc.get_traced_memory()[1] < 30 << 20
    finally:
        tracemalloc.stop()
    assert (covered(a & b, 400) == expected).all()


@pytest.mark.parametrize("tokens", [2**31 + 1, 2**32, 2**39 + 3])
def test_pairs_of_very_long_sequences_are_exact(tokens):
    assert masks.full().pairs(tokens) == tokens**2 and masks.full().density(tokens) == 1
    assert masks.causal().pairs(tokens) == tokens * (tokens + 1) // 2
    assert masks.prefix_lm(tokens - 1).pairs(tokens) == (tokens - 1) ** 2 + tokens
    assert masks.causal().picture(tokens, 4).endswith("██████▒▒")


@pytest.mark.parametrize("name", DEFINITIONS)
def test_equal_parameters_make_equal_masks(name):
    (a, _), (b, _) = drawn(name, 64, 5), drawn(name, 64, 5)
    assert a == b and hash(a) == hash(b) and (a.build(64) == b.build(64)).all()
    assert str(a) == a.describe() and len(str(a)) < 500


def test_masks_are_imported_without_torch():
    code = "import sys; from attention import masks; masks.chunked(4).pairs(64); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_many_documents_are_built_in_linear_time():
    lengths = [1 << k for k in range(10)] * 900
    S = sum(lengths)
    assert len(masks.documents(lengths).rectangles(S)) == len(lengths)
    assert masks.documents(lengths).pairs(S) == sum(n * (n + 1) // 2 for n in lengths)


@pytest.mark.parametrize("causal", [False, True])
def test_rectangles_grow_with_the_tokens_not_with_their_square(causal):
    made = {
        masks.block_sparse("local_window", causal=causal): 1,  # rectangles for a tile of 128 queries
        masks.block_sparse("global_local", causal=causal): 2,
        masks.block_sparse("dilated_sparse", causal=causal): 8 * 13,  # 4 a side for each doubling of the distance
        masks.dca(4096, 64, 256, causal=causal): 5,
        masks.dca(4096, 64, 16, "tile", causal=causal): 17,
        masks.global_window(4096, 64, causal=causal): 1,
    }
    for mask, most in made.items():
        assert len(mask.build(1 << 20)) <= most * 8192, mask


def test_a_mask_is_made_by_name_and_parameters():
    made = masks.make("documents", lengths=[3, 5], inner={"name": "sliding_window", "left": 2})
    assert made == masks.documents([3, 5], masks.sliding_window(2))
    assert masks.make("documents", lengths=[8], inner="full") == masks.documents([8], masks.full())
    assert masks.make("prefix_lm", prefix=3) == masks.prefix_lm(3)


def test_lists_of_numpy_and_torch_make_the_same_mask():
    import torch

    same = {masks.documents(x) for x in ([3, 5], (3, 5), np.array([3, 5]), torch.tensor([3, 5]))}
    assert len(same) == 1


ERRORS = {
    "mask=documnts: .*did you mean documents": lambda: masks.make("documnts"),
    "length=3: .*did you mean lengths": lambda: masks.make("documents", length=3),
    "full has no parameters": lambda: masks.make("full", window=3),
    "mask=documents: needs lengths": lambda: masks.make("documents"),
    "left=-2: must be at least -1": lambda: masks.sliding_window(-2),
    "chunk=0: must be at least 1": lambda: masks.chunked(0),
    "chunk=1.5: must be a whole number": lambda: masks.chunked(1.5),
    "prefix=9: the sequence has 8 tokens": lambda: masks.prefix_lm(9).pairs(8),
    "lengths=5: must be a list": lambda: masks.documents(5),
    r"lengths\[1\]=-4: must be at least 0": lambda: masks.documents([3, -4]),
    r"lengths=\[3, 4\]: sums to 7.*9 tokens; give lengths that sum to 9": lambda: masks.documents([3, 4]).pairs(9),
    "inner=chunked.*must be full": lambda: masks.documents([3], masks.chunked(2)),
    "window=-1: must be at least 0": lambda: masks.global_window(-1, 4),
    "global_tokens=9: the sequence has 8 tokens": lambda: masks.global_window(2, 9).pairs(8),
    "global_tokens=10: the sequence has 8 tokens": lambda: masks.dca(2, 10, 0).pairs(8),
    "causal=1: must be true or false": lambda: masks.global_window(2, 9, 1),
    "pattern=dilated: did you mean dilated_sparse": lambda: masks.block_sparse("dilated"),
    "block=0: must be at least 1": lambda: masks.block_sparse("local_window", 0),
    "granularity=tiles: did you mean tile": lambda: masks.dca(2, 4, 4, "tiles"),
    "selector=learned: .*hidden states.*attention.masks.learned": lambda: masks.dca(2, 4, 4, selector="learned"),
    "inner=.*has no name": lambda: masks.make("documents", lengths=[3], inner={"left": 3}),
    r"prefixes\[0\]=4: document 0 has 3 tokens": lambda: masks.prefix_lm_documents([3, 4], [4, 0]).pairs(7),
    r"prefixes=\[3\]: there are 1 for 2": lambda: masks.prefix_lm_documents([3, 4], [3]).pairs(7),
    r"prompt\+answers=2\+\[3\]: sums to 5": lambda: masks.shared_prompt(2, [3]).pairs(6),
    r"rectangle 0, queries \[0, 4\] and keys \[0, 9\].*5 tokens": lambda: masks.rectangles(
        [((0, 4), (0, 9), (-1, 0))]
    ).pairs(5),
    r"rectangle 0, queries \[3, 1\]": lambda: masks.rectangles([((3, 1), (0, 9), (-1, 0))]),
    "rectangle 1, 4: must be": lambda: masks.rectangles([((0, 1), (0, 1), (0, 0)), 4]),
    "parts=None: must be a list of": lambda: masks.rectangles(None),
    "tokens=1.5: must be a whole number": lambda: masks.causal().pairs(1.5),
    "tokens=-1: must be at least 0": lambda: masks.causal().dense(-1),
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
    for _ in range(300):
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
    assert 50 < refused < 250


@pytest.mark.parametrize("axis", [0, 1])
def test_disjoint_rectangles_are_checked_without_comparing_all(axis):
    n = 20_000  # 200 million pairs of rectangles
    thin = [(i, i + 1) for i in range(n)]
    parts = [((0, n), x, (-1, -1)) if axis else (x, (0, n), (-1, -1)) for x in thin]
    assert masks.rectangles(parts).pairs(n) == n * n
