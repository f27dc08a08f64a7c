"""What a model or a batch of transformers may not have."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any

from torch import Tensor, nn

LAYERS = {"full_attention", "sliding_attention"}


def check_layers(model: nn.Module) -> None:
    """Raises ValueError for a model with layers that mix tokens outside of transformers' attention interface."""
    for name, module in model.named_modules():
        if isinstance(module, (nn.modules.conv._ConvNd, nn.RNNBase)):
            raise ValueError(f"{name} is a {type(module).__name__}: only attention may mix tokens; use another model")
    found = {*(getattr(model.config, "layer_types", None) or ())}
    if others := found - LAYERS:
        raise ValueError(f"layer_types has {', '.join(sorted(others))}: layers must be {' or '.join(sorted(LAYERS))}")


def check_sharded(model: Any) -> None:
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


def check_padding(attention_mask: Tensor | None) -> None:
    """Raises ValueError unless the mask is `[B, S]` of ones."""
    if attention_mask is not None and not (attention_mask.dim() == 2 and bool((attention_mask == 1).all())):
        raise ValueError(
            f"attention_mask of shape {list(attention_mask.shape)} is not all ones: padding is not supported; pack the "
            "rows, with position_ids that restart at 0, or pad at the right with labels of -100 and leave it out"
        )


def check_loss(model: Any) -> None:
    """Raises ValueError unless the model's loss, here a `shifted_loss`, is that of the next token."""
    (of_model,) = model.loss_function.args
    name = getattr(of_model, "__name__", repr(of_model))
    if name != "ForCausalLMLoss":
        raise ValueError(f"labels: the model's loss is {name}, sharded is ForCausalLMLoss only; use the logits")


def shifted_loss(of_model: Callable[..., Tensor], *args: Any, **given: Any) -> Tensor:
    """The model's loss over shift_labels. Raises ValueError if the model does not pass them on: it would shift again."""
    if missing := {"shift_labels", "num_items_in_batch"} - given.keys():
        raise ValueError(
            f"the model does not pass {', '.join(sorted(missing))} to its loss; compute it from the logits"
        )
    return of_model(*args, **given)
