"""A mask drawn as text."""

import math

import pytest

from attention import masks
from tests.support.mask_definitions import DEFINITIONS


def test_a_picture_of_a_causal_mask():
    assert masks.causal().picture(4, 4).split("\n") == ["██······", "████····", "██████··", "████████"]
    assert masks.causal().picture(8, 2).split("\n") == ["▒▒··", "██▒▒"]


@pytest.mark.parametrize("S,width", [(100, 7), (33, 32), (5, 32)])
def test_a_cell_is_as_dark_as_its_part_of_the_mask_is_dense(S, width):
    expected = DEFINITIONS["global_window"](S, 9, 3)
    n = min(S, width)
    at = [i * S // n for i in range(n + 1)]
    lines = masks.global_window(9, 3).picture(S, width).split("\n")
    assert len(lines) == n
    for i, line in enumerate(lines):
        assert len(line) == 2 * n
        for j in range(n):
            share = expected[at[i] : at[i + 1], at[j] : at[j + 1]].mean()
            assert line[2 * j] == line[2 * j + 1] == ("█" if share == 1 else "·░▒▓"[math.ceil(3 * share)])


def test_pictures_at_the_borders():
    assert masks.full().picture(0) == ""
    assert masks.rectangles([]).picture(2, 2) == "····\n····"
    assert set(masks.full().picture(1 << 24)) == {"█", "\n"}
    with pytest.raises(ValueError, match="width=0"):
        masks.full().picture(8, 0)


def test_every_mask_of_a_million_tokens_can_be_drawn():
    lines = masks.dca(4096, 64, 128, causal=True).picture(1 << 20, 16).split("\n")
    assert len(lines) == 16 and all(line[2 * i] != "·" for i, line in enumerate(lines))
