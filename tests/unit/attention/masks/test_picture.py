"""A mask drawn as text."""

import math

import pytest

from attention import masks
from tests.support.mask_definitions import DEFINITIONS


@pytest.mark.parametrize("S,width", [(100, 7), (5, 32)])
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
