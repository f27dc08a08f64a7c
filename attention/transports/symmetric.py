"""Symmetric memory: buffers that every rank of a group can read through NVLink. Without NVLink multicast, which is never
used."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from attention.kernels.interface import UnsupportedCall

os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")


@dataclass
class Exchangeable:
    """Two slots of a symmetric buffer, used in turn: a slot is written again only two calls later, when every rank has
    passed a barrier after reading it."""

    buffer: Tensor
    handle: Any
    turn: int = 0

    def next(self) -> tuple[Tensor, int]:
        """This call's slot and its offset in elements."""
        self.turn ^= 1
        slot = self.buffer[self.turn]
        return slot, self.turn * slot.numel()


def exchangeable(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, group: dist.ProcessGroup
) -> Exchangeable:
    """Raises UnsupportedCall where symmetric memory can't be had."""
    try:
        import torch.distributed._symmetric_memory as symmetric

        buffer = symmetric.empty((2, *shape), dtype=dtype, device=device)
        return Exchangeable(buffer, symmetric.rendezvous(buffer, group.group_name))
    except (ImportError, RuntimeError) as error:
        raise UnsupportedCall(f"no symmetric memory here: {str(error).splitlines()[0]}") from None
