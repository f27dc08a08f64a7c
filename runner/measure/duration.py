"""About how long a run takes, before it starts. Estimates, which no result has. Without torch."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from attention.masks.band import Band
from attention.variants.registry import AUTO, VARIANTS
from runner import environment
from runner.config.experiment import Experiment
from runner.costs import links, rates
from runner.costs.hardware import DEFAULTS, Ceilings, Machine, ceilings
from runner.costs.model import choose, task_of
from runner.measure import ceilings_file, length, metrics

# of each run in a warm world, and of the first one in a new world with its imports and first kernels: H200s' results, and two cores
RUN_S = {"cuda": 0.5, "cpu": 0.5}
START_S = {"cuda": 12.0, "cpu": 2.0}
START_RANK_S = {"cuda": 1.0, "cpu": 1.2}  # for each rank
MOST_WORLDS = 4  # that stay warm
CHECK_RUNS = 10  # iterations that take as long as the correctness check


class Starts:
    """The worlds that runs so far would have started."""

    def __init__(self) -> None:
        self.warm: list[Any] = []

    def seconds(self, spec: Experiment) -> float:
        """To start the world of the next run; 0 in a warm one."""
        world = spec.world_size, spec.device, spec.launch.share_gpu, str(spec.launch.env)
        is_warm = world in self.warm and not spec.launch.fresh
        self.warm = [*(each for each in self.warm if each != world), world][-MOST_WORLDS:]
        return 0.0 if is_warm else START_S[spec.device] + START_RANK_S[spec.device] * spec.world_size


def of_run(spec: Experiment) -> tuple[float, str]:
    """Seconds in a warm world, and by what they were estimated."""
    each, basis = iteration_s(spec)
    options = spec.timing
    number = length.iterations(spec, each) + (CHECK_RUNS if spec.check.enabled else 0)
    warm_s = (options.warmup_ms + options.settle_ms) / 1e3
    return RUN_S[spec.device] + warm_s + number * each + length.baseline_s(spec, each), basis


def iteration_s(spec: Experiment) -> tuple[float, str]:
    """Seconds of an iteration: by the model of time where it knows the call, else by the FLOPs at the machine's rate. Never 0."""
    gpu = _gpu() if spec.device == "cuda" else ""
    found = _ceilings(spec)
    by = found.source
    if gpu and any(rate.gpu == gpu for rate in rates.table()):
        by = f"rates of {gpu}"
    try:
        return max(_modelled_ms(spec, gpu, found) / 1e3, 1e-6), f"the model of time ({by})"
    except ValueError:
        flops = metrics.flops(spec)
        replicated = spec.chosen is not None and spec.chosen.layout.replicated
        seconds = flops.get("total", flops["forward"]) / (1 if replicated else spec.world_size) / found.tflops / 1e12
        return max(seconds, 1e-6), f"FLOPs ({found.source})"


def _modelled_ms(spec: Experiment, gpu: str, found: Ceilings) -> float:
    """Raises ValueError for what the model does not know."""
    call = spec.workload
    if (
        spec.model is not None
        or not isinstance(call.mask, Band)
        or not (spec.variant in VARIANTS or spec.variant == AUTO)
    ):
        raise ValueError("not attention under a band by one of our variants")
    task = task_of(
        call.cu_seqlens, spec.world_size, call.shapes, call.causal, call.window, call.seqlens is not None, spec.backward, call.q_len,
        call.softcap,
    )  # fmt: skip
    usual = "decode" if task.decode else "flash4"
    kernel = spec.kernel if spec.kernel != "auto" else usual if spec.device == "cuda" else "sdpa_flash"
    transports = ("symm", "nccl") if spec.device == "cuda" else ("gloo",)
    machine = Machine(
        gpu=gpu, kernel=lambda masks: kernel, transports=transports if spec.transport == "auto" else (spec.transport,),
        rates=rates.table(), links=links.table(), device=spec.device, ceilings=found,
    )  # fmt: skip
    variants = VARIANTS if spec.variant == AUTO else [spec.variant]
    return choose(task, machine, variants).best.ms


def _ceilings(spec: Experiment) -> Ceilings:
    """This machine's, where an earlier run on its CPU measured them."""
    kept = ceilings_file.of_cpu(spec.world_size, spec.workload.dtype) if spec.device == "cpu" else None
    return ceilings(kept, spec.device) if kept else DEFAULTS[spec.device]


@lru_cache
def _gpu() -> str:
    return next((str(state["name"]) for state in environment.gpu_state() if state.get("name")), "")
