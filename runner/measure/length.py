"""How many iterations a run has, and so how long it takes. Without torch: a plan counts them before any world starts."""

from __future__ import annotations

from runner.config.experiment import Experiment

CHECK_RUNS = 10  # iterations that take as long as the check; a model's is done by one device alone
LEADING_RUNS = 4  # before those that are recorded
MOST_PHASE_RUNS = 15
PHASES_S = 0.2  # a slow run records fewer phases
BASELINE_RUNS = 5  # samples of a baseline
BASELINE_S = 1.0  # short iterations get more samples, for about this time
BASELINE_CAP_S = 20.0  # long ones get fewer, at least one, to end within this time


def run_s(spec: Experiment, each_s: float) -> float:
    """The seconds of all iterations of a run, each of which takes so many: of the timing, the phases, the profiler, the check and
    the baseline."""
    options = spec.timing
    number = (options.timing_runs + options.warmup_runs + 1) * options.layers
    if spec.phases:
        number += phase_runs(spec, each_s) + LEADING_RUNS
    if options.method == "profiler":
        number += LEADING_RUNS + options.profile_runs
    if spec.check.enabled:
        number += CHECK_RUNS * (spec.world_size if spec.model is not None else 1)
    seconds = number * each_s
    if spec.baseline != "none":
        once_s = baseline_iteration_s(spec, each_s)
        seconds += once_s * (1 + baseline_runs(options.timing_runs, once_s) * options.layers)
    return seconds


def phase_runs(spec: Experiment, iteration_s: float) -> int:
    """The iterations whose phases are recorded."""
    return spec.timing.phase_runs or max(1, min(MOST_PHASE_RUNS, int(PHASES_S / iteration_s)))


def baseline_runs(runs: int, iteration_s: float) -> int:
    """The number of samples of a baseline for a run of `runs` samples. Short iterations get as many: after a pause a
    GPU is faster for a while, and the median of few samples would show that."""
    runs = min(runs, max(BASELINE_RUNS, int(BASELINE_S / iteration_s)))
    return max(1, min(runs, int(BASELINE_CAP_S / iteration_s)))


def baseline_iteration_s(spec: Experiment, each_s: float) -> float:
    """The seconds of an iteration of the baseline, from those of the run."""
    if spec.baseline == "single":
        return each_s * spec.world_size
    return each_s * spec.workload.dense.batch_pairs / max(spec.workload.batch_pairs, 1)
