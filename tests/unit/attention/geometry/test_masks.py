"""Masks: pair counts and tiles against brute force over every pair."""

import random
from itertools import product

import pytest

from attention.masks.band import CAUSAL, FULL, Band, tile

SIDES = (-1, 0, 1, 2, 5, 9)
BANDS = [Band(left, right) for left, right in product(SIDES, SIDES)]


def kept(mask: Band, rows: range, keys: range, shift: int = 0) -> set[tuple[int, int]]:
    """The pairs of a band that aligns query i with key i + shift."""
    return {
        (i, j)
        for i, j in product(rows, keys)
        if (mask.left < 0 or j >= i + shift - mask.left) and (mask.right < 0 or j <= i + shift + mask.right)
    }


@pytest.mark.parametrize("mask", BANDS, ids=Band.describe)
def test_pairs_counts_the_kept_pairs_of_every_rectangle(mask):
    for sq, sk in product(range(9), range(9)):
        assert mask.pairs(sq, sk) == len(kept(mask, range(sq), range(sk), sk - sq)), (sq, sk)


def test_pairs_of_long_sequences_follow_the_closed_forms():
    n = 1 << 20
    assert FULL.pairs(n, 3 * n) == 3 * n * n
    assert CAUSAL.pairs(n, n) == n * (n + 1) // 2
    assert CAUSAL.pairs(n, 3 * n) == 2 * n * n + n * (n + 1) // 2
    assert CAUSAL.pairs(3 * n, n) == n * (n + 1) // 2
    assert Band(512, 0).pairs(n, n) == 513 * n - 512 * 513 // 2


def random_tiles(count: int):
    draw = random.Random(0)
    for _ in range(count):
        mask = Band(draw.choice((-1, draw.randrange(24))), draw.choice((-1, draw.randrange(24))))
        q, k = (tuple(sorted((draw.randrange(25), draw.randrange(25)))) for _ in range(2))
        yield mask, q, k


def test_a_tile_covers_exactly_the_pairs_of_the_band():
    found = 0
    for mask, q, k in random_tiles(4000):
        pairs = kept(mask, range(*q), range(*k))
        piece = tile(mask, q, k)
        assert (piece is None) == (not pairs), (mask, q, k)
        if piece is not None:
            (a, b), (c, d), band = piece
            local = kept(band, range(b - a), range(d - c), (d - c) - (b - a))
            assert {(a + i, c + j) for i, j in local} == pairs, (mask, q, k)
            assert band.pairs(b - a, d - c) == len(pairs)
            found += 1
    assert found > 1000


def test_a_tile_has_no_row_or_column_without_a_pair():
    for mask, q, k in random_tiles(2000):
        piece = tile(mask, q, k)
        if piece is not None:
            pairs = kept(mask, range(*q), range(*k))
            assert {i for i, _ in pairs} == set(range(*piece[0])), (mask, q, k)
            assert {j for _, j in pairs} == set(range(*piece[1])), (mask, q, k)


def test_a_tile_keeps_no_bound_that_binds_nothing():
    for mask, q, k in random_tiles(4000):
        piece = tile(mask, q, k)
        if piece is not None:
            (a, b), (c, d), band = piece
            pairs = band.pairs(b - a, d - c)
            assert band.left == -1 or Band(-1, band.right).pairs(b - a, d - c) > pairs, (mask, q, k, band)
            assert band.right == -1 or Band(band.left, -1).pairs(b - a, d - c) > pairs, (mask, q, k, band)


def test_causal_cuts_the_right_side_of_every_window():
    assert Band.of() == FULL
    assert Band.of(causal=True) == CAUSAL
    for left, right in product(SIDES, SIDES):
        assert Band.of(window=(left, right)) == Band(left, right)
        assert Band.of(causal=True, window=(left, right)) == Band(left, 0)


def test_every_mask_is_one_of_full_causal_and_windowed():
    for mask in BANDS:
        assert mask.full + mask.causal + mask.windowed == 1
    assert FULL.full and CAUSAL.causal and Band(-1, 1).windowed and Band(0, -1).windowed and Band(0, 0).windowed


@pytest.mark.parametrize("window", [(-2, 0), (0, -2), (-512, -512)])
@pytest.mark.parametrize("causal", [False, True])
def test_a_window_below_minus_one_is_refused(window, causal):
    with pytest.raises(ValueError) as error:
        Band.of(causal, window)
    assert str(window) in str(error.value) and "-1 (unbounded)" in str(error.value)
    assert "window=[512,0]" in str(error.value)
    assert Band.of(causal, (512, 0)) == Band(512, 0)
