"""Symmetric memory for our kernels that write into the memory of remote ranks (the fused tree reduction)."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from attention.errors import UnsupportedCall
from attention.geometry.mailbox import Mailbox
from attention.transports.fabric import symmetric_buffer
from attention.transports.waits import WAITING, DeviceMemory, FlagMemory, Pending, Remote, Watch, watchdog


@dataclass(frozen=True)
class Mailboxes:
    """This rank's memory in the layout `box`; `addresses` is the device address of a table with every rank's
    address."""

    box: Mailbox
    memory: Tensor
    handle: Any = field(repr=False)
    watch: Watch = field(repr=False)

    @property
    def addresses(self) -> int:
        found: int = self.handle.buffer_ptrs_dev
        return found


MOST_PENDING = 16  # pieces followed at once: in a call that hangs, many wait


class _PendingPieces:
    """The pieces for which a kernel of this rank waits."""

    def __init__(self, box: Mailbox, memory: FlagMemory, rank: int):
        self.box, self.memory = box, memory
        self.others = [other for other in range(box.world) if other != rank]

    def __call__(self) -> list[Pending]:
        marks = array("i", self.memory.read(self.box.marks, self.box.capacity))
        if marks.tobytes().count(0) == marks.itemsize * len(marks):
            return []
        waiting = [piece for piece, mark in enumerate(marks) if mark & 0xFF == WAITING]
        return [self._pending(piece, marks[piece]) for piece in waiting[:MOST_PENDING]]

    def _pending(self, piece: int, mark: int) -> Pending:
        (turn,) = self.memory.read(self.box.turns + piece, 1)
        flags = {rank: self.memory.read(self.box.flag(turn, rank, piece), 1)[0] for rank in self.others}
        missing = tuple(rank for rank, flag in flags.items() if flag != 1)
        return Pending(self.box.marks + piece, mark, missing, "to write its partial results")


@dataclass
class _OfGroup:
    current: Mailboxes | None = None
    captured: list[Mailboxes] = field(default_factory=list)  # CUDA graphs contain their addresses


_groups: WeakKeyDictionary[dist.ProcessGroup, _OfGroup] = WeakKeyDictionary()


def mailboxes_of(group: dist.ProcessGroup, pieces: int, device: torch.device) -> Mailboxes:
    """The group's mailboxes, for at least so many pieces. The first call, and one that needs more, allocates them and is
    collective. Raises UnsupportedCall where symmetric memory is not available."""
    ours = _groups.setdefault(group, _OfGroup())
    found = ours.current
    capturing = torch.cuda.is_current_stream_capturing()
    if found is None or pieces > found.box.capacity:
        if capturing:
            raise RuntimeError("symmetric memory for partial results cannot grow in a capture: call once before it")
        box = Mailbox.holding(dist.get_world_size(group), pieces)
        try:
            with torch.inference_mode(False):  # used by calls of any mode
                memory, handle = symmetric_buffer((box.numel,), torch.float32, device, group)
        except RuntimeError as error:
            raise UnsupportedCall(f"no symmetric memory here: {str(error).splitlines()[0]}") from None
        memory.zero_()
        torch.cuda.current_stream(device).synchronize()
        remote = Remote(group, device)  # collective: afterwards all are zero, and the old ones unused
        words = DeviceMemory(device, memory.data_ptr(), memory)
        pending = _PendingPieces(box, words, remote.rank)
        found = ours.current = Mailboxes(box, memory, handle, Watch(pending, words, remote))
        watchdog.add(found.watch)
    if capturing and not any(found is known for known in ours.captured):
        ours.captured.append(found)
    return found


def release_mailboxes() -> None:
    """Frees all mailboxes."""
    _groups.clear()


def mailboxes_bytes() -> int:
    """Bytes that this process holds."""
    held = {id(x): x for ours in _groups.values() for x in (*ours.captured, ours.current) if x is not None}
    return sum(x.memory.numel() * x.memory.element_size() for x in held.values())
