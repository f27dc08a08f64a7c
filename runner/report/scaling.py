"""Speedup and efficiency against one device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from runner.report.runs import WORKLOAD, Run


@dataclass(frozen=True)
class Scaling:
    """`mark` names the reference: "" for the run's own baseline, "*" for a baseline extrapolated by FLOPs, "†" for the fastest
    run on one device among those reported."""

    speedup: float
    efficiency: float
    mark: str


def scaling(runs: Sequence[Run]) -> dict[Run, Scaling]:
    """Speedup and efficiency of each run that has a baseline, or that can be compared with runs on one device among `runs`. Those
    had the same workload (strong scaling) or, if none had, as many tokens as each rank (weak scaling); the efficiency is then
    the ratio of TFLOP/s per device."""
    found: dict[Run, Scaling] = {}
    several = any(run.ok and (run.world_size or 0) > 1 for run in runs)
    for run in filter(lambda run: run.ok, runs):
        if run.result.gain:
            mark = "*" if run.result.baseline and run.result.baseline.extrapolated else ""
            found[run] = Scaling(*run.result.gain, mark)
        elif several and run.tflops and run.world_size and (rates := _rates_of_one(run, runs)):
            efficiency = run.tflops / max(rates)
            found[run] = Scaling(efficiency * run.world_size, efficiency, "†")
    return found


def _rates_of_one(run: Run, runs: Sequence[Run]) -> list[float]:
    """TFLOP/s of the runs on one device that did the same workload, or else this run's tokens per rank."""

    def rates(seq_len: float) -> list[float]:
        other = {"seq_len": seq_len, "world_size": 1}
        workload = tuple(other.get(key, getattr(run, key)) for key in WORKLOAD)
        return [one.tflops for one in runs if one.ok and one.tflops and one.workload == workload]

    tokens, ranks = run.seq_len or 0, run.world_size or 1
    return rates(tokens) or rates(tokens / ranks)
