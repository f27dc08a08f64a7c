"""Rules of where and how a run is done: device, ranks, environment, provoked faults, what this machine can hold, timing."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, replace
from math import factorial, prod
from typing import Any

from omegaconf import DictConfig, OmegaConf

from runner.config import place
from runner.config.experiment import NEW_PACKS, PHASES, Experiment, Timing
from runner.config.schema import TIMING_DEFAULTS, Launch
from runner.config.values import SECRET_NAME, InvalidConfig, UnsupportedHere, one_of, plain, shown, whole

MOST_RANKS = 1 << 16
FAULTS = ("raise", "kill", "hang", "oom")
# environment variables of the ranks that the launcher sets
OWN_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "GROUP_", "ROLE_", "TORCHELASTIC_", "ATTENTION_", "PYTHON")


def device(cfg: DictConfig, gpus: int) -> str:
    return cfg.hardware.name if cfg.hardware.name != "auto" else ("cuda" if gpus else "cpu")


def world_size(cfg: DictConfig, gpus: int) -> int:
    """The number of ranks. Raises InvalidConfig, and UnsupportedHere for more than there are GPUs."""
    value, on_gpus, joined = cfg.world_size, device(cfg, gpus) == "cuda", place.joined()
    if value == "auto" and joined is not None:
        return joined.whole_world(gpus if on_gpus else 0)
    if value == "auto":
        return max(gpus, 2 if cfg.launch.share_gpu else 1) if on_gpus else 2
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InvalidConfig(f"world_size={shown(value)}: must be auto or a whole number of at least 1")
    whole("world_size", value, most=MOST_RANKS)
    if joined is not None:
        joined.check(value, gpus if on_gpus else 0)
    elif on_gpus and value > gpus and not (gpus and cfg.launch.share_gpu):
        others = f"world_size={gpus} or hardware=cpu would work, launch.share_gpu=true would check it without timing it"
        raise UnsupportedHere(
            f"world_size={value}: each rank needs a GPU of its own and this machine has {gpus}; "
            + (others if gpus else "hardware=cpu would work")
        )
    return value


def check_launch(cfg: DictConfig) -> None:
    launch = cfg.launch
    for key, usual in (("nodes", 1), ("endpoint", None)):
        if launch[key] != usual:
            raise InvalidConfig(
                f"launch.{key}={shown(launch[key])}: nodes are joined by their launcher; leave it out and run torchrun --nnodes N "
                "--nproc-per-node G -m runner, or srun python -m runner"
            )
    _check_env(launch.env)


def _check_env(variables: Any) -> None:
    if variables is None:
        return
    if not isinstance(variables, DictConfig):
        raise InvalidConfig(f"launch.env={shown(variables)}: must be null or {{NAME:value,..}}")
    for name, value in ((str(name), value) for name, value in variables.items()):
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) or value is None or OmegaConf.is_config(value):
            raise InvalidConfig(
                f"launch.env.{shown(name)}={shown(value)}: must be a name of letters, digits and _, with a text or a number"
            )
        if SECRET_NAME.search(name):
            raise InvalidConfig(f"launch.env.{name}: results record what stands here; set what is secret outside")
        if name.startswith(OWN_VARIABLES):
            raise InvalidConfig(f"launch.env.{name}={shown(value)}: is the launcher's own; leave it out")


def launch_options(cfg: DictConfig, world_size: int, gpus: int) -> Launch:
    """The options of a launch, with the nodes of a launched world."""
    joined = place.joined()
    found = Launch(**plain(cfg.launch))
    return found if joined is None else replace(found, nodes=joined.nodes_of(world_size, gpus))


def check_shared_gpu(run: Experiment, cfg: DictConfig) -> None:
    """Several ranks on one GPU exchange over symmetric memory, and are checked but not timed."""
    asked, joined = "launch.share_gpu=true", place.joined()
    if not run.launch.share_gpu:
        return
    refused = {
        "": joined and f"the ranks of one process share its GPU; run python -m runner without {joined.launcher}",
        "check.enabled=false": not run.check.enabled and "ranks of one GPU are checked only; use check.enabled=true",
        "attention=auto": run.chosen is None and "it chooses by times, which mean nothing here; name a variant",
        " ".join(f"attention.{option}=best" for option in run.best_options): run.best_options
        and "chosen by times, which mean nothing here; give a value",
        f"transport={run.transport}": run.transport not in ("auto", "symm")
        and "NCCL refuses two ranks on one GPU, and gloo has CPU tensors only; use transport=symm",
    }
    for what, why in refused.items():
        if why:
            raise InvalidConfig(f"{asked} {what}".rstrip() + f": {why}")
    if run.is_peer:
        nccl = "it exchanges over NCCL, which refuses two ranks on one GPU"
        raise UnsupportedHere(f"{asked} attention={run.variant}: {nccl}")
    if run.device == "cpu":
        raise UnsupportedHere(f"{asked} on a CPU: no GPU to share; launch.share_gpu=false works here")


def check_fault(run: Experiment, cfg: DictConfig) -> None:
    """launch.fault names a rank of this world, a phase and a kind of fault."""
    fault = run.launch.fault
    match = re.fullmatch(rf"([0-9]{{1,6}}):(.*):({'|'.join(FAULTS)})", fault or "0::raise")
    if match is None or int(match[1]) >= run.world_size:
        raise InvalidConfig(
            f"launch.fault={shown(fault)}: must be RANK:PHASE:{'|'.join(FAULTS)} with a rank below {run.world_size}, "
            "for instance 1:timing:raise"
        )
    if fault is not None:
        one_of("launch.fault's phase", match[2], PHASES)


RANKS_A_CORE = 32  # on a CPU


@dataclass(frozen=True)
class MachineLimits:
    """The limits of a run here. None: unknown, and no limit."""

    cores: int
    memory: int | None = None  # bytes
    gpus: int = 0
    gpu_memory: int | None = None  # bytes of the largest GPU


def check_fits(run: Experiment, machine: MachineLimits) -> None:
    """Raises InvalidConfig for more ranks than this machine's cores can serve, or inputs that its memory cannot
    hold."""
    ranks = -(-run.world_size // run.launch.nodes)  # on this node
    most = RANKS_A_CORE * machine.cores
    if run.device == "cpu" and ranks > most:
        raise InvalidConfig(
            f"world_size={run.world_size}: {ranks} ranks on {machine.cores} cores, which take at most {most}"
        )
    memory, sharing = machine.memory, ranks
    if run.device == "cuda":
        memory = machine.gpu_memory
        sharing = ranks if run.launch.share_gpu else -(-ranks // max(machine.gpus, 1))
    each = input_bytes(run)
    if memory is not None and each * sharing > memory:
        keys = ("batch", "seq_len", "heads", "kv_heads", "head_dim", "v_head_dim")
        sizes = " ".join(f"{key}={x}" for key in keys if (x := getattr(run.workload, key)) is not None)
        where = "a GPU" if run.device == "cuda" else "this machine"
        raise InvalidConfig(
            f"{sizes}: the inputs take {each / 2**30:,.1f} GiB a rank and {each * sharing / 2**30:,.1f} GiB for the "
            f"{sharing} here, and {where} has {memory / 2**30:,.1f} GiB; give smaller sizes"
        )


def input_bytes(run: Experiment) -> int:
    """Bytes of a rank's shards of q, k, v and, with a backward, of the output's gradient."""
    call, world = run.workload, run.sharing
    queries = call.queries if call.q_len is not None else -(-call.seq_len // world)
    found = queries * call.shapes.q_token + -(-call.seq_len // world) * call.shapes.kv_token
    found += -(-(call.prefix or 0) // world) * call.shapes.kv_token // call.batch
    return found + (queries * call.shapes.out_token if run.backward else 0)


DAY_MS = 24 * 3.6e6


def timing_options(cfg: DictConfig, device: str) -> Timing:
    """cfg.timing with the defaults of the hardware."""
    return Timing(**TIMING_DEFAULTS[device] | {k: x for k, x in plain(cfg.timing).items() if x is not None})


def check_timing(cfg: DictConfig) -> None:
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
