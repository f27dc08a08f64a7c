"""Masks: pair counts and tiles against brute force over every pair."""

import random
from itertools import product

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


def test_pairs_counts_the_kept_pairs_of_every_rectangle():
    for mask, sq, sk in product(BANDS, range(9), range(9)):
        assert mask.pairs(sq, sk) == len(kept(mask, range(sq), range(sk), sk - sq)), (mask, sq, sk)


def random_tiles(count: int):
    draw = random.Random(0)
    for _ in range(count):
        mask = Band(draw.choice((-1, draw.randrange(24))), draw.choice((-1, draw.randrange(24))))
        q, k = (tuple(sorted((draw.randrange(25), draw.randrange(25)))) for _ in range(2))
        yield mask, q, k


def test_a_tile_covers_the_pairs_of_the_band_without_an_empty_row_column_or_idle_bound():
    for mask, q, k in random_tiles(2000):
        pairs = kept(mask, range(*q), range(*k))
        piece = tile(mask, q, k)
        assert (piece is None) == (not pairs), (mask, q, k)
        if piece is None:
            continue
        (a, b), (c, d), band = piece
        local = kept(band, range(b - a), range(d - c), (d - c) - (b - a))
        assert {(a + i, c + j) for i, j in local} == pairs, (mask, q, k)
        assert {i for i, _ in pairs} == set(range(a, b)) and {j for _, j in pairs} == set(range(c, d)), (mask, q, k)
        for bound, without in ((band.left, Band(-1, band.right)), (band.right, Band(band.left, -1))):
            assert bound == -1 or without.pairs(b - a, d - c) > len(pairs), (mask, q, k, band)


def test_causal_cuts_the_right_side_of_every_window():
    assert Band.of() == FULL
    assert Band.of(causal=True) == CAUSAL
    for left, right in product(SIDES, SIDES):
        assert Band.of(window=(left, right)) == Band(left, right)
        assert Band.of(causal=True, window=(left, right)) == Band(left, 0)
