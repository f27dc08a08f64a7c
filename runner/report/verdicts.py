"""The verdict on a run against another: the interval of the ratio of their medians against a tolerance."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from runner.measure.statistics import Rounds, Samples, quantile, ratio_interval, slowest
from runner.output.record import Result
from runner.output.run_tables import table_of
from runner.report.runs import Run

Interval = tuple[float, float]
TOLERANCE = 0.02


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
        return self in (self.SLOWER, self.LARGER, self.UNTIMED, self.BROKEN)


@dataclass(frozen=True)
class MeasuredPass:
    """A pass of a run: its median and that median's 95% interval, in ms, and the slowest rank's samples by round, where
    they are known."""

    median: float
    ci95: Interval | None = None
    rounds: Rounds | None = None

    @staticmethod
    def of(run: Run, which: str) -> MeasuredPass | None:
        """None for a pass without times. The total of a run without a backward is its forward."""
        times = run.times(which)
        if times is None or not run.ok:
            return None
        rounds = samples_of(run.result).get(which if which in run.passes else "forward")
        # samples of another median are not those of this result
        theirs = rounds and quantile(sorted(ms for one in rounds for ms in one), 0.5) == times.median
        return MeasuredPass(times.median, times.ci95, rounds if theirs else None)


def speed(
    before: MeasuredPass | None, after: MeasuredPass | None, tolerance: float, paired: bool = False
) -> tuple[Verdict, Interval | None]:
    """The verdict on a pass of a run after another, and the interval of the ratio of its medians; None: the run lacks the
    pass. paired: the runs took turns."""
    if before is None:
        return Verdict.EVEN, None
    return (Verdict.UNTIMED, None) if after is None else judged(before, after, tolerance, paired)


def judged(a: MeasuredPass, b: MeasuredPass, tolerance: float, paired: bool = False) -> tuple[Verdict, Interval | None]:
    """The verdict on B against A, and the interval of B's median over A's; None for too few samples."""
    ratio = ratio_interval(a.rounds, b.rounds, paired) if a.rounds and b.rounds else _of_intervals(a, b)
    return _verdict(ratio, tolerance), ratio


def _verdict(ratio: Interval | None, tolerance: float) -> Verdict:
    if ratio is None:
        return Verdict.INCONCLUSIVE
    if ratio[0] > 1 + tolerance:
        return Verdict.SLOWER
    if ratio[1] < 1 / (1 + tolerance):
        return Verdict.FASTER
    within = 1 / (1 + tolerance) <= ratio[0] and ratio[1] <= 1 + tolerance
    return Verdict.EVEN if within else Verdict.INCONCLUSIVE


def _of_intervals(a: MeasuredPass, b: MeasuredPass) -> Interval | None:
    """Without samples, the ratio's interval from those of the two medians; wider, as their dependence is not known."""
    if a.ci95 is None or b.ci95 is None or not a.ci95[0] > 0:
        return None
    return b.ci95[0] / a.ci95[1], b.ci95[1] / a.ci95[0]


def samples_of(run: Result) -> dict[str, Rounds]:
    """By pass and round, the ms of the slowest rank in each iteration; empty where the run has no samples that can be
    read."""
    by_rank: dict[int, Samples] = {}
    numbers: dict[tuple[int, str], Counter[int]] = {}
    try:
        for row in sorted(table_of(run, "samples") or (), key=_order):
            by_rank.setdefault(row["rank"], {}).setdefault(row["pass"], []).append(row["ms"])
            numbers.setdefault((row["rank"], row["pass"]), Counter())[_order(row)[0]] += 1
        counts = {tuple(found.values()) for found in numbers.values()}
        if len(counts) != 1:  # no samples, or ranks with different numbers of them
            return {}
        (sizes,) = counts
        return {which: _divided(ms, sizes) for which, ms in slowest(list(by_rank.values())).items()}
    except (KeyError, ValueError):  # no readable table, or ranks with different passes
        return {}


def _order(sample: dict[str, Any]) -> tuple[int, int]:
    return sample.get("round") or 0, sample["iteration"]  # older packed sweeps have no rounds


def _divided(ms: list[float], sizes: tuple[int, ...]) -> Rounds:
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return [ms[end - size : end] for end, size in zip(ends, sizes, strict=True)]
