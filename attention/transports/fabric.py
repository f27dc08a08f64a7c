"""Memory that all ranks of a group can read, and signals between ranks. On CUDA it is symmetric memory over NVLink
(multicast is never used) with stream-ordered signals, on a CPU shared memory of one host."""

from __future__ import annotations

import ctypes
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from attention.geometry.mailbox import Mailbox
from attention.gpu import private
from attention.gpu.cuda_driver import WORD, function
from attention.gpu.streams import on_device
from attention.transports.waits import IDLE, WAITING, DeviceMemory, Remote, Wait, Watch, gathered, start

NO_MULTICAST = "TORCH_SYMM_MEM_DISABLE_MULTICAST"  # read by PyTorch where it makes symmetric memory
MEMORY_FILE = "attention"  # in /proc: "/memfd:attention"
WORDS = 2  # int32 words per flag: the flag, and the mark of a wait for it
POLL_S = 20e-6  # between two reads of a flag on a CPU
LOOK_S = 0.1  # between two checks whether the remote rank can still set the flag

Operation = Callable[[], None]


@dataclass(eq=False)
class Shared:
    """Memory of the same size on every rank, as this rank sees it, by rank (its own included): bytes `[n]`. `owner` keeps it
    alive: on CUDA it is the buffer and its handle. views: tensors that lie in it, for reuse."""

    by_rank: Sequence[torch.Tensor] = ()
    owner: Any = None
    views: dict[Any, list[torch.Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.addresses = [x.data_ptr() for x in self.by_rank]
        self.nbytes = self.by_rank[0].nbytes if self.by_rank else 0


UNIFIED = 4  # CU_MEMORYTYPE_UNIFIED


@dataclass
class Copy:
    """A copy of `rows` rows of `width` bytes from shared memory into the tensor number `into`. `target` is the offset in that
    tensor, `source` the one in the remote rank's publication; rows start a pitch apart. All are in bytes."""

    into: int
    target: int
    target_pitch: int
    source: int
    source_pitch: int
    width: int
    rows: int

    @cached_property
    def parameters(self) -> Any:
        """CUDA_MEMCPY2D, without the addresses: of source and target each x, y, the memory's type, its address on the host, its
        address (words 4 and 11), an array and the pitch; then the width and the rows."""
        source, target = ((0, 0, UNIFIED, 0, 0, 0, pitch) for pitch in (self.source_pitch, self.target_pitch))
        return (WORD * 16)(*source, *target, self.width, self.rows)


class HostFabric:
    """Shared memory in anonymous files, so that a killed rank leaves nothing behind."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device):
        self.remote = Remote(group, device)

    def allocate(self, size: int) -> Shared:
        """`size` zeroed bytes on every rank. Collective. Raises RuntimeError on all ranks if one cannot allocate
        them."""
        group = self.remote.group
        number: int | None = None
        try:
            with together(group):
                number = os.memfd_create(MEMORY_FILE)
                os.posix_fallocate(number, 0, size)  # without reserved memory, a later write could raise SIGBUS
            places = gathered(group, f"/proc/{os.getpid()}/fd/{number}")
            with together(group):  # at its end every rank has mapped the files
                return Shared([torch.from_file(x, shared=True, size=size, dtype=torch.uint8) for x in places])
        finally:
            if number is not None:
                os.close(number)

    def settle(self) -> None:
        """Waits until every rank has finished all work that it has started. Collective."""
        dist.barrier(self.remote.group)

    def copy(self, copies: Sequence[Copy], targets: Sequence[int], source: int) -> None:
        """Makes the copies on the current stream. targets: the addresses of the tensors. source: the address of the remote
        rank's publication."""
        for x in copies:
            target, start = targets[x.into] + x.target, source + x.source
            for row in range(x.rows):
                ctypes.memmove(target + row * x.target_pitch, start + row * x.source_pitch, x.width)

    def use(self, flags: Shared) -> None:
        """From now on signals are int32 words of this memory, numbered within a rank's; waits for them have a timeout."""
        self.flags = [x.numpy().view(np.int32) for x in flags.by_rank]

    def signalling(self, word: int) -> Operation:
        """An operation that sets this flag to 1 on all remote ranks, after all earlier work of the current stream."""

        def signal() -> None:
            for rank in self.remote.others:
                self.flags[rank][word] = 1

        return signal

    def awaiting(self, flags: Mapping[int, int], action: str) -> Operation:
        """An operation that makes the current stream (on a CPU, the calling thread) wait until this rank's flags are 1,
        then resets them to 0.

        flags: by the rank that sets each; the word after each flag is the mark of a wait.
        action: what the flag signals, for messages, as in "to publish its kv".
        The wait ends with the process group's timeout (`waits`); on a CPU it raises RuntimeError."""
        words, remote = self.flags[self.remote.rank], self.remote

        def take() -> None:
            remote.check()
            start = looked = time.monotonic()
            while missing := [rank for rank, flag in flags.items() if words[flag] != 1]:
                time.sleep(POLL_S)
                now = time.monotonic()
                if now < looked + LOOK_S:
                    continue
                looked = now
                why = remote.overdue(missing, action, now - start)
                if why is not None and any(words[flags[rank]] != 1 for rank in missing):
                    raise remote.fail(why)
            words[list(flags.values())] = 0

        return take


WAIT, WRITE, WRITE_TWO = 1, 2, 5  # CU_STREAM_MEM_OP_WAIT_VALUE_32, _WRITE_VALUE_32, _WRITE_VALUE_64 (two words)


class CudaFabric:
    """The same on CUDA. Signals are stream-ordered: a rank writes to remote memory and waits on its own. The GPU's front end
    does both, so no kernel needs a free multiprocessor."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device):
        self.device, self.remote = device, Remote(group, device)

    def allocate(self, size: int) -> Shared:
        group = self.remote.group
        with private.replaced(os.environ, {NO_MULTICAST: "1"}):  # the caller's own symmetric memory may use multicast
            with together(group):
                buffer = private.symmetric_empty((size,), dtype=torch.uint8, device=self.device)
            with together(group):
                handle = private.symmetric_rendezvous(buffer, group.group_name)
        buffer.zero_()
        self.settle()
        by_rank = [handle.get_buffer(rank, (size,), torch.uint8) for rank in range(self.remote.world)]
        return Shared(by_rank, (buffer, handle))

    def settle(self) -> None:
        torch.cuda.synchronize(self.device)
        dist.barrier(self.remote.group, device_ids=[self.device.index])
        torch.cuda.synchronize(self.device)

    def copy(self, copies: Sequence[Copy], targets: Sequence[int], source: int) -> None:
        # Calls the driver: PyTorch's views and copies take several times as much CPU time, and PyTorch would copy strided
        # rows with a kernel, not with a copy engine.
        stream = private.raw_stream(self.device.index)
        copy, copy_rows = function("cuMemcpyAsync", 4), function("cuMemcpy2DAsync_v2", 2)
        for x in copies:
            target, start = targets[x.into] + x.target, source + x.source
            if x.rows == 1:
                copy(target, start, x.width, stream)
            else:
                x.parameters[4], x.parameters[11] = start, target
                copy_rows(ctypes.addressof(x.parameters), stream)

    def use(self, flags: Shared) -> None:
        words = flags.by_rank[self.remote.rank].view(torch.int32)
        self.memory = flags  # addresses and views keep none of it
        self.flags, self.waits = flags.addresses, dict[int, Wait]()
        memory, marks = DeviceMemory(words, len(words)), range(1, len(words), WORDS)
        self.watch = start(Watch(memory, self.remote, marks, self.waits.__getitem__))

    def signalling(self, word: int) -> Operation:
        return self._batch([(WRITE, rank, word, 1) for rank in self.remote.others])

    def awaiting(self, flags: Mapping[int, int], action: str) -> Operation:
        me, (first, *others) = self.remote.rank, flags.values()
        self.waits[first + 1] = flags, action
        return self._batch([
            (WRITE, me, first + 1, WAITING),
            *((WAIT, me, flag, 1) for flag in flags.values()),
            *((WRITE, me, flag, 0) for flag in others),
            (WRITE_TWO, me, first, IDLE),  # the flag and its mark
        ])  # fmt: skip

    def _batch(self, operations: Sequence[tuple[int, int, int, int]]) -> Operation:
        """operations: (operation, rank, word, value)."""
        # CUstreamBatchMemOpParams: operation, address, value, flags and two unused words. Flags 0: a wait ends once the word
        # is >= `value`; a write comes after all earlier memory operations.
        parameters: list[int] = []
        for operation, rank, word, value in operations:
            parameters += operation, self.flags[rank] + 4 * word, value, 0, 0, 0
        batch = (WORD * len(parameters))(*parameters)
        operate = function("cuStreamBatchMemOp_v2", 4)

        def enqueue() -> None:
            with on_device(self.device.index):  # the default stream belongs to the current device
                operate(private.raw_stream(self.device.index), len(operations), ctypes.addressof(batch), 0)

        return enqueue


Fabric = HostFabric | CudaFabric


@contextmanager
def together(group: dist.ProcessGroup) -> Iterator[None]:
    """If the context's body fails on one rank, every rank raises RuntimeError with the first failing rank's reason.
    Otherwise the other ranks would wait for it for ever. Collective."""
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    mine = failure and (str(failure).splitlines() or [type(failure).__name__])[0]
    for rank, reason in enumerate(gathered(group, mine)):
        if reason is not None:
            raise RuntimeError(f"rank {rank}: {reason}") from failure


def check_reach(group: dist.ProcessGroup, device: torch.device) -> None:
    """Raises RuntimeError, on every rank, where the ranks of a group cannot read each other's memory. Collective."""
    places = gathered(group, (socket.gethostname(), device.index))
    with together(group):
        if len({host for host, _ in places}) > 1:
            raise RuntimeError("the ranks are on several hosts")
        for _, index in places:
            # raises where this rank does not see that GPU
            if index != device.index and not torch.cuda.can_device_access_peer(device, index):
                raise RuntimeError(f"GPU {device.index} cannot read the memory of GPU {index}")


class Mailboxes:
    """Memory in the layout `box` on every rank, for our kernels that write into that of remote ranks."""

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
