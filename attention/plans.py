"""The plans of one function, and its calls by a key that is cheap to make. A call is checked once: a later one with an equal
key has the same plan."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import NamedTuple

import torch
from torch import Tensor

from attention.call import Lengths, check_causal, check_scale, check_softcap, check_window, whole_lengths
from attention.executors.plan import Plan
from attention.geometry.transfers import Intervals
from attention.masks.mask import Mask

MOST_PLANS = 256
MOST_PACKED_PLANS = 64  # plans of packed batches: index tables make them large
NO_WINDOW = (-1, -1)


class Prepared(NamedTuple):
    """A checked call. padding: where this rank has padding. mask: kept alive, since the key has its identity. packed: the plan's
    own key, if it is of a packed batch."""

    plan: Plan
    scale: float | None
    padding: Intervals
    mask: Mask | None
    packed: Hashable


class Plans(dict[Hashable, Plan]):
    """Plans by what they are of, and `prepared` calls. Beyond `MOST_PLANS` the oldest plan is dropped. Beyond
    `MOST_PACKED_PLANS` plans of packed batches, the least recently used of these is dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.packed: OrderedDict[Hashable, None] = OrderedDict()  # keys of packed batches, the last used at the end
        self.made = 0  # plans so far, also those that are gone
        self.prepared: dict[Hashable, Prepared] = {}

    def add(self, key: Hashable, plan: Plan) -> None:
        self.made += 1
        while len(self) >= MOST_PLANS:
            self._drop(next(iter(self)))
        self[key] = plan

    def use_packed(self, key: Hashable) -> None:
        self.packed[key] = None
        self.packed.move_to_end(key)
        if len(self.packed) > MOST_PACKED_PLANS:
            self._drop(self.packed.popitem(last=False)[0])

    def prepare(self, key: Hashable, call: Prepared) -> None:
        if len(self.prepared) >= MOST_PLANS:  # of equal masks, for instance
            self.prepared.clear()
        self.prepared[key] = call

    def _drop(self, key: Hashable) -> None:
        self.prepared.clear()
        self.pop(key, None)


def call_key(q: Tensor, k: Tensor, v: Tensor, causal: bool, want_lse: bool, more: Hashable = ()) -> Hashable:
    """What decides whether a call was checked before: all but the numbers in its tensors. None for what is refused anyway.
    more: `key_of_more`. Raises ValueError for a wrong `causal`."""
    try:
        grad = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
        return (
            q.shape, q.dtype, q.device, q.layout, type(q), k.shape, k.dtype, k.device, k.layout, type(k), v.shape, v.dtype,
            v.device, v.layout, type(v), grad, check_causal(causal), bool(want_lse), more,
        )  # fmt: skip
    except (AttributeError, RuntimeError):  # no tensors, or nested ones
        return None


def key_of_more(
    scale: float | None,
    window: tuple[int, int],
    softcap: float | None,
    mask: Mask | None,
    sinks: Tensor | None,
    cu_seqlens: Lengths,
    padding: int,
) -> Hashable:
    """The part of `call_key` for the arguments of a call that are not the defaults. Raises ValueError for wrong ones."""
    of_sinks = (
        (sinks.shape, sinks.dtype, sinks.device, sinks.requires_grad) if isinstance(sinks, Tensor) else type(sinks)
    )
    numbers = check_scale(scale), check_softcap(softcap), *check_window(window)
    added = padding if isinstance(padding, int) else None, type(padding)  # True is no number of tokens, yet equal to 1
    lengths = None if cu_seqlens is None else whole_lengths(cu_seqlens)
    return *numbers, *added, id(mask), of_sinks, torch.is_grad_enabled(), lengths
