"""Speedup and efficiency against one device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from runner.report.runs import WORKLOAD, Run


@dataclass(frozen=True)
class Scaling:
    """Against one device. `mark`: "" for the run's own baseline, "*" for one extrapolated by FLOPs, "†" for the fastest
    other run; with "!" where its time or the baseline's is noisy."""

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
        base, last = run.result.baseline, list(run.passes)[-1]
        noise = "!" if run.passes[last].noisy or (base and base.noisy(last)) else ""
        if run.result.gain:
            found[run] = Scaling(*run.result.gain, ("*" if base and base.extrapolated else "") + noise)
        elif several and run.tflops and run.world_size:
            tokens = run.seq_len or 0
            if rate := rates.get(_on_one(run, tokens)) or rates.get(_on_one(run, tokens / run.world_size)):
                efficiency = run.tflops / rate
                found[run] = Scaling(efficiency * run.world_size, efficiency, f"†{noise}")
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
