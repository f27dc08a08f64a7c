"""Speedup and efficiency against one device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from runner.report.runs import WORKLOAD, Run


@dataclass(frozen=True)
class Scaling:
    """Against one device. `mark`: "" for the run's own baseline, "*" for one extrapolated by FLOPs, "†" for the fastest
    other run."""

    speedup: float
    efficiency: float
    mark: str


def scaling(runs: Sequence[Run]) -> dict[Run, Scaling]:
    """Of each run with a baseline, or with runs on one device among `runs`: of the same workload (strong scaling) or,
    if there are none, of as many tokens as a rank has (weak scaling). The efficiency is then the ratio of TFLOP/s per
    device."""
    found: dict[Run, Scaling] = {}
    several = any(run.ok and (run.world_size or 0) > 1 for run in runs)
    for run in filter(lambda run: run.ok, runs):
        if run.result.gain:
            mark = "*" if run.result.baseline and run.result.baseline.extrapolated else ""
            found[run] = Scaling(*run.result.gain, mark)
        elif several and run.tflops and run.world_size:
            tokens = run.seq_len or 0
            if rate := _rate_of_one(run, tokens, runs) or _rate_of_one(run, tokens / run.world_size, runs):
                efficiency = run.tflops / rate
                found[run] = Scaling(efficiency * run.world_size, efficiency, "†")
    return found


def _rate_of_one(run: Run, tokens: float, runs: Sequence[Run]) -> float | None:
    """The most TFLOP/s among `runs` on one device of this run's workload with so many tokens."""
    other = {"seq_len": tokens, "world_size": 1}
    workload = tuple(other.get(key, getattr(run, key)) for key in WORKLOAD)
    return max((one.tflops for one in runs if one.ok and one.tflops and one.workload == workload), default=None)
