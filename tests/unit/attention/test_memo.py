"""What is remembered of functions whose results differ in what they hold."""

import gc
import random
import weakref
from itertools import accumulate

import pytest

from attention.geometry.schedules import known, steps
from attention.masks.band import Band
from attention.memo import memo
from attention.variants.registry import variant


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


def test_schedules_of_ever_new_packed_batches_are_let_go_of():
    order, seen = random.Random(0), []
    for _ in range(40):
        lengths = [16 * order.randint(1, 4) for _ in range(512)]
        cu_seqlens = (0, *accumulate(lengths))
        problem, again = (variant("zigzag_varlen").problem(cu_seqlens, 8, Band.of(True), {}, None) for _ in range(2))
        assert steps(problem, 3) is steps(again, 3)
        seen.append(weakref.ref(problem))
        del problem, again
    gc.collect()
    assert 40 * 8 * 512 > known.most >= known.held  # packed batches, ranks, sequences
    assert [ref() is None for ref in seen] == [True] * 9 + [False] * 31
