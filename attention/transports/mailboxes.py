"""Shared memory for our kernels that write into the memory of remote ranks (the fused tree reduction)."""

from __future__ import annotations

from functools import partial

import torch

from attention.geometry.mailbox import Mailbox
from attention.transports.fabric import CudaFabric
from attention.transports.waits import DeviceMemory, Wait, Watch, watchdog


class Mailboxes:
    """This rank's memory in the layout `box`, for at least so many pieces, and that of the remote ranks. Construction is
    collective."""

    def __init__(self, fabric: CudaFabric, pieces: int):
        self.box = box = Mailbox.holding(fabric.remote.world, pieces)
        self.shared = fabric.allocate(4 * box.numel)
        memory = DeviceMemory(self.shared.by_rank[fabric.remote.rank].view(torch.int32), box.capacity)
        marks = range(box.marks, box.numel)
        self.watch = Watch(memory, fabric.remote, marks, partial(wait_of, box, memory, fabric.remote.others))
        watchdog.add(self.watch)

    @property
    def addresses(self) -> int:
        """The device address of a table with every rank's address."""
        _, handle = self.shared.owner
        table: int = handle.buffer_ptrs_dev
        return table


def wait_of(box: Mailbox, memory: DeviceMemory, others: list[int], mark: int) -> Wait:
    """What a kernel of this rank waits for that has set this mark."""
    piece = mark - box.marks
    (turn,) = memory.read(box.turns + piece, 1).tolist()
    return Wait({rank: box.flag(turn, rank, piece) for rank in others}, "to write its partial results")
