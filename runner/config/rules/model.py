"""Rules of a run's model: its options, and the attention call of its layers."""

from __future__ import annotations

import copy
from dataclasses import fields
from typing import Any

from omegaconf import DictConfig, OmegaConf

from attention.geometry.options import check_heads
from attention.masks import full
from attention.masks.band import FULL
from attention.masks.mask import FamilyMask, Mask
from attention.masks.sequences import mask_of
from attention.variants.registry import AUTO
from runner.config import huggingface, schema
from runner.config.experiment import HF, NONE, Experiment, Model
from runner.config.rules.attention import settings
from runner.config.values import InvalidConfig, one_of, plain, shown, whole
from runner.models import SPARSE, Config

OPTIONS = tuple(each.name for each in fields(Model) if each.name not in ("own_masks", "huggingface"))
OF_HF = ("config", "type")
OF_LAYERS = ("scale", "softcap", "sinks", "v_head_dim")  # that model=hf has of its own
DEFAULTS = {"recompute": False, "sharded": False, "offload": False, "steps": 20, "learning_rate": 0.001}
TIMED_BY = ("warmup", "adaptive", "simple", "profiler")


def model(cfg: DictConfig) -> Model | None:
    """The model of a configuration; None for attention alone. Raises InvalidConfig."""
    given = plain(cfg.model)
    name = one_of("model", given.pop("name", None), schema.MODELS)
    if name == NONE:
        return None
    for key, default in DEFAULTS.items():
        is_switch = default is False
        if given[key] is None or isinstance(given[key], bool) != is_switch:
            kind = "true or false" if is_switch else "a number"
            raise InvalidConfig(f"model.{key}={shown(given[key])}: must be {kind}; the default is {shown(default)}")
    whole("model.layers", 1 if given["layers"] is None else given["layers"], most=huggingface.MOST_LAYERS)
    own_masks = _own_masks(cfg)
    if name != HF:
        return Model(name=name, own_masks=own_masks, **given)
    if not own_masks:
        raise InvalidConfig(
            "model=hf: its layers have the masks of its configuration; use mask=none causal=true window=[-1,-1]"
        )
    for key in OF_LAYERS:
        if cfg[key]:
            raise InvalidConfig(f"{key}={shown(cfg[key])} model=hf: is its configuration's; leave it out")
    path, kind = (given.pop(key) for key in OF_HF)
    sizes = {key: given[key] for key in huggingface.NAMES} | {key: cfg[key] for key in huggingface.HEADS}
    if cfg.kv_heads is None:
        sizes["kv_heads"] = cfg.heads
    return Model(name=name, own_masks=True, huggingface=huggingface.loaded(path, kind, sizes), **given)


def _own_masks(cfg: DictConfig) -> bool:
    """Whether the configuration asks for no other mask than that of the layers."""
    return cfg.mask.name == NONE and cfg.causal and list(cfg.window) == [-1, -1]


def filled(cfg: DictConfig, chosen: Model | None) -> DictConfig:
    """The configuration, where it leaves sizes and mask of the attention call open, with those of the model's first
    layer."""
    if chosen is None:
        return cfg
    found, sizes = copy.deepcopy(cfg), chosen.sizes
    of_preset: dict[str, Any] = {"batch": 1, "seq_len": sizes.context, "heads": sizes.heads, "head_dim": sizes.head_dim}
    of_preset |= {"v_head_dim": sizes.v_head_dim, "softcap": sizes.kinds[0].softcap, "scale": sizes.kinds[0].scale}
    if cfg.heads is None:
        of_preset["kv_heads"] = sizes.key_heads
    for key, value in of_preset.items():
        if cfg[key] is None:
            found[key] = value
    found.sinks = cfg.sinks or sizes.kinds[0].sinks
    if chosen.own_masks:
        _take(found, sizes.kinds[0].mask)
    elif cfg.mask.name == "dca" and chosen.name in SPARSE:
        for key, value in zip(("window", "global_tokens", "random"), SPARSE[chosen.name], strict=True):
            if cfg.mask[key] is None:
                found.mask[key] = value
    return found


def _take(cfg: DictConfig, mask: Mask) -> None:
    """Makes the mask that of the call."""
    if mask.band is not None:
        cfg.causal = mask.band.right == 0
        cfg.window = [mask.band.left, -1 if cfg.causal else mask.band.right]
    elif isinstance(mask, FamilyMask):
        cfg.causal = False
        OmegaConf.update(cfg, "mask", {"name": mask.name, **dict(mask.parameters)}, merge=False, force_add=True)


def mode(cfg: DictConfig) -> str:
    """Of a model's run."""
    found = cfg.mode or "training"
    if found not in schema.MODEL_MODES:
        raise InvalidConfig(
            f"mode={found} model={cfg.model.name}: a model runs mode={' or mode='.join(schema.MODEL_MODES)}; mode={found} is "
            f"for model={NONE}"
        )
    return found


def check_model(run: Experiment, cfg: DictConfig) -> None:
    """Raises InvalidConfig for what a model has not, and for sizes or masks that do not go together."""
    if run.model is None:
        return
    name = f"model={run.model.name}"
    _check_call(run, name)
    timing = run.timing
    asked: dict[str, Any] = {
        f"timing={timing.method}": timing.method not in TIMED_BY,
        f"timing.layers={timing.layers}": timing.layers > 1,
        "timing.new_packs=true": timing.new_packs,
        "timing.counters=true": timing.counters,
    }
    for what, is_asked in asked.items():
        if is_asked:
            raise InvalidConfig(
                f"{what} {name}: is for attention alone; use timing=warmup with its defaults, or model={NONE}"
            )
    if run.mode == "training" and run.workload.dtype == "fp16":
        raise InvalidConfig(f"dtype=fp16 {name} mode=training: gradients would underflow; use dtype=bf16 or fp32")


def _check_call(run: Experiment, name: str) -> None:
    assert run.model is not None
    call, chosen = run.workload, run.chosen
    if chosen is not None and chosen.decode:
        raise InvalidConfig(f"attention={run.variant} {name}: is a decode, forward only; take another variant")
    if chosen is not None and chosen.mixes:
        raise InvalidConfig(
            f"attention={run.variant} {name}: a model's layers have attention under a mask, which this is not; take ring, or "
            "attention.models.DilatedMultihead in a model of your own"
        )
    if call.q_len is not None:
        raise InvalidConfig(f"q_len={call.q_len} {name}: a model reads all tokens; use q_len=null")
    if call.seqlens is not None:
        raise InvalidConfig(
            f"seqlens={shown(list(call.seqlens))} attention={run.variant} {name}: a model reads one sequence; use seqlens=null, or "
            "mask=documents"
        )
    try:
        config = run.model.config(call)
        check_heads(call.heads, call.kv_heads)
        about = call.heads, call.kv_heads, call.cu_seqlens, run.world_size
        for mask in _masks(config):
            mask.pairs(call.seq_len)
            if chosen is not None:
                settings(chosen, run.call_options, *about, mask_of(FULL, call.cu_seqlens, mask))
    except ValueError as error:
        raise InvalidConfig(f"{name}: {error}") from None
    if config.encoder_layers and run.variant == AUTO:
        raise InvalidConfig(f"attention=auto {name}: chooses for one mask, and this model has two; name a variant")


def _masks(config: Config) -> list[Mask]:
    """Of all layers, each once."""
    of_layers = [config.kind(i).mask for i in range(config.layers)]
    return [*dict.fromkeys(of_layers), *([full()] if config.encoder_layers else [])]
