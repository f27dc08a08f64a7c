"""Lengths of documents as training data has them."""

import statistics

import pytest

from runner.config.rules.attention import LONG, MEAN, SHORT, real_lengths


def test_shares_of_short_and_long_documents_are_those_of_the_source():
    lengths = real_lengths(1 << 26, seed=1)[:-1]  # some 41,000
    assert sum(n <= SHORT for n in lengths) / len(lengths) == pytest.approx(0.71, abs=0.01)
    assert sum(n > LONG for n in lengths) / len(lengths) == pytest.approx(0.004, abs=0.001)
    assert statistics.mean(lengths) == pytest.approx(MEAN, rel=0.05)


def test_lengths_add_up_are_multiples_none_is_over_a_quarter_and_follow_the_seed():
    for total, multiple in ((512, 128), (16384, 16), (1 << 20, 1)):
        lengths = real_lengths(total, 1, multiple)
        assert sum(lengths) == total and multiple <= min(lengths) <= max(lengths) <= total // 4
        assert not any(n % multiple for n in lengths)
    assert real_lengths(65536, 1, 16)[:6] == (80, 2080, 1280, 144, 400, 336)  # on every machine
