"""The verdict on a run against an earlier one: the interval of the ratio of their medians against a tolerance."""

from __future__ import annotations

from enum import StrEnum

from runner.measure.statistics import Samples, quantile, ratio_interval, slowest
from runner.output.record import Result
from runner.output.run_tables import table_of
from runner.report.runs import Run

Interval = tuple[float, float]


class Verdict(StrEnum):
    EVEN = "even"
    FASTER = "faster"
    SLOWER = "slower"
    INCONCLUSIVE = "inconclusive"
    LARGER = "larger"
    UNTIMED = "not timed in B"
    BROKEN = "broken"
    MENDED = "mended"
    FAILED = "not ok in both"
    MISSING = "missing in B"
    GONE = "only in A, not ok there"
    NEW = "new in B"

    @property
    def worse(self) -> bool:
        return self in (self.SLOWER, self.LARGER, self.UNTIMED, self.BROKEN, self.MISSING)


def speed(a: Run, b: Run, which: str, tolerance: float) -> tuple[Verdict, Interval | None]:
    """The verdict on a pass, and the interval of the ratio of its medians. The total of a run without a backward is its
    forward."""
    if a.ms(which) is None:
        return Verdict.EVEN, None
    if b.ms(which) is None:
        return Verdict.UNTIMED, None
    ratio = _of_intervals(a, b, which)
    found = _verdict(ratio, tolerance)
    if ratio is not None and found == Verdict.INCONCLUSIVE:  # the samples give a narrower interval
        ratio = _of_samples(a, b, which) or ratio
        found = _verdict(ratio, tolerance)
    return found, ratio


def _verdict(ratio: Interval | None, tolerance: float) -> Verdict:
    if ratio is None:
        return Verdict.INCONCLUSIVE
    if ratio[0] > 1 + tolerance:
        return Verdict.SLOWER
    if ratio[1] < 1 / (1 + tolerance):
        return Verdict.FASTER
    within = 1 / (1 + tolerance) <= ratio[0] and ratio[1] <= 1 + tolerance
    return Verdict.EVEN if within else Verdict.INCONCLUSIVE


def _of_intervals(a: Run, b: Run, which: str) -> Interval | None:
    """The ratio's interval from the 95% intervals of the two medians: wider than the true one."""
    before, after = ((run.passes.get(which) or run.passes["forward"]).ci95 for run in (a, b))
    if before is None or after is None or not before[0] > 0:
        return None
    return after[0] / before[1], after[1] / before[0]


def _of_samples(a: Run, b: Run, which: str) -> Interval | None:
    """The ratio's interval by bootstrap of the samples; None where a run has none, or has samples of another median
    than its result."""
    found = []
    for run in (a, b):
        measured = which if which in run.passes else "forward"
        ms = (_samples(run.result) or {}).get(measured)
        if not ms or quantile(sorted(ms), 0.5) != run.passes[measured].median:
            return None
        found.append(ms)
    return ratio_interval(found[0], found[1])


def _samples(run: Result) -> Samples | None:
    """By pass, the ms of the slowest rank in each iteration; None where the run has no samples that can be read."""
    by_rank: dict[int, Samples] = {}
    try:
        for row in sorted(table_of(run, "samples") or (), key=lambda row: row["iteration"]):
            by_rank.setdefault(row["rank"], {}).setdefault(row["pass"], []).append(row["ms"])
        return slowest(list(by_rank.values())) if by_rank else None
    except (KeyError, ValueError):  # no readable table, or ranks with different passes or numbers of samples
        return None
