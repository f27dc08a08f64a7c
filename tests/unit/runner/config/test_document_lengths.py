"""Lengths of documents as training data has them."""

import statistics

import pytest

from runner.config.rules.attention import LONG, MEAN, SHORT, real_lengths


def test_shares_of_short_and_long_documents_are_those_of_the_source():
    found = real_lengths(1 << 26, seed=1)[:-1]  # some 41,000
    assert sum(n <= SHORT for n in found) / len(found) == pytest.approx(0.71, abs=0.01)
    assert sum(n > LONG for n in found) / len(found) == pytest.approx(0.004, abs=0.001)
    assert statistics.median(found) == pytest.approx(411, rel=0.05)
    assert statistics.mean(found) == pytest.approx(MEAN, rel=0.05)


@pytest.mark.parametrize("multiple", [1, 16, 128])
@pytest.mark.parametrize("total", [512, 16384, 65536, 1 << 20])
def test_lengths_add_up_are_multiples_and_none_is_over_a_quarter(total, multiple):
    for seed in range(20):
        found = real_lengths(total, seed, multiple)
        assert sum(found) == total and max(found) <= total // 4
        assert min(found) >= multiple and not any(n % multiple for n in found)


def test_the_share_of_short_documents_does_not_depend_on_the_multiple():
    plain, rounded = (real_lengths(1 << 22, 5, multiple)[:-1] for multiple in (1, 16))
    assert [-(-n // 16) * 16 for n in plain[:1000]] == list(rounded[:1000])


def test_lengths_follow_the_seed():
    assert real_lengths(65536, 1) == real_lengths(65536, 1) != real_lengths(65536, 2)
    assert real_lengths(65536, 1, 16)[:6] == (80, 2080, 1280, 144, 400, 336)  # on every machine


@pytest.mark.parametrize(("total", "multiple"), [(100, 16), (32, 16), (3, 1)])
def test_a_total_that_cannot_be_divided_is_refused(total, multiple):
    with pytest.raises(ValueError, match=f"total={total}: must be a multiple of {multiple} and at least"):
        real_lengths(total, 0, multiple)
