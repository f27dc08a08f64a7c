"""Rules of the world that a run is launched in: device, ranks, nodes, environment and provoked faults."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

from omegaconf import DictConfig, OmegaConf

from runner import redaction
from runner.config import place
from runner.config.experiment import PHASES, PHASES_AFTER_CHECK, Experiment
from runner.config.schema import Launch
from runner.config.values import InvalidConfig, UnsupportedHere, above_zero, one_of, plain, shown, whole

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


def check_group(cfg: DictConfig) -> None:
    launch = cfg.launch
    for key in ("timeout_s", "start_timeout_s"):
        above_zero(f"launch.{key}", launch[key], f"the default is {getattr(Launch, key):g}, inf for no limit")
    no_limit = "launch.memory_limit_gb=null is no limit"
    if launch.memory_limit_gb == math.inf:
        raise InvalidConfig(f"launch.memory_limit_gb=inf: must be a number of GiB; {no_limit}")
    above_zero("launch.memory_limit_gb", launch.memory_limit_gb, no_limit, 1e9)
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
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise InvalidConfig(f"launch.env: {shown(name)} is no variable's name; use letters, digits and _")
        if redaction.NAME.search(name):
            raise InvalidConfig(f"launch.env.{name}: results record what stands here; set what is secret outside")
        if value is None or OmegaConf.is_config(value):
            raise InvalidConfig(f"launch.env.{name}={shown(value)}: must be a text or a number")
        if name.startswith(OWN_VARIABLES):
            raise InvalidConfig(f"launch.env.{name}={shown(value)}: is the launcher's own; leave it out")


def resolved(cfg: DictConfig, world_size: int, gpus: int) -> Launch:
    """The options of a launch, with the nodes of a launched world."""
    joined = place.joined()
    found = Launch(**plain(cfg.launch))
    return found if joined is None else replace(found, nodes=joined.nodes_of(world_size, gpus))


def check_shared_gpu(run: Experiment, cfg: DictConfig) -> None:
    """Several ranks on one GPU exchange over symmetric memory, and are checked but not timed."""
    asked = "launch.share_gpu=true"
    if not run.launch.share_gpu:
        return
    if (joined := place.joined()) is not None:
        raise InvalidConfig(
            f"{asked}: the ranks of one process share its GPU; run python -m runner without {joined.launcher}"
        )
    if not run.check.enabled:
        raise InvalidConfig(f"{asked} check.enabled=false: ranks of one GPU are checked only; use check.enabled=true")
    if run.chosen is None:
        raise InvalidConfig(f"{asked} attention=auto: it chooses by times, which mean nothing here; name a variant")
    for option in run.best_options:
        raise InvalidConfig(f"{asked} attention.{option}=best: chosen by times, which mean nothing here; give a value")
    if run.transport not in ("auto", "symm"):
        raise InvalidConfig(
            f"{asked} transport={run.transport}: NCCL refuses two ranks on one GPU, and gloo has CPU tensors only; "
            "use transport=symm"
        )
    if run.is_peer:
        nccl = "it exchanges over NCCL, which refuses two ranks on one GPU"
        raise UnsupportedHere(f"{asked} attention={run.variant}: {nccl}")
    if run.device == "cpu":
        raise UnsupportedHere(f"{asked} on a CPU: no GPU to share; launch.share_gpu=false works here")


def check_fault(run: Experiment, cfg: DictConfig) -> None:
    """launch.fault names a rank of this world, a phase that this run has, and a kind of fault."""
    fault = run.launch.fault
    if fault is None:
        return
    rank, phase, kind = parts if len(parts := fault.split(":")) == 3 else ("", "", "")
    if not re.fullmatch("[0-9]{1,6}", rank) or int(rank) >= run.world_size or kind not in FAULTS:
        raise InvalidConfig(
            f"launch.fault={shown(fault)}: must be RANK:PHASE:{'|'.join(FAULTS)} with a rank below {run.world_size}, "
            "for instance 1:timing:raise"
        )
    one_of("launch.fault's phase", phase, PHASES)
    if lacking := _without_phase(run, phase):
        raise InvalidConfig(f"launch.fault={fault}: this run has no phase {phase}; {lacking} would give it one")


def _without_phase(run: Experiment, phase: str) -> str | None:
    """What would give the run this phase; None where it has it."""
    if run.launch.share_gpu and phase in PHASES_AFTER_CHECK:
        return "launch.share_gpu=false"
    if phase.startswith("check_"):
        return None if run.check.enabled else "check.enabled=true"
    needed = {
        "trials": (run.has_trials, "an option that is best, or attention=auto"),
        "energy": (run.energy, "energy=true on a GPU"),
        "phases": (run.phases and not run.is_peer, "a variant of ours" if run.is_peer else "phases=true"),
        "profiler": (run.timing.method == "profiler", "timing=profiler"),
        "baseline": (run.baseline != "none", "baseline=single"),
    }
    there, way = needed.get(phase, (True, ""))
    return None if there else way
