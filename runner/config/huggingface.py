"""Configurations of transformers as a run's model. Only this imports transformers, and torch with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from attention import masks
from attention.models import Config, Kind, Latent
from runner.config.values import InvalidConfig

NAMES = {"layers": "num_hidden_layers", "hidden": "hidden_size", "mlp": "intermediate_size", "vocabulary": "vocab_size"}
HEADS = {"heads": "num_attention_heads", "kv_heads": "num_key_value_heads", "head_dim": "head_dim"}
CONTEXT = 8192  # tokens of a run by default, where the model is for as many


def loaded(path: str | None, kind: str | None, sizes: dict[str, Any]) -> str:
    """The whole configuration as JSON, by the file of a model or by its type with the defaults of transformers. sizes: ours
    by `NAMES` and `HEADS`, where they are not None. Raises InvalidConfig."""
    if (path is None) == (kind is None):
        raise InvalidConfig(
            f"model=hf model.config={path} model.type={kind}: give one of them, model.config=PATH/config.json or "
            "model.type=llama"
        )
    try:
        from transformers import AutoConfig
    except ImportError as error:
        raise InvalidConfig(f"model=hf: {error}; pip install 'attention-runner[huggingface]'") from None
    try:
        given: dict[str, Any] = json.loads(Path(path).read_text()) if path else {"model_type": kind}
        ours = NAMES | HEADS
        given |= {ours[key]: x for key, x in sizes.items() if x is not None}
        if given.get("layer_types"):
            given["layer_types"] = given["layer_types"][: given["num_hidden_layers"]]
        found = AutoConfig.for_model(**given).to_dict()
    except (OSError, ValueError, TypeError, KeyError) as error:
        what = f"model.config={path}" if path else f"model.type={kind}"
        raise InvalidConfig(f"{what}: no configuration of a model ({str(error).splitlines()[0][:200]})") from None
    for name, x in found.items():
        if ("dropout" in name or name.endswith("_pdrop")) and x:
            raise InvalidConfig(f"model.config has {name}={x}: dropout is not supported; set it to 0 in the file")
    text = json.dumps(found, sort_keys=True, default=str)
    try:
        config_of(text)
    except ValueError as error:
        raise InvalidConfig(f"model=hf: {error}; take a model whose tokens meet in attention alone") from None
    return text


def config_of(text: str, layers: int | None = None) -> Config:
    """What a configuration says of sizes and attention. Of experts, a token meets those that it is given to. Raises
    ValueError for a model that lacks a size."""
    found = json.loads(text)
    try:
        heads, hidden, layers = (
            found["num_attention_heads"], found["hidden_size"], layers or found["num_hidden_layers"],
        )  # fmt: skip
        mlp, vocabulary = found.get("moe_intermediate_size") or found["intermediate_size"], found["vocab_size"]
    except KeyError as error:
        raise ValueError(f"model_type={found.get('model_type')}: its configuration has no {error}") from None
    active = found.get("num_experts_per_tok") or 1
    kinds = found.get("layer_types") or ["full_attention"]
    window = found.get("sliding_window")
    of_window = masks.sliding_window(window - 1) if window else masks.causal()
    latent = None
    head_dim, value_dim = found.get("head_dim") or hidden // heads, None
    if found.get("kv_lora_rank"):
        rotary = found["qk_rope_head_dim"]
        latent = Latent(q=found.get("q_lora_rank") or hidden, kv=found["kv_lora_rank"], rotary=rotary)
        head_dim, value_dim = found["qk_nope_head_dim"] + rotary, found["v_head_dim"]
    return Config(
        context=min(found.get("max_position_embeddings") or CONTEXT, CONTEXT),
        layers=layers,
        heads=heads,
        kv_heads=None if latent else found.get("num_key_value_heads") or heads,
        hidden=hidden,
        head_dim=head_dim,
        v_head_dim=value_dim,
        mlp=mlp * active,
        vocabulary=vocabulary,
        latent=latent,
        kinds=tuple(
            Kind(
                of_window if kind == "sliding_attention" else masks.causal(),
                sinks=found.get("model_type") == "gpt_oss",
                softcap=found.get("attn_logit_softcapping"),
            )
            for kind in kinds[:layers]
        ),
    )
