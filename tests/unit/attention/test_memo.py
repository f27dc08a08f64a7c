"""What is remembered of functions whose results differ in what they hold."""

import pytest

from attention.memo import memo


def test_what_was_used_last_is_kept_up_to_a_weight():
    asked = []

    @memo(lambda result, n, *_: n, most=10)
    def squares(n, text=""):
        asked.append(n)
        return [i * i for i in range(n)]

    assert squares(4) is squares(4) and squares(5) is not squares(4)
    squares(4)
    squares(3)  # 12 in all: what was used least recently, of 5, goes
    assert asked == [4, 5, 3] and squares.held == 7
    squares(5)
    assert asked == [4, 5, 3, 5]
    assert len(squares(50)) == 50 and squares(50) is squares(50)  # the latest stays, however heavy
    assert squares.held == 50 and squares.misses == 5
    squares(1)
    assert squares.held == 1
    with pytest.raises(AssertionError):
        squares(n=1)
    squares.cache_clear()
    assert squares.held == squares.misses == len(squares.results) == 0
