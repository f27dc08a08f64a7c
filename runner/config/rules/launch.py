"""Rules of the world that a run is launched in: device, ranks, nodes, environment and provoked faults."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from omegaconf import DictConfig, OmegaConf

from runner import redaction
from runner.config import place
from runner.config.experiment import PHASES, Experiment
from runner.config.schema import Launch
from runner.config.values import InvalidConfig, UnsupportedHere, one_of, plain, shown, whole

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
        if redaction.NAME.search(name):
            raise InvalidConfig(f"launch.env.{name}: results record what stands here; set what is secret outside")
        if name.startswith(OWN_VARIABLES):
            raise InvalidConfig(f"launch.env.{name}={shown(value)}: is the launcher's own; leave it out")


def resolved(cfg: DictConfig, world_size: int, gpus: int) -> Launch:
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
