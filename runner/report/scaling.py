"""Speedup and efficiency against one device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

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
    rates = _rates_of_one(runs) if several else {}
    for run in filter(lambda run: run.ok, runs):
        if run.result.gain:
            mark = "*" if run.result.baseline and run.result.baseline.extrapolated else ""
            found[run] = Scaling(*run.result.gain, mark)
        elif several and run.tflops and run.world_size:
            tokens = run.seq_len or 0
            if rate := rates.get(_on_one(run, tokens)) or rates.get(_on_one(run, tokens / run.world_size)):
                efficiency = run.tflops / rate
                found[run] = Scaling(efficiency * run.world_size, efficiency, "†")
    return found


def _on_one(run: Run, tokens: float) -> tuple[Any, ...]:
    """The run's workload on one device, with so many tokens."""
    other = {"seq_len": tokens, "world_size": 1}
    return tuple(other.get(key, getattr(run, key)) for key in WORKLOAD)


def _rates_of_one(runs: Sequence[Run]) -> dict[tuple[Any, ...], float]:
    """The most TFLOP/s on one device, by workload."""
    rates: dict[tuple[Any, ...], float] = {}
    for run in runs:
        if run.ok and run.tflops and run.world_size == 1:
            rates[run.workload] = max(run.tflops, rates.get(run.workload, 0.0))
    return rates
