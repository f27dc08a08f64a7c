"""Slots of symmetric memory for kernels of ours that read the peers' memory themselves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from attention.kernels.interface import UnsupportedCall
from attention.transports.fabric import symmetric_buffer


@dataclass
class Slots:
    """Three slots of a symmetric buffer. Two are used in turn: a slot is written again only two calls later, when every rank
    has passed a barrier after reading it. The third is for CUDA graphs, whose replays always write the same: they end with
    a barrier."""

    buffer: Tensor
    handle: Any
    turn: int = 0

    def next(self) -> tuple[Tensor, int]:
        """This call's slot and its offset in elements."""
        self.turn ^= 1
        which = 2 if torch.cuda.is_current_stream_capturing() else self.turn
        slot = self.buffer[which]
        return slot, which * slot.numel()


Key = tuple[tuple[int, ...], torch.dtype]
_made: WeakKeyDictionary[dist.ProcessGroup, dict[Key, Slots]] = WeakKeyDictionary()


def slots_of(group: dist.ProcessGroup, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Slots:
    """Slots of that shape, made at the first call on all ranks of the group and reused. Raises UnsupportedCall where
    symmetric memory can't be had."""
    made = _made.setdefault(group, {})
    if (shape, dtype) not in made:
        try:
            made[shape, dtype] = Slots(*symmetric_buffer((3, *shape), dtype, device, group))
        except RuntimeError as error:
            raise UnsupportedCall(f"no symmetric memory here: {str(error).splitlines()[0]}") from None
    return made[shape, dtype]


def release_slots() -> None:
    """As `release`."""
    _made.clear()
