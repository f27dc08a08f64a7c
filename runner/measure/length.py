"""How many iterations a run has, and so how long it takes. Without torch: a plan counts them before any world starts."""

from __future__ import annotations

from runner.config.experiment import Experiment

LEADING_RUNS = 4  # before those that are recorded
MOST_PHASE_RUNS = 15
PHASES_S = 0.2  # a slow run records fewer phases
BASELINE_RUNS = 5  # samples of a baseline
BASELINE_S = 1.0  # short iterations get more samples, for about this time
BASELINE_CAP_S = 20.0  # long ones get fewer, at least one, to end within this time


def iterations(spec: Experiment, each_s: float) -> int:
    """Those of the timing, the phases and the profiler; each takes so many seconds."""
    options = spec.timing
    found = (options.timing_runs + options.warmup_runs + 1) * options.layers
    if spec.phases:
        found += phase_runs(spec, each_s) + LEADING_RUNS
    return found + (LEADING_RUNS + options.profile_runs if options.method == "profiler" else 0)


def phase_runs(spec: Experiment, iteration_s: float) -> int:
    """The iterations whose phases are recorded."""
    return spec.timing.phase_runs or max(1, min(MOST_PHASE_RUNS, int(PHASES_S / iteration_s)))


def baseline_runs(runs: int, iteration_s: float) -> int:
    """The number of samples of a baseline for a run of `runs` samples. Short iterations get as many: after a pause a
    GPU is faster for a while, and the median of few samples would show that."""
    runs = min(runs, max(BASELINE_RUNS, int(BASELINE_S / iteration_s)))
    return max(1, min(runs, int(BASELINE_CAP_S / iteration_s)))


def baseline_s(spec: Experiment, each_s: float) -> float:
    """The seconds that the baseline should take, from those of an iteration of the run."""
    options, work = spec.timing, spec.workload
    if spec.baseline == "single":
        single = each_s * spec.world_size
        return single * (1 + baseline_runs(options.timing_runs, single))
    if spec.baseline == "dense":
        dense = each_s * work.dense.batch_pairs / max(work.batch_pairs, 1)
        return dense * (options.timing_runs + options.warmup_runs + 1) * options.layers
    return 0.0
