"""What transformers' mask registry asks for, as ours. Imports nothing of transformers: a mask function is known by its name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class RequestedMask:
    """The mask that a model asked transformers for. Attention gets it in place of a mask."""

    causal: bool
    window: tuple[int, int]  # (left, right) in tokens, -1 is unbounded


def asked(mask_function: Callable[..., Any], attention_mask: Tensor | None = None, **others: Any) -> RequestedMask:
    """A function for transformers' mask registry. Documents are not read from the mask, but from the sharded batch.

    Raises ValueError for padding, and for masks other than full ones, causal ones and sliding windows."""
    check_padding(attention_mask)
    causal, window = False, (-1, -1)
    for name, variables in _parts(mask_function):
        if name == "causal_mask_function":
            causal = True
        elif name == "sliding_window_overlay":
            window = (variables["sliding_window"] - 1, -1)
        elif name not in ("bidirectional_mask_function", "packed_sequence_mask_function"):
            raise ValueError(f"the model's mask has {name}: context_parallel does causal and full masks and windows")
    return RequestedMask(causal, window)


def check_padding(attention_mask: Tensor | None) -> None:
    """Raises ValueError unless the mask is `[B, S]` of ones."""
    if attention_mask is not None and not (attention_mask.dim() == 2 and bool((attention_mask == 1).all())):
        raise ValueError(
            f"attention_mask of shape {list(attention_mask.shape)} is not all ones: padding is not supported; pack the "
            "rows, with position_ids that restart at 0, or pad at the right with labels of -100 and leave it out"
        )


def _parts(mask: Callable[..., Any]) -> Iterator[tuple[str, Any]]:
    """The functions whose intersection is a mask of transformers: their names and variables."""
    name, variables = mask.__qualname__.partition(".")[0], inspect.getclosurevars(mask).nonlocals
    if name == "and_masks":
        for each in variables["mask_functions"]:
            yield from _parts(each)
    elif name == "remap_positions_for_packed_sequence":
        yield from _parts(variables["mask_function"])
    else:
        yield name, variables
