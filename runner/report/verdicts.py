"""The verdict on a run against another: the interval of the ratio of their medians against a tolerance."""

from __future__ import annotations

from enum import StrEnum
from math import isclose
from statistics import median

from runner.measure.statistics import Rounds, ratio_interval
from runner.output.run_tables import table_of
from runner.record.fields import PassTimes
from runner.record.result import Result
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
    def status(self) -> int:
        """The exit status that it stands for: 1 where B is worse, 2 where B lacks a run."""
        return 1 if self in (self.SLOWER, self.LARGER, self.UNTIMED, self.BROKEN) else 2 * (self == self.MISSING)


def speed(a: Run, b: Run, which: str, tolerance: float, paired: bool = False) -> tuple[Verdict, Interval | None]:
    """The verdict on a pass of run B against that of run A, both of which are ok, and the interval of B's median over A's; None
    for too few samples. paired: the runs took turns."""
    before, after = a.times(which), b.times(which)
    if before is None:
        return Verdict.EVEN, None
    if after is None:
        return Verdict.UNTIMED, None
    old, new = _rounds(a, which, before), _rounds(b, which, after)
    ratio = ratio_interval(old, new, paired) if old and new else _of_intervals(before, after)
    return verdict(ratio, tolerance), ratio


def verdict(ratio: Interval | None, tolerance: float) -> Verdict:
    """The verdict by the interval of B's median over A's."""
    if ratio is None:
        return Verdict.INCONCLUSIVE
    if ratio[0] > 1 + tolerance:
        return Verdict.SLOWER
    if ratio[1] < 1 / (1 + tolerance):
        return Verdict.FASTER
    within = 1 / (1 + tolerance) <= ratio[0] and ratio[1] <= 1 + tolerance
    return Verdict.EVEN if within else Verdict.INCONCLUSIVE


def _of_intervals(a: PassTimes, b: PassTimes) -> Interval | None:
    """Without samples, the ratio's interval from those of the two medians; wider, as their dependence is not known."""
    if a.ci95 is None or b.ci95 is None or not a.ci95[0] > 0:
        return None
    return b.ci95[0] / a.ci95[1], b.ci95[1] / a.ci95[0]


def _rounds(run: Run, which: str, times: PassTimes) -> Rounds:
    """The samples of a pass; none where their median is not that of the result: they are of another run."""
    rounds = samples_of(run.result).get(which if which in run.passes else "forward", [])
    return rounds if rounds and isclose(median(ms for one in rounds for ms in one), times.median) else []


def samples_of(run: Result) -> dict[str, Rounds]:
    """By pass and round, the ms of the slowest rank in each iteration; empty where the run has no samples that can be
    read, or not the same number of each rank and pass."""
    import pandas as pd

    try:
        samples = pd.DataFrame(table_of(run, "samples"))
        samples["round"] = samples.get("round", samples["ms"] * 0).fillna(0)  # older packed sweeps have none
        wide = samples.pivot(index=["round", "iteration"], columns=["pass", "rank"], values="ms")
    except (KeyError, ValueError):
        return {}
    if wide.isna().any(axis=None):
        return {}
    slowest = {which: wide[which].max(axis=1) for which in samples["pass"].unique()}
    if len(slowest) > 1:
        slowest["total"] = wide.T.groupby(level="rank").sum().max()
    return {which: [list(ms) for _, ms in times.groupby(level="round")] for which, times in slowest.items()}
