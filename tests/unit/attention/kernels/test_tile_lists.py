"""The tiles of a pattern against those of its boolean matrix."""

import numpy as np
import pytest
import torch

from attention.kernels.tile_lists import FAR, TILE, TileLists, listed, row_intervals, tiles_of
from tests.support.patterns import PATTERNS, kept, random_pattern

CPU = torch.device("cpu")


def tiled(keep: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(partial, full): bool `[tiles of queries, tiles of keys]`."""
    n_q, n_k = keep.shape
    padded = np.pad(keep, ((0, -n_q % TILE), (0, -n_k % TILE)))
    inside = padded.reshape(len(padded) // TILE, TILE, -1, TILE).sum((1, 3))
    return (inside > 0) & (inside < TILE * TILE), inside == TILE * TILE


def joined_parts(lists: TileLists, counts: np.ndarray, indices: np.ndarray, columns: int) -> np.ndarray:
    """The lists as a matrix, with the parts of a row added to it."""
    dense = np.zeros((lists.tiles + len(lists.origin), columns), int)
    for row, n in enumerate(counts):
        assert (np.diff(indices[row, :n]) > 0).all(), "ascending, none twice"
        dense[row, indices[row, :n]] += 1
    np.add.at(dense, lists.origin, dense[lists.tiles :])
    return dense[: lists.tiles]


@pytest.mark.parametrize(
    "pattern", [*PATTERNS.values(), *map(random_pattern, range(12))], ids=lambda x: f"{x.n_q}x{x.n_k}"
)
def test_lists_and_intervals_are_those_of_the_matrix(pattern):
    tiles, keep = tiles_of(pattern), kept(pattern)
    expected = tiled(keep)
    for by_keys in (False, True):
        for most in (2, 7, FAR):
            lists = listed(tiles, by_keys, most)
            for one, dense in zip((lists.partial, lists.full), expected, strict=True):
                wanted = dense.T if by_keys else dense
                assert (joined_parts(lists, *one, wanted.shape[1]) == wanted).all()
            assert (lists.partial[0] + lists.full[0] <= most).all()
    intervals = row_intervals(tiles.cut, pattern.n_q, CPU).numpy()
    assert intervals.shape == (-(-pattern.n_q // TILE) * TILE, 2 * max(1, tiles.intervals))
    seen = np.zeros_like(keep)
    key = np.arange(pattern.n_k)
    for start, stop in intervals[: pattern.n_q].reshape(pattern.n_q, -1, 2).transpose(1, 2, 0):
        seen |= (key >= start[:, None]) & (key < stop[:, None])
    partial = np.kron(expected[0], np.ones((TILE, TILE), bool))[: pattern.n_q, : pattern.n_k]
    assert (seen[partial] == keep[partial]).all()
    if tiles.band is not None:
        distance = np.arange(pattern.n_k) - np.arange(pattern.n_q)[:, None]
        banded = (distance >= tiles.band[0]) & (distance <= tiles.band[1])
        assert (banded[partial] == keep[partial]).all()


def test_a_pattern_whose_partial_tiles_have_one_band_says_so():
    assert tiles_of(PATTERNS["causal"]).band == (-FAR, 0)
    assert tiles_of(PATTERNS["window_and_global_tile"]).band == (-255, 0)
    assert tiles_of(PATTERNS["documents"]).band is None
