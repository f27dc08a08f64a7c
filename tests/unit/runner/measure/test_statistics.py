"""Statistics: numbers worked out by hand, the median's interval against exact coverage, and that nothing is dropped."""

import math
import random
from fractions import Fraction

import pytest

from runner.measure.statistics import median_interval, quantile, settled, summarize, too_few, trend


def coverage(n: int, k: int) -> Fraction:
    """How surely the order statistics of ranks k+1 and n-k hold the median: 1 - 2 P(Bin(n, 1/2) <= k)."""
    return 1 - 2 * Fraction(sum(math.comb(n, i) for i in range(k + 1)), 2**n)


def test_summary_of_one_to_ten():
    s = summarize([7, 3, 10, 1, 5, 9, 2, 8, 4, 6])
    assert (s.n, s.min, s.max, s.mean) == (10, 1, 10, 5.5)
    assert s.median == 5.5  # between ranks 5 and 6
    assert s.p10 == pytest.approx(1.9)  # place 0.1 * 9 = 0.9: 1 + 0.9 * (2 - 1)
    assert s.p90 == pytest.approx(9.1)  # place 8.1: 9 + 0.1 * (10 - 9)
    # squared distances from 5.5: 2 * (0.25 + 2.25 + 6.25 + 12.25 + 20.25) = 82.5, over n - 1 = 9
    assert s.std == pytest.approx(math.sqrt(82.5 / 9))
    # quartiles at places 2.25 and 6.75: 3.25 and 7.75
    assert s.iqr_over_median == pytest.approx((7.75 - 3.25) / 5.5)
    assert s.ci95 == (2, 9)
    assert s.outliers == 0
    assert s.noisy


@pytest.mark.parametrize(
    ("q", "expected"), [(0, 10), (0.25, 17.5), (0.5, 25), (0.9, 37), (1, 40)]
)  # places 0, 0.75, 1.5, 2.7, 3 of 10, 20, 30, 40
def test_quantiles_lie_on_the_line_between_order_statistics(q, expected):
    assert quantile([10, 20, 30, 40], q) == pytest.approx(expected)


def test_every_quantile_of_one_sample_is_the_sample():
    assert [quantile([4.0], q) for q in (0, 0.3, 1)] == [4.0] * 3


def test_median_interval_of_ten_samples_is_ranks_two_and_nine():
    # P(Bin(10, 1/2) <= 1) = (1 + 10) / 1024: coverage 1 - 22/1024 = 97.9%; one rank further in, 1 - 112/1024 = 89.1%
    assert coverage(10, 1) == 1 - Fraction(22, 1024)
    assert coverage(10, 2) == 1 - Fraction(112, 1024)
    assert median_interval(range(1, 11)) == (2, 9)


def test_median_interval_of_six_samples_is_their_range_and_fewer_give_none():
    # six: 1 - 2/64 = 96.9%; five: 1 - 2/32 = 93.8%, not enough
    assert median_interval([1, 2, 3, 4, 5, 6]) == (1, 6)
    for n in range(1, 6):
        assert median_interval(range(n)) is None
        assert summarize([3.0] * n).ci95 is None
        assert "a 95% interval of the median needs 6" in too_few(n)
    assert too_few(6) is None


@pytest.mark.parametrize("confidence", [0.5, 0.9, 0.95, 0.99])
def test_median_interval_is_the_narrowest_with_its_confidence(confidence):
    for n in range(1, 120):
        found = median_interval(range(n), confidence)
        if found is None:
            assert coverage(n, 0) < confidence
        else:
            low, high = found
            assert high == n - 1 - low
            assert coverage(n, low) >= confidence > coverage(n, low + 1)


@pytest.mark.parametrize("n", [1000, 1100, 5000])
def test_median_interval_of_very_many_samples(n):
    low, high = median_interval(range(n))
    assert high == n - 1 - low
    assert coverage(n, low) >= 0.95 > coverage(n, low + 1)


def test_no_samples_are_refused():
    with pytest.raises(ValueError, match="0 samples"):
        summarize([])


def test_outliers_are_flagged_and_not_dropped():
    s = summarize([1, 2, 3, 4, 5, 6, 7, 8, 100])
    assert s.outliers == 1  # quartiles 3 and 7: beyond 3 - 6 and 7 + 6
    assert (s.n, s.max) == (9, 100)
    assert s.mean == pytest.approx(136 / 9)


def test_outliers_on_both_sides_are_counted_and_the_fence_itself_is_within():
    # quartiles 3 and 7 again, so that the fences are -3 and 13
    assert summarize([-3, 2, 3, 4, 5, 6, 7, 8, 13]).outliers == 0
    assert summarize([-3.1, 2, 3, 4, 5, 6, 7, 8, 13.1]).outliers == 2


def test_noise_is_flagged_above_five_percent():
    calm = summarize([97, 98, 100, 103, 104])  # IQR 103 - 98 = 5% of 100
    wild = summarize([97, 98, 100, 103.1, 104])
    assert (calm.iqr_over_median, calm.noisy) == (0.05, False)
    assert wild.noisy


def test_constant_samples_have_no_spread():
    s = summarize([5.0] * 20)
    assert {s.median, s.p10, s.p90, s.min, s.max, s.mean} == {5.0}
    assert (s.std, s.iqr_over_median, s.outliers, s.noisy) == (0, 0, 0, False)
    assert s.ci95 == (5.0, 5.0)


def test_one_sample_has_no_deviation_and_no_interval():
    s = summarize([2.5])
    assert (s.n, s.median, s.std, s.ci95, s.noisy) == (1, 2.5, 0, None, False)


def test_samples_that_rise_or_fall_have_a_trend():
    falling = [5.4 - 0.045 * i for i in range(20)]
    slow_at_first = [50.0] * 7 + [5.0, 5.01] * 6 + [5.0]
    assert trend(falling) and trend(falling[::-1]) and trend(slow_at_first)
    assert summarize(falling).trend and not summarize([5.0] * 20).trend


def test_samples_without_a_trend():
    assert trend([5.0, 5.3] * 10) is False  # noise
    assert trend([5.0] * 19 + [50.0]) is False  # an outlier
    assert trend([100 + 0.05 * i for i in range(20)]) is False  # steady, but below 2%
    assert trend([5.0] * 5) is None  # too few
    draw = random.Random(3)
    assert sum(bool(trend([draw.gauss(10, 1) for _ in range(20)])) for _ in range(500)) <= 10  # 1% of them by chance


def test_the_trend_of_very_many_samples():
    draw = random.Random(4)
    noise = [draw.gauss(10, 1) for _ in range(20_000)]
    assert not trend(noise)
    assert trend([x * (1 + i / 100_000) for i, x in enumerate(noise)])


def test_settled_when_half_the_interval_is_within_precision():
    # ten samples: ranks 2 and 9, median 100
    assert settled([90, 99, 100, 100, 100, 100, 100, 100, 101, 110], precision=0.01, least=10)
    assert not settled([90, 98.9, 100, 100, 100, 100, 100, 100, 101, 110], precision=0.01, least=10)


def test_settled_does_not_depend_on_the_order():
    assert settled([101, 90, 100, 100, 110, 100, 100, 100, 99, 100], precision=0.01, least=10)


def test_not_settled_below_the_least_number_or_without_an_interval():
    assert not settled([7.0] * 29, precision=0.01, least=30)
    assert settled([7.0] * 30, precision=0.01, least=30)
    assert not settled([7.0] * 5, precision=0.01, least=1)
