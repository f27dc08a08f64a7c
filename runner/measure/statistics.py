"""Statistics of samples in ms. Nothing is ever dropped: outliers and noise are flagged."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Sequence
from itertools import chain, pairwise
from statistics import fmean, median, stdev
from typing import Any

import numpy as np

from runner.record.fields import NOISY, PassTimes

Fields = dict[str, Any]  # of a result, as in result.json
Samples = dict[str, list[float]]  # pass -> ms of each iteration, of one rank
Rounds = Sequence[Sequence[float]]  # ms, by round
TREND = 0.02  # a trend must change the samples by this share of the median
TREND_CHANCE = 0.01  # the significance of a trend
TREND_SAMPLES = 6  # the fewest samples that can show a trend
OVERHEAD = 0.01  # share of the shortest pass above which timing overhead is reported
INTERVAL_SAMPLES = 6  # the fewest with a 95% interval: the median lies outside all 6 with probability 2**-5
MOST_CORRELATED = 0.95  # of neighbouring samples, for `dependence`


def median_interval(ordered: Sequence[float], confidence: float = 0.95) -> tuple[float, float] | None:
    """The narrowest symmetric pair of order statistics that contains the median with at least that confidence, by the
    binomial distribution of the number of samples below it; None for too few samples."""
    n = len(ordered)
    # of the 2**n ways in which samples fall below or above the median, `below` have at most k below; in integers,
    # because floats overflow
    tail = int((1 - confidence) / 2 * 2**53) * 2**n >> 53
    below, ways, k = 0, 1, -1
    while k + 1 < n and below + ways <= tail:
        below, k = below + ways, k + 1
        ways = ways * (n - k) // (k + 1)
    return (ordered[k], ordered[n - 1 - k]) if k >= 0 else None


def too_few(n: int) -> str | None:
    """Why `n` samples give no interval of the median, or None."""
    few = f"{n} sample{'s' if n > 1 else ''}: a 95% interval of the median needs {INTERVAL_SAMPLES}"
    return few if n < INTERVAL_SAMPLES else None


def summarize(samples: Sequence[float]) -> PassTimes:
    """Raises ValueError for no samples."""
    if not samples:
        raise ValueError("0 samples: at least one is needed for a summary")
    ordered = sorted(samples)
    p10, q1, middle, q3, p90 = np.quantile(ordered, (0.1, 0.25, 0.5, 0.75, 0.9)).tolist()
    iqr = q3 - q1
    spread = iqr / middle if middle else 0.0
    return PassTimes(
        n=len(ordered),
        median=middle,
        p10=p10,
        p90=p90,
        min=ordered[0],
        max=ordered[-1],
        mean=fmean(ordered),
        std=stdev(ordered) if ordered[1:] else 0.0,
        iqr_over_median=spread,
        ci95=median_interval(ordered),
        outliers=sum(x < q1 - 1.5 * iqr or x > q3 + 1.5 * iqr for x in ordered),
        noisy=spread > NOISY,
        trend=bool(trend(samples)),
    )


def trend(samples: Sequence[float], chance: float = TREND_CHANCE) -> bool | None:
    """Whether samples rise or fall in the order in which they were taken: significant in the Mann-Kendall test (normal
    approximation) at level `chance`, and with medians of the two halves that differ by more than `TREND` of the median.
    None for fewer than `TREND_SAMPLES`."""
    n = len(samples)
    if n < TREND_SAMPLES:
        return None
    if abs(median(samples[-(n // 2) :]) - median(samples[: n // 2])) <= TREND * median(samples):
        return False
    score, earlier = 0, list[float]()
    for x in samples:
        score += bisect_left(earlier, x) + bisect_right(earlier, x) - len(earlier)  # those below, less those above
        insort(earlier, x)
    ties = Counter(samples).values()
    variance = (n * (n - 1) * (2 * n + 5) - sum(t * (t - 1) * (2 * t + 5) for t in ties)) / 18
    if not variance:
        return False
    return math.erfc(max(0, abs(score) - 1) / math.sqrt(2 * variance)) < chance


def dependence(rounds: Rounds) -> float:
    """How many of these samples count as one: 1 where neighbours are independent, more where they resemble each other,
    as with a drift. By the autocorrelation of the signs about the median, on which the median's variance depends, as in
    an AR(1) process. Neighbours are samples of one round."""
    middle = median(chain.from_iterable(rounds))
    signs = [[(ms > middle) - (ms < middle) for ms in one] for one in rounds]
    neighbours = [x * y for one in signs for x, y in pairwise(one)]
    of_signs = max(0.0, fmean(neighbours)) if neighbours else 0.0
    phi = min(
        MOST_CORRELATED, math.sin(math.pi / 2 * of_signs)
    )  # of normal samples whose signs have that autocorrelation
    return (1 + phi) / (1 - phi)


def ratio_interval(a: Rounds, b: Rounds, paired: bool = False) -> tuple[float, float] | None:
    """The 95% interval of median(b) / median(a), of samples by round. Each median's interval is that of order statistics,
    widened by the root of `dependence`; both are combined as variances are (MOVER, Zou and Donner 2008), on a
    logarithmic scale. paired: a round of `a` and the same of `b` were taken in turn, so what both have in common, such
    as a slower clock in one round, is taken out. None if a side has fewer than `INTERVAL_SAMPLES` samples, or one that
    is not above zero."""
    if not all(min(chain.from_iterable(x), default=0) > 0 for x in (a, b)):
        return None
    sides = [[[math.log(ms) for ms in one] for one in rounds] for rounds in (a, b)]
    if paired and len(a) == len(b) > 1:
        common = [(median(x) + median(y)) / 2 for x, y in zip(*sides, strict=True)]
        sides = [[[x - by for x in one] for one, by in zip(rounds, common, strict=True)] for rounds in sides]
    ratio, bounds = 0.0, []
    for rounds in sides:
        ordered = sorted(chain.from_iterable(rounds))
        interval = median_interval(ordered)
        if interval is None:
            return None
        ratio, widened = median(ordered) - ratio, math.sqrt(dependence(rounds))
        bounds.append([widened * (end - median(ordered)) for end in interval])
    (one_below, one_above), (other_below, other_above) = bounds
    return math.exp(ratio - math.hypot(other_below, one_above)), math.exp(ratio + math.hypot(other_above, one_below))


def slowest(by_rank: Sequence[Samples]) -> Samples:
    """The maximum over the ranks of each iteration's time, by pass; `total` is the maximum of a whole iteration."""
    times = np.array([[*samples.values()] for samples in by_rank])  # [ranks, passes, iterations]
    result = dict(zip(by_rank[0], times.max(0).tolist(), strict=True))
    if len(result) > 1:
        result["total"] = times.sum(1).max(0).tolist()
    return result


def precise(by_rank: Sequence[Samples], precision: float, least: int) -> bool:
    """Whether at least so many samples give the median of every pass, on the slowest rank, to within `precision` of itself with 95%
    confidence."""
    for ms in slowest(by_rank).values():
        interval = median_interval(sorted(ms))
        if len(ms) < least or interval is None or interval[1] - interval[0] > 2 * precision * median(ms):
            return False
    return True


def of_ranks(by_rank: Sequence[Samples], empty_ms: float) -> Fields:
    """The fields of `Timing` for all ranks' samples: `passes` of the slowest rank, `by_rank`, `no_ci95`, and the overhead of timing,
    `empty_ms`, relative to the shortest pass."""
    passes, *ranks = (
        {which: summarize(ms) for which, ms in samples.items()} for samples in (slowest(by_rank), *by_rank)
    )
    share = empty_ms / min(times.median for times in passes.values())
    about = {"overhead_ms": empty_ms, "overhead_share": share, "overhead_high": share > OVERHEAD}
    return {"passes": passes, "by_rank": ranks, "no_ci95": too_few(passes["forward"].n), **about}
