"""Shared memory for our kernels that write into the memory of remote ranks (the fused tree reduction)."""

from __future__ import annotations

from functools import partial

import torch

from attention.geometry.mailbox import Mailbox
from attention.transports.fabric import Shared
from attention.transports.waits import DeviceMemory, Remote, Wait, Watch, start


class Mailboxes:
    """Memory in the layout `box` on every rank."""

    def __init__(self, box: Mailbox, shared: Shared, remote: Remote):
        self.box, self.shared = box, shared
        memory = DeviceMemory(shared.by_rank[remote.rank].view(torch.int32), box.capacity)
        marks = range(box.marks, box.numel)
        self.watch = start(Watch(memory, remote, marks, partial(wait_of, box, memory, remote.others)))

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
    return {rank: box.flag(turn, rank, piece) for rank in others}, "to write its partial results"
