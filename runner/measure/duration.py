"""About how long a run takes, before it starts: its FLOPs at the machine's rate. Estimates, which no result has. Without torch."""

from __future__ import annotations

from runner.config.experiment import Experiment
from runner.config.values import UnsupportedHere
from runner.costs.hardware import DEFAULTS, ceilings
from runner.measure import ceilings_file, length, metrics

RUN_S = 0.5  # of each run in a warm world, beside its iterations
# of a new world with its imports and first kernels, and for each rank: H200s' results, and two cores
START_S = {"cuda": (12.0, 1.0), "cpu": (2.0, 1.2)}
MOST_CPU_S = 600.0  # beyond it, a CPU refuses a model's run or a trial of the longest sequence


def start_s(spec: Experiment) -> float:
    """Seconds to start the run's world."""
    world_s, rank_s = START_S[spec.device]
    return world_s + rank_s * spec.world_size


def run_s(spec: Experiment) -> tuple[float, str]:
    """Seconds in a warm world, and by what they were estimated."""
    each, source = iteration_s(spec)
    warm_s = (spec.timing.warmup_ms + spec.timing.settle_ms) / 1e3
    return RUN_S + warm_s + length.run_s(spec, each), f"FLOPs ({source})"


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
