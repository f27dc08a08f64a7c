"""Whether attention alone mixes the tokens of a model of transformers, so that a rank may run it on its own tokens."""

from __future__ import annotations

from inspect import signature
from typing import Any

from torch import nn

LAYERS = ("full_attention", "sliding_attention")


def check_layers(model: Any) -> None:
    """Raises ValueError for layers that mix tokens outside of transformers' attention interface."""
    for name, module in model.named_modules():
        if isinstance(module, (nn.modules.conv._ConvNd, nn.RNNBase)):
            raise ValueError(f"{name} is a {type(module).__name__}: only attention may mix tokens; use another model")
    if others := {*(getattr(model.config, "layer_types", None) or ())} - {*LAYERS}:
        raise ValueError(f"layer_types has {', '.join(sorted(others))}: layers must be {' or '.join(LAYERS)}")


def check_tokens(model: Any) -> None:
    """Raises ValueError for a model that computes from a rank's tokens what depends on all of them."""
    config = model.config.get_text_config()
    if getattr(config, "output_router_logits", False):
        raise ValueError("output_router_logits=True: the router's loss is not a sum over tokens; set it to False")
    if "position_ids" not in signature(model.forward).parameters:
        raise ValueError(
            f"{type(model).__name__} takes no position_ids: a rank's tokens need theirs; use another model"
        )
    rope = str(getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None))
    for kind in ("dynamic", "longrope"):
        if f"'{kind}'" in rope:
            raise ValueError(f"rope_type={kind}: it depends on the last position of the whole batch; use another type")
