"""Symmetric memory for kernels of ours that write into their peers' memory themselves."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from attention.kernels.interface import UnsupportedCall
from attention.transports.fabric import symmetric_buffer


@dataclass(frozen=True)
class Mailboxes:
    """This rank's fp32 memory, and where every rank's is: the device address of a table of device addresses."""

    mine: Tensor
    handle: Any

    @property
    def addresses(self) -> int:
        found: int = self.handle.buffer_ptrs_dev
        return found


_made: WeakKeyDictionary[dist.ProcessGroup, dict[Hashable, Mailboxes]] = WeakKeyDictionary()


def mailboxes_of(group: dist.ProcessGroup, kind: Hashable, numel: int, device: torch.device) -> Mailboxes:
    """The ranks' mailboxes of that kind, zeros at first. Made at the first call, by all ranks of the group, and reused.
    Raises UnsupportedCall where symmetric memory can't be had."""
    made = _made.setdefault(group, {})
    if kind not in made:
        try:
            found = Mailboxes(*symmetric_buffer((numel,), torch.float32, device, group))
        except RuntimeError as error:
            raise UnsupportedCall(f"no symmetric memory here: {str(error).splitlines()[0]}") from None
        found.mine.zero_()
        found.handle.barrier(channel=0)  # nobody writes before all are zero
        torch.cuda.current_stream(device).synchronize()
        made[kind] = found
    return made[kind]


def release_mailboxes() -> None:
    """As `release`."""
    _made.clear()


def mailboxes_bytes() -> int:
    return sum(box.mine.numel() * 4 for made in _made.values() for box in made.values())
