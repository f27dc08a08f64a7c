"""Statistics: numbers worked out by hand, the median's interval against exact coverage, and that nothing is dropped."""

import math
from fractions import Fraction

import pytest

from runner.measure.statistics import median_interval, summarize, too_few, trend


def coverage(n, k):
    """How surely the order statistics of ranks k+1 and n-k hold the median: 1 - 2 P(Bin(n, 1/2) <= k)."""
    return 1 - 2 * Fraction(sum(math.comb(n, i) for i in range(k + 1)), 2**n)


def test_summary_of_one_to_ten():
    s = summarize([7, 3, 10, 1, 5, 9, 2, 8, 4, 6])
    assert (s.n, s.min, s.max, s.mean, s.median) == (10, 1, 10, 5.5, 5.5)
    # places 0.1 * 9 = 0.9: 1 + 0.9 * (2 - 1), and 8.1: 9 + 0.1 * (10 - 9)
    assert (s.p10, s.p90) == pytest.approx((1.9, 9.1))
    # squared distances from 5.5: 2 * (0.25 + 2.25 + 6.25 + 12.25 + 20.25) = 82.5, over n - 1 = 9
    assert s.std == pytest.approx(math.sqrt(82.5 / 9))
    # quartiles at places 2.25 and 6.75: 3.25 and 7.75
    assert s.iqr_over_median == pytest.approx((7.75 - 3.25) / 5.5)
    assert (s.ci95, s.outliers, s.noisy) == ((2, 9), 0, True)


@pytest.mark.parametrize("confidence", [0.5, 0.95])
def test_median_interval_is_the_narrowest_with_its_confidence(confidence):
    for n in [*range(1, 60), 1100]:
        found = median_interval(range(n), confidence)
        if found is None:
            assert coverage(n, 0) < confidence
        else:
            low, high = found
            assert high == n - 1 - low
            assert coverage(n, low) >= confidence > coverage(n, low + 1)


def test_fewer_than_six_samples_give_no_interval_and_none_no_summary():
    assert median_interval([1, 2, 3, 4, 5, 6]) == (1, 6) and too_few(6) is None
    one = summarize([5.0])
    assert (one.p10, one.std, one.noisy, one.trend, one.ci95) == (5, 0, False, False, None)
    assert "5 samples: a 95% interval of the median needs 6" in too_few(5)
    with pytest.raises(ValueError, match="0 samples"):
        summarize([])


def test_outliers_are_flagged_and_not_dropped():
    s = summarize([-3.1, 2, 3, 4, 5, 6, 7, 8, 100])  # quartiles 3 and 7: beyond 3 - 6 and 7 + 6
    assert (s.outliers, s.n, s.max, s.mean) == (2, 9, 100, pytest.approx(131.9 / 9))


FALLING = [5.4 - 0.045 * i for i in range(20)]


@pytest.mark.parametrize(
    ("samples", "expected"),
    [
        (FALLING, True),
        ([50.0] * 7 + [5.0, 5.01] * 6 + [5.0], True),  # slow at first
        ([5.0, 5.3] * 10, False),  # noise
        ([5.0] * 19 + [50.0], False),  # an outlier
        ([100 + 0.05 * i for i in range(20)], False),  # steady, but below 2%
        ([5.0] * 5, None),  # too few
    ],
)
def test_samples_that_rise_or_fall_have_a_trend(samples, expected):
    assert trend(samples) is expected and summarize(samples).trend is bool(expected)
