"""Configurations of transformers as a run's model. Only this imports transformers, and torch with it."""

from __future__ import annotations

import json
import re
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

from attention import masks
from runner.config.values import InvalidConfig, whole
from runner.models import Config, Kind
from runner.reading import read_text

NAMES = {"layers": "num_hidden_layers", "hidden": "hidden_size", "mlp": "intermediate_size", "vocabulary": "vocab_size"}
HEADS = {"heads": "num_attention_heads", "kv_heads": "num_key_value_heads", "head_dim": "head_dim"}
CONTEXT = 8192  # tokens of a run by default, where the model is for as many
MOST_BYTES = 1 << 20  # of a file
MOST_LAYERS = 1024  # each is made and counted
OTHER_TASKS = ("classifier", "summary")  # dropout that a causal LM does not have


def loaded(path: str | None, kind: str | None, sizes: dict[str, Any]) -> str:
    """The whole configuration and what `config_of` reads from its model, as JSON: by the file of a model, or by its type with
    the defaults of transformers but no dropout. sizes: ours by `NAMES` and `HEADS`, where they are not None. Raises
    InvalidConfig, also for a model that attention.huggingface refuses."""
    if (path is None) == (kind is None):
        raise InvalidConfig(
            f"model=hf model.config={path} model.type={kind}: give one of them, model.config=PATH/config.json or "
            "model.type=llama"
        )
    what = f"model.config={path}" if path else f"model.type={kind}"
    try:
        given: dict[str, Any] = json.loads(read_text(Path(path), MOST_BYTES)) if path else {"model_type": kind}
        if not isinstance(given, dict):
            raise ValueError("the file has no object")
        changed = json.dumps({key: x for key, x in sizes.items() if x is not None})
        return _read(json.dumps(given), changed, by_type=path is None)
    except ImportError as error:
        raise InvalidConfig(f"model=hf: {error}; pip install 'attention-runner[huggingface]'") from None
    except InvalidConfig as error:
        raise InvalidConfig(f"{what}: {error}") from None
    except Exception as error:  # of a configuration that is wrong, transformers and its models raise any
        raise InvalidConfig(f"{what}: no configuration of a model ({_line(error)})") from None


def config_of(text: str) -> Config:
    """Sizes, attention and matrices of what `loaded` returned."""
    fields = json.loads(text)["read"]
    by_layer = fields.pop("by_layer")
    kinds = tuple(Kind(masks.make(name, **parameters), **how) for name, parameters, how in fields.pop("kinds"))
    return Config(layers=len(by_layer), counted=fields.pop("beside") + sum(by_layer), kinds=kinds, **fields)


def without_dropout(text: str) -> list[str]:
    """The options of a type's defaults that were set to 0."""
    found: list[str] = json.loads(text)["zeroed"]
    return found


@cache
def _read(text: str, sizes: str, by_type: bool) -> str:
    import torch

    from attention.huggingface import context_parallel
    from attention.huggingface.model import check_tokens

    config, zeroed = _configuration(json.loads(text), json.loads(sizes)), []
    whole(NAMES["layers"], getattr(config.get_text_config(), NAMES["layers"], 1), most=MOST_LAYERS)
    for name, x in config.to_dict().items():
        if ("dropout" in name or name.endswith("_pdrop")) and x and not name.startswith(OTHER_TASKS):
            if not by_type:
                raise InvalidConfig(f"{name}={x}: dropout is not supported; set it to 0 in the file")
            setattr(config, name, 0.0)
            zeroed.append(name)
    with torch.device("meta"):
        model = model_of(config)
    try:
        context_parallel(model, "dense")  # what it refuses, a run would
        check_tokens(model)
        read = _sizes(config.get_text_config(), model)
    except ValueError as error:
        raise InvalidConfig(_line(error)) from None
    return json.dumps({"config": config.to_dict(), "read": read, "zeroed": zeroed}, sort_keys=True, default=str)


def model_of(config: Any) -> Any:
    """A model of text with random weights that has logits for each token. Where only a model of images, too, has them, its
    other parts are left out."""
    from torch import nn
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForMaskedLM

    from attention.huggingface.model import language_model

    of_text, _, suffix = config.model_type.rpartition("_")
    kind = next((x for x in (AutoModelForCausalLM, AutoModelForMaskedLM) if type(config) in x._model_mapping), None)
    if kind or suffix != "text":
        return (kind or AutoModelForCausalLM).from_config(config)
    whole = AutoConfig.for_model(of_text, text_config=config.to_dict())
    for name in ("depth", "num_hidden_layers"):
        if hasattr(whole.vision_config, name):
            setattr(whole.vision_config, name, 1)
    model = AutoModelForImageTextToText.from_config(whole)
    language = language_model(model)
    for name, part in [*model.base_model.named_children()]:
        if part is not language:
            setattr(model.base_model, name, nn.Identity())
    return model


def _configuration(given: dict[str, Any], sizes: dict[str, Any]) -> Any:
    """A configuration of transformers with other sizes. Raises InvalidConfig for a size that its models do not have."""
    from transformers import AutoConfig, logging

    logging.set_verbosity_error()  # else it tells of each default that a smaller model does not fit
    defaults = AutoConfig.for_model(given["model_type"])
    if (text := defaults.get_text_config()) is not defaults:  # of a model with other modalities that of the text
        given = given.get("text_config") or {}
        given = {"model_type": text.model_type} | given
    kind = type(text)
    known = _known(kind)
    if "num_key_value_heads" not in known and sizes.get("kv_heads") == sizes.get("heads"):
        sizes.pop("kv_heads", None)
    if unknown := [key for key in sizes if key in NAMES and NAMES[key] not in known]:
        raise InvalidConfig(
            f"model.{unknown[0]}={sizes[unknown[0]]}: {kind.__name__} has no {NAMES[unknown[0]]}; give the size by its name "
            "there, in a file for model.config"
        )
    given = given | {(NAMES | HEADS)[key]: x for key, x in sizes.items()}
    if given.get("layer_types"):
        given["layer_types"] = given["layer_types"][: given["num_hidden_layers"]]
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        token = given.get(name, getattr(kind(), name, None))
        if isinstance(token, int) and token >= sizes.get("vocabulary", token + 1):
            given[name] = None
    return AutoConfig.for_model(**given)


def _known(kind: Any) -> set[str]:
    """The names that a class of configurations has: it takes others, too, and its model ignores them."""
    return {*kind().to_dict(), *kind.attribute_map}


def _sizes(config: Any, model: Any) -> dict[str, Any]:
    """The fields of `Config`, with `kinds` as (window, other fields), and parameters of matrices: by layer, and beside the
    layers. By the names that configurations share (attribute_map)."""
    missing = [name for name in (*NAMES.values(), *HEADS.values())[:2] if getattr(config, name, None) is None]
    if missing:
        raise ValueError(f"{type(config).__name__} has no {', '.join(missing)}")
    layers, heads, hidden = config.num_hidden_layers, config.num_attention_heads, config.hidden_size
    layered = [x for x in model.modules() if hasattr(x, "layer_idx")]
    modules = {x.layer_idx: x for x in layered if hasattr(x, "scaling") or hasattr(x, "is_causal")}
    dims = {"head_dim": getattr(modules.get(0), "head_dim", None) or hidden // heads, "v_head_dim": None}
    kv_heads = heads
    if "num_key_value_heads" in _known(type(config)):
        kv_heads = config.num_key_value_heads or heads
    if getattr(config, "kv_lora_rank", None):  # MLA: a key for each head
        dims = {"head_dim": config.qk_nope_head_dim + config.qk_rope_head_dim, "v_head_dim": config.v_head_dim}
        kv_heads = heads
    active = getattr(config, "num_experts_per_tok", None)
    mlp = getattr(config, "moe_intermediate_size", None) or getattr(config, "intermediate_size", None) or 4 * hidden
    beside, by_layer = _matrices(model, active)
    return {
        "context": min(getattr(config, "max_position_embeddings", None) or CONTEXT, CONTEXT),
        "heads": heads,
        "kv_heads": kv_heads,
        "hidden": hidden,
        **dims,
        "mlp": mlp * (active or 1),
        "vocabulary": config.vocab_size,
        "beside": beside,
        "by_layer": [by_layer[i] for i in range(layers)],
        "kinds": _kinds(config, modules, layers, dims["head_dim"]),
    }


def _kinds(config: Any, modules: dict[int, Any], layers: int, head_dim: int) -> list[Any]:
    """Of each layer the name and the parameters of its mask and the other fields of its `Kind`. modules: its attention."""
    window = getattr(config, "sliding_window", None)
    if getattr(config, "use_sliding_window", None) is False:
        window = None
    types = getattr(config, "layer_types", None) or ["sliding_attention"] * layers
    found = []
    for i, kind in enumerate(types[:layers]):
        module = modules.get(i)
        scale = getattr(module, "scaling", None)
        how = {
            "sinks": hasattr(module, "sinks"),
            "softcap": getattr(config, "attn_logit_softcapping", None),
            "scale": None if scale is None or abs(scale * head_dim**0.5 - 1) < 1e-6 else scale,
        }
        # an encoder's window is that of its module, which counts the query
        causal = getattr(module, "is_causal", True)
        size = window if causal else getattr(module, "sliding_window", None)
        left = size - 1 if size and kind == "sliding_attention" else -1
        mask: tuple[str, dict[str, int]] = "sliding_window", {"left": left, "right": 0 if causal else left}
        if kind == "chunked_attention":
            mask = "chunked", {"chunk": config.attention_chunk_size}
        found.append((*mask, how))
    return found


def _matrices(model: Any, active: int | None) -> tuple[int, Counter[int]]:
    """Parameters of the matrices that a token meets: beside the layers (the output layer), and by layer. Of a layer's experts
    it meets `active`."""
    from torch import nn

    sums: Counter[int] = Counter()
    for name, module in model.named_modules():
        for own, x in () if isinstance(module, nn.Embedding) else module.named_parameters(recurse=False):
            if x.dim() < 2 or "bias" in own:
                continue
            layer = re.search(r"\.(\d+)(\.|$)", name)
            path, experts, _ = f"{name}.".rpartition("experts.")
            share: float = x.numel()
            if experts and not path.endswith("shared_"):
                if active is None:
                    raise ValueError("it has experts, and num_experts_per_tok=None: give it in a config.json")
                of = len(x) if x.dim() == 3 else len(model.get_submodule(f"{path}experts"))
                share *= active / of
            sums[int(layer[1]) if layer else -1] += share  # type: ignore[assignment]
    rounded = Counter({layer: round(n) for layer, n in sums.items()})
    return rounded.pop(-1, 0), rounded


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]
