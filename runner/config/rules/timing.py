"""Rules of how a run is timed."""

from __future__ import annotations

from collections import Counter
from math import factorial, prod

from omegaconf import DictConfig

from runner.config.experiment import NEW_PACKS, Experiment, Timing
from runner.config.schema import TIMING_DEFAULTS
from runner.config.values import InvalidConfig, UnsupportedHere, plain, shown

DAY_MS = 24 * 3.6e6


def resolved(cfg: DictConfig, device: str) -> Timing:
    """cfg.timing with the defaults of the hardware."""
    return Timing(**TIMING_DEFAULTS[device] | {k: x for k, x in plain(cfg.timing).items() if x is not None})


def check_group(cfg: DictConfig) -> None:
    for key in ("warmup_ms", "settle_ms"):
        if not 0 <= (cfg.timing[key] or 0) <= DAY_MS:
            raise InvalidConfig(f"timing.{key}={cfg.timing[key]:g}: must be at least 0 and at most a day, or null")
    if not isinstance(cfg.phases, bool) and cfg.phases != "table":
        raise InvalidConfig(f"phases={shown(cfg.phases)}: must be true, false or table")
    if cfg.order.startswith("interleaved") and cfg.timing.method == "simple":
        raise InvalidConfig("order=interleaved timing=simple: one mean has no rounds; use timing=warmup or order=auto")


def check_layers(run: Experiment, cfg: DictConfig) -> None:
    """Samples of several layers, or each of a packed batch of its own."""
    timing = run.timing
    asked = [f"timing.layers={timing.layers}"] if timing.layers > 1 else []
    asked += ["timing.new_packs=true"] if timing.new_packs else []
    for what in asked:
        if timing.method not in ("warmup", "adaptive"):
            raise InvalidConfig(f"{what} timing={timing.method}: has one call a sample; use timing=warmup or adaptive")
        if timing.do_bench:
            raise InvalidConfig(f"{what} timing.do_bench=true: that times one call by itself; use one of the two")
    if timing.new_packs:
        _check_new_packs(run)


def check_nvtx(run: Experiment, cfg: DictConfig) -> None:
    if not run.nvtx:
        return
    if run.device != "cuda":
        raise InvalidConfig("nvtx=true: NVTX ranges are for nsys, on GPUs; on a CPU timing=profiler writes a trace")
    if not run.phases or run.is_peer:
        raise InvalidConfig("nvtx=true: names the phases, and this run has none; use phases=true and a variant of ours")


def _check_new_packs(run: Experiment) -> None:
    lengths = run.workload.seqlens
    if lengths is None:
        raise InvalidConfig("timing.new_packs=true: this batch is not packed; give seqlens=random or a list of lengths")
    if run.baseline == "dense":
        raise InvalidConfig("timing.new_packs=true baseline=dense: dense attention has one sequence; use baseline=none")
    if run.workload.named_mask is not None:
        raise InvalidConfig(
            f"timing.new_packs=true mask={run.workload.named_mask.name}: a mask by name is for the lengths of one packed batch; use mask=none"
        )
    if run.graphs:
        raise InvalidConfig(f"timing.new_packs=true replay={run.replay}: a graph has fixed lengths; use replay=none")
    orders = factorial(len(lengths)) // prod(factorial(n) for n in Counter(lengths).values())
    if orders <= NEW_PACKS:
        raise InvalidConfig(
            f"timing.new_packs=true: these lengths have {orders} orders, and more than {NEW_PACKS} are needed; give more "
            "sequences, of different lengths"
        )


def check_device(run: Experiment, cfg: DictConfig) -> None:
    """What the timing methods need of the hardware. Raises UnsupportedHere."""
    timing = run.timing
    if run.replay == "graphs" and run.device == "cpu":
        raise UnsupportedHere("replay=graphs on a CPU: CUDA graphs need a GPU; replay=none works here")
    if timing.method == "cudagraph" and run.device == "cpu":
        raise UnsupportedHere("timing=cudagraph on a CPU: CUDA graphs need a GPU; timing=warmup works here")
    if run.device == "cuda" and run.world_size == 1:
        return
    if timing.counters:
        raise UnsupportedHere("timing.counters=true: ncu looks into one process with a GPU; use world_size=1 on CUDA")
    if timing.do_bench:
        raise UnsupportedHere("timing.do_bench=true: triton.testing.do_bench times one GPU; use world_size=1 on CUDA")
