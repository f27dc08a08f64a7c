"""Symmetric memory for kernels of ours that write into their peers' memory themselves."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from attention.kernels.interface import UnsupportedCall
from attention.mailbox import Mailbox
from attention.transports.fabric import symmetric_buffer


@dataclass(frozen=True)
class Mailboxes:
    """This rank's memory for the layout `box`, and where every rank's is: the device address of a table of addresses."""

    box: Mailbox
    memory: Tensor
    handle: Any = field(repr=False)

    @property
    def addresses(self) -> int:
        found: int = self.handle.buffer_ptrs_dev
        return found


@dataclass
class _OfGroup:
    current: Mailboxes | None = None
    captured: list[Mailboxes] = field(default_factory=list)  # a CUDA graph knows their addresses


_groups: WeakKeyDictionary[dist.ProcessGroup, _OfGroup] = WeakKeyDictionary()


def mailboxes_of(group: dist.ProcessGroup, pieces: int, device: torch.device) -> Mailboxes:
    """The ranks' mailboxes with room for so many pieces: the group's, which are made, by all its ranks, at the first call and
    when more is asked for. Raises UnsupportedCall where symmetric memory can't be had."""
    ours = _groups.setdefault(group, _OfGroup())
    found = ours.current
    capturing = torch.cuda.is_current_stream_capturing()
    if found is None or pieces > found.box.capacity:
        if capturing:
            raise RuntimeError("symmetric memory for partial results cannot grow in a capture: call once before it")
        box = Mailbox.holding(dist.get_world_size(group), pieces)
        try:
            with torch.inference_mode(False):  # kept for calls of any mode
                found = Mailboxes(box, *symmetric_buffer((box.numel,), torch.float32, device, group))
        except RuntimeError as error:
            raise UnsupportedCall(f"no symmetric memory here: {str(error).splitlines()[0]}") from None
        found.memory.zero_()
        found.handle.barrier(channel=0)  # nobody writes before all are zero, and all are done with those of before
        torch.cuda.current_stream(device).synchronize()
        ours.current = found
    if capturing and not any(found is known for known in ours.captured):
        ours.captured.append(found)
    return found


def release_mailboxes() -> None:
    """As `release`."""
    _groups.clear()


def mailboxes_bytes() -> int:
    """What this process holds of them."""
    held = {id(x): x for ours in _groups.values() for x in (*ours.captured, ours.current) if x is not None}
    return sum(x.memory.numel() * x.memory.element_size() for x in held.values())
