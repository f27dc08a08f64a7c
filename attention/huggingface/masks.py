"""What a batch and a model of transformers say about who attends whom."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from attention.huggingface.checks import check_padding


@dataclass(frozen=True)
class Asked:
    """The mask that a model asked transformers for. Attention gets it in place of a mask."""

    causal: bool
    window: tuple[int, int]  # (left, right) in tokens, -1 is unbounded
    tokens: int  # keys, with those in a cache


def asked(
    mask_function: Callable[..., Any], kv_length: int, attention_mask: Tensor | None = None, **others: Any
) -> Asked:
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
    return Asked(causal, window, kv_length)


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


def documents(position_ids: Tensor) -> tuple[int, ...]:
    """The cumulative lengths of the documents in `[B, S]`, one row after another: each begins where positions are 0.
    Raises ValueError unless positions rise by one or restart at 0, as they do in every row."""
    begins = position_ids == 0
    right = begins | (position_ids == F.pad(position_ids, (1, 0), value=-1)[:, :-1] + 1)
    right[:, 0] = begins[:, 0]
    if not right.all():
        row, token = (~right).nonzero()[0].tolist()
        raise ValueError(
            f"position_ids has {int(position_ids[row, token])} in row {row} at token {token}: must count from 0 in each "
            "row, and again from 0 where a document begins"
        )
    return *begins.flatten().nonzero().flatten().tolist(), begins.numel()
