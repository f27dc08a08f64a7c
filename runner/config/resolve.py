"""From a composed configuration to an experiment and the name of its run. Without torch, so that a bad value is refused
at once."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from attention.errors import nearest
from attention.variants.registry import AUTO
from runner import environment
from runner.config import schema
from runner.config.experiment import NONE, Experiment
from runner.config.rules import attention, machine, model
from runner.config.values import FINITE, InvalidConfig, above_zero, one_of, plain, shown, whole
from runner.peers import everything, variant

LONGEST_PART = 40  # characters of a part of a folder's name: a file system allows 255 in all
# limits of `launch`, hashed as most earlier results have them whatever they are
_LIMITS = {"timeout_s": 300.0, "start_timeout_s": 300.0}
# keys that came later, as GROUP.KEY in a group, with the value that stands for what was measured before there was the key.
# A new key goes here, or no sweep of before can be resumed. A new default does not: something else is measured.
_LATER = {
    "mask": {"name": NONE}, "agreement": True, "seqlens_multiple": None, "v_head_dim": None, "scale": None, "softcap": None,
    "sinks": False, "chunk": None, "kv_lengths": None, "prefix": None, "energy": True, "nvtx": False,
    "timing.phase_runs": None, "model.sharded": False, "model.offload": False,
}  # fmt: skip


WHOLE = {  # numbers by the least that they may be; null is another rule's
    0: ("seed", "seqlens_std", "timing.warmup_runs"),
    1: (
        "batch", "heads", "kv_heads", "head_dim", "v_head_dim", "seq_len", "q_len", "prefix", "chunk", "seqlens_mean", "seqlens_multiple",
        "model.layers", "model.hidden", "model.mlp", "model.steps", "timing.timing_runs", "timing.profile_runs", "timing.phase_runs", "timing.layers",
    ),
    256: ("model.vocabulary",),  # of a text of bytes
}  # fmt: skip
ABOVE_ZERO = {  # numbers by the most that they may be
    **dict.fromkeys(
        ("softcap", "check.max_tflop", "timing.precision", "dtype.error_ratio", "model.learning_rate"), FINITE
    ),
    **dict.fromkeys(("launch.timeout_s", "launch.start_timeout_s"), math.inf),
    **dict.fromkeys(("dtype.atol", "dtype.gqa_atol", "dtype.grad_atol"), FINITE),
    # an output of zeros is 1 off
    **{f"dtype.{key}": 0.5 for key in ("row", "grad_row", "gain", "lse", "rel_l2", "grad_rel_l2")},
    "launch.memory_limit_gb": 1e9,
    "timing.time_cap_s": 24 * 3600,
}


# whoever composes imports this module
ConfigStore.instance().store(name="schema", node=schema.RunConf)
OmegaConf.register_new_resolver("run_name", lambda *, _root_: run_name(_root_, usable_gpus(_root_)), replace=True)
OmegaConf.register_new_resolver("per_rank", lambda n, *, _root_: per_rank(_root_, n), replace=True)


def per_rank(cfg: DictConfig, n: int) -> int:
    """`seq_len: ${per_rank:8192}`: n for each rank of the world, so that a sweep over world_size is weak scaling."""
    if cfg.world_size == "auto":
        return n * machine.world_size(cfg, usable_gpus(cfg))
    # a wrong world size is refused later, by its own rule
    return n * max(cfg.world_size if isinstance(cfg.world_size, int) else 1, 1)


def usable_gpus(cfg: DictConfig) -> int:
    """The GPUs that a run of this configuration may use: none with hardware=cpu or a PyTorch without CUDA."""
    return 0 if cfg.hardware.name == "cpu" else environment.gpu_count()


def identity(cfg: DictConfig) -> str:
    """The key of a run: a short hash of what is measured, by the resolved configuration."""
    values = {key: OmegaConf.to_container(cfg[key], resolve=True) if OmegaConf.is_config(cfg[key]) else cfg[key]
              for key in cfg if key != "hydra"}  # fmt: skip
    return key_of(values)  # type: ignore[arg-type]


def key_of(config: Mapping[str, Any]) -> str:
    """As `identity`, of the configuration of a stored result. Results of earlier versions recorded another key."""
    values = {key: dict(x) if isinstance(x, dict) else x for key, x in config.items() if key not in schema.UNMEASURED}
    if "launch" in values:
        values["launch"] |= _LIMITS
    if "timing" in values:
        values["timing"] = {"do_bench": False} | values["timing"]  # an option of earlier versions
    if values.get("phases") == "table":  # the same phases are recorded
        values["phases"] = True
    if values.get("kv_heads") is None:  # as many as heads: said so or not, it is the same run
        values["kv_heads"] = values.get("heads")
    for path, before in _LATER.items():
        group, _, key = path.rpartition(".")
        holder = values.get(group, {}) if group else values
        if holder.get(key) == before:
            holder.pop(key, None)
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()[:8]


def series(cfg: DictConfig) -> str:
    """A short hash of the resolved configuration but for `seq_len`: equal for runs that differ in their length alone."""
    length = OmegaConf.create({"seq_len": None})
    return identity(OmegaConf.merge(cfg, length))  # type: ignore[arg-type]


def run_name(cfg: DictConfig, gpus: int) -> str:
    """The name of the run's folder: variant, config, way, sizes and the hash. world_size=auto becomes its value with `gpus`
    usable GPUs."""
    world, model, tokens = cfg.world_size, cfg.model.get("name"), cfg.seq_len
    if world == "auto" and cfg.hardware.name in schema.HARDWARE:
        world = machine.world_size(cfg, gpus)
    if isinstance(cfg.seqlens, ListConfig) and all(isinstance(n, int) for n in cfg.seqlens):
        tokens = sum(cfg.seqlens)
    parts = [cfg.attention.get("name", NONE), cfg.config if model == NONE else model]
    ways = (cfg.attention.get("grouping"), cfg.mask.name, cfg.kernel.name, cfg.transport.name)
    parts += [way for way in (*ways, tokens and f"s{tokens}") if way not in (None, NONE, AUTO)]
    parts += [f"w{world}", cfg.dtype.name, cfg.timing.method, identity(cfg)]
    return re.sub(r"[^A-Za-z0-9_.-]", "-", "_".join(str(p)[:LONGEST_PART] for p in parts))


def _check_values(cfg: DictConfig) -> None:
    """No value is missing, and each interpolation leads to one of the right type."""
    for key in cfg:
        if key == "hydra":
            continue
        try:
            node = cfg[key]
            if OmegaConf.is_config(node):
                OmegaConf.to_container(node, resolve=True, throw_on_missing=True)
        except OmegaConfBaseException as error:
            why = f": {shown(str(error).splitlines()[0])}; give a value"
            if isinstance(error, MissingMandatoryValue):
                why = "=???: this is the mark of a value that is still missing; give one"
            raise InvalidConfig(f"{error.full_key or str(key)}{why}") from None


def _check_names(cfg: DictConfig) -> None:
    one_of("attention", cfg.attention.get("name"), [AUTO, *everything()])
    for group in ("kernel", "transport", "dtype", "mask", "tracker"):
        one_of(group, cfg[group].get("name"), schema.groups()[group])
    one_of("hardware", cfg.hardware.name, schema.HARDWARE)
    one_of("timing.method", cfg.timing.method, schema.TIMING_METHODS)
    one_of("baseline", cfg.baseline, schema.BASELINES)
    order, colon, key = cfg.order.partition(":")
    one_of("order", order, schema.ORDERS)
    if colon and (order != "interleaved" or key.partition(".")[0] not in cfg):
        hint = nearest(key, map(str, cfg)) if order == "interleaved" else "only interleaved takes a key"
        raise InvalidConfig(f"order={shown(cfg.order)}: {hint}")
    one_of("mode", cfg.mode or schema.MODES[0], (*schema.MODES, *schema.MODEL_MODES))


def _check_numbers(cfg: DictConfig) -> None:
    for least, keys in WHOLE.items():
        for key in keys:
            if (value := OmegaConf.select(cfg, key)) is not None:
                whole(key, value, least)
    for key, most in ABOVE_ZERO.items():
        above_zero(key, OmegaConf.select(cfg, key), "leave it out for the default", most)


# rules of one config group each
GROUP_RULES = (_check_values, _check_names, _check_numbers, machine.check_launch, machine.check_timing)
# rules across groups; those of this machine come last, since a broken rule is broken on every machine
RUN_RULES = (
    model.check_model, attention.check_variant, machine.check_layers, attention.check_replay, machine.check_fault,
    machine.check_shared_gpu, machine.check_device, machine.check_nvtx,
)  # fmt: skip


def experiment(cfg: DictConfig, gpus: int, seed: int) -> Experiment:
    """The experiment of a composed configuration on a machine with `gpus` usable GPUs; `seed` is for a configuration
    without one. Raises InvalidConfig for a broken rule, UnsupportedHere for what this machine cannot do."""
    for check_group in GROUP_RULES:
        check_group(cfg)
    chosen = None if cfg.attention.name == AUTO else variant(cfg.attention.name)
    whole_model = model.model(cfg)
    cfg = model.filled(cfg, whole_model)
    options = attention.options(cfg, chosen)
    mode = model.mode(cfg) if whole_model else attention.mode(cfg, chosen)
    device = machine.device(cfg, gpus)
    seed = seed if cfg.seed is None else cfg.seed
    ranks = machine.world_size(cfg, gpus)
    run = Experiment(
        variant=cfg.attention.name,
        options=options,
        workload=attention.attention_call(cfg, device, chosen, seed),
        world_size=ranks,
        device=device,
        kernel=cfg.kernel.name,
        transport=cfg.transport.name,
        dtype=schema.Dtype(**plain(cfg.dtype)),
        timing=machine.timing_options(cfg, device),
        check=schema.Check(**plain(cfg.check)),
        launch=machine.launch_options(cfg, ranks, gpus if device == "cuda" else 0),
        seed=seed,
        mode=mode,
        baseline=cfg.baseline,
        phases=bool(cfg.phases),
        deterministic=cfg.deterministic,
        replay=cfg.replay,
        model=whole_model,
        agreement=cfg.agreement,
        energy=cfg.energy and device == "cuda",
        nvtx=cfg.nvtx,
    )
    for check in RUN_RULES:
        check(run, cfg)
    return run
