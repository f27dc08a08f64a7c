"""Random keys are drawn among the keys that are not seen otherwise, as many as asked for, and always the same ones."""

import hashlib
from itertools import product

import numpy as np
import pytest
import torch

from attention import masks
from attention.masks.dca import chosen_globals, draw
from attention.masks.learned import global_count, global_positions, learned
from attention.masks.pattern import Pattern
from tests.support.mask_definitions import global_window
from tests.support.patterns import kept


def once(mask, S: int) -> np.ndarray:
    """The mask as a matrix, in which no pair is in two rectangles."""
    return kept(Pattern(S, S, mask.rectangles(S)))


def random_part(mask, S: int, rest: np.ndarray) -> np.ndarray:
    """The pairs beyond the rest of the mask."""
    dense = once(mask, S)
    assert dense[rest].all(), f"{mask}: does not contain the rest"
    return dense & ~rest


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("granularity", ["token", "tile", "block"])
def test_random_keys_are_as_many_as_asked_for_or_all_that_are_left(granularity, causal):
    for S, (window, globals_), random in product((1, 100, 300, 521), ((0, 0), (33, 5)), (0, 1, 40, 1000)):
        if granularity == "token" and S > 300:
            continue  # a rectangle for each key of each query
        globals_ = min(globals_, S)
        rest = global_window(S, window // 2, globals_, causal)
        mask = masks.dca(window, globals_, random, granularity, seed=3, causal=causal, block=32)
        found = random_part(mask, S, rest)
        rows = 1 if granularity == "token" else 128
        for start in range(0, S, rows):
            tile = found[start : start + rows]
            assert (tile == tile[0]).all(), f"{mask}: the queries of a tile share their keys"
            unseen = ~rest[start : start + rows].any(0) & (np.arange(S) < (start if causal else S))
            if granularity == "block":
                blocks = [range(a, min(a + 32, S)) for a in range(0, S, 32)]
                able = [b for b in blocks if unseen[b].all()]
                taken = [b for b in blocks if tile[0][b].any()]
                assert all(b in able and tile[0][b].all() for b in taken)
                wanted = max(1, random // 32) if random else 0
                assert len(taken) == min(wanted, len(able))
            else:
                assert not (tile[0] & ~unseen).any()
                assert tile[0].sum() == min(random, unseen.sum())


def test_the_draw_is_the_same_on_every_machine():
    row, number = draw(np.array([1000, 7, 0, 90, 100]), 60, seed=5)
    assert np.bincount(row, minlength=5).tolist() == [60, 7, 0, 60, 60]
    assert len({*zip(row, number, strict=True)}) == len(row)
    digest = hashlib.sha256((row * 1000 + number).astype("<i8").tobytes()).hexdigest()
    assert digest.startswith("3ce868880285036a")


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("S, window", [(1, 0), (60, 31), (521, 100)])
def test_chosen_global_tokens_see_all_and_are_seen_by_all(S, window, causal):
    positions = np.random.default_rng(0).choice(S, min(S, 9), replace=False).tolist()
    q, k = np.arange(S)[:, None], np.arange(S)[None, :]
    rest = (abs(q - k) <= window // 2) | np.isin(q, positions) | np.isin(k, positions)
    rest = rest & (k <= q) if causal else rest
    assert (once(chosen_globals(window, tuple(positions), causal=causal), S) == rest).all()
    drawn = random_part(chosen_globals(window, tuple(positions), S // 4, causal=causal), S, rest)
    assert not drawn[positions].any() and not drawn[:, positions].any()
    with pytest.raises(ValueError, match=rf"global_positions.*={S + 1}: the sequence has {S} tokens"):
        chosen_globals(4, (S,)).pairs(S)


@pytest.mark.parametrize("S, spread, expected", [(1, 1.0, 1), (100, 1.0, 15), (1000, 1e4, 64)])
def test_the_spread_of_the_hidden_states_decides_how_many_tokens_are_global(S, spread, expected):
    hidden = (
        torch.tensor([-1.0, 1.0]).repeat(S, 8) * spread / (16 / 15) ** 0.5
    )  # standard deviation `spread` in each row
    assert global_count(hidden) == global_count(hidden[None]) == expected


def test_a_linear_score_chooses_the_global_tokens():
    hidden = torch.randn(2, 200, 16, generator=torch.Generator().manual_seed(0))
    score = torch.nn.Linear(16, 1)
    best = score(hidden).detach().mean(0).flatten().topk(global_count(hidden)).indices.tolist()
    assert global_positions(hidden, score) == tuple(sorted(best))
    mask = learned(hidden, score, window=32, seed=1, causal=True)
    assert mask == chosen_globals(32, tuple(sorted(best)), 20, 1, True)
