"""About how long a run takes, before it starts: its iterations, each by its FLOPs at the machine's rate. Estimates, which no result
has. Without torch: a plan counts them before any world starts."""

from __future__ import annotations

from runner.config.experiment import Experiment
from runner.config.values import UnsupportedHere
from runner.costs.hardware import DEFAULTS, ceilings
from runner.measure import ceilings_file, metrics

RUN_S = 0.5  # of each run in a warm world, beside its iterations
# of a new world with its imports and first kernels, and for each rank: H200s' results, and two cores
START_S = {"cuda": (12.0, 1.0), "cpu": (2.0, 1.2)}
MOST_CPU_S = 600.0  # beyond it, a CPU refuses a model's run or a trial of the longest sequence
CHECK_RUNS = 10  # iterations that take as long as the check; a model's is done by one device alone
LEADING_RUNS = 4  # before those that are recorded
MOST_PHASE_RUNS = 15
PHASES_S = 0.2  # a slow run records fewer phases
BASELINE_RUNS = 5  # samples of a baseline
BASELINE_S = 1.0  # short iterations get more samples, for about this time
BASELINE_CAP_S = 20.0  # long ones get fewer, at least one, to end within this time


def start_s(spec: Experiment) -> float:
    """Seconds to start the run's world."""
    world_s, rank_s = START_S[spec.device]
    return world_s + rank_s * spec.world_size


def run_s(spec: Experiment) -> tuple[float, str]:
    """Seconds in a warm world, and by what they were estimated."""
    each_s, source = iteration_s(spec)
    warm_s = (spec.timing.warmup_ms + spec.timing.settle_ms) / 1e3
    return RUN_S + warm_s + iterations_s(spec, each_s), f"FLOPs ({source})"


def iteration_s(spec: Experiment) -> tuple[float, str]:
    """Seconds of an iteration, never 0, and where the rate is from: on a CPU, from an earlier run that measured it."""
    kept = ceilings_file.of_cpu(spec.world_size, spec.workload.dtype) if spec.device == "cpu" else None
    rate = ceilings(kept, spec.device) if kept else DEFAULTS[spec.device]
    return max(metrics.iteration_flops(spec) / spec.sharing / rate.tflops / 1e12, 1e-6), rate.source


def check_cpu(spec: Experiment, seconds: float, way_out: str) -> None:
    """Raises UnsupportedHere for what takes a CPU longer than minutes, unless `launch.timeout_s` allows it."""
    if spec.device == "cpu" and seconds > max(MOST_CPU_S, spec.launch.timeout_s):
        name = f"model={spec.model.name}" if spec.model is not None else f"seq_len={spec.workload.seq_len}"
        raise UnsupportedHere(
            f"{name}: takes about {seconds / 60:.0f} min on this CPU; use a GPU, {way_out}, or launch.timeout_s="
            f"{seconds:.0f} to wait for it"
        )


def iterations_s(spec: Experiment, each_s: float) -> float:
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
