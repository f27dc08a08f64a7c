"""Memory that all ranks of a group can read, and signals between ranks. On CUDA it is symmetric memory over NVLink
(multicast is never used) with stream-ordered signals, on a CPU shared memory of one host."""

from __future__ import annotations

import ctypes
import os
import socket
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from attention.gpu import private
from attention.gpu.cuda_driver import function
from attention.gpu.streams import on_device
from attention.transports.waits import IDLE, WAITING, DeviceMemory, Remote, Wait, Waits, Watch, watchdog

NO_MULTICAST = "TORCH_SYMM_MEM_DISABLE_MULTICAST"  # read by PyTorch where it makes symmetric memory
MEMORY_FILE = "attention"  # in /proc: "/memfd:attention"
WORDS = 2  # int32 words per flag: the flag, and the mark of a wait for it
POLL_S = 20e-6  # between two reads of a flag on a CPU
LOOK_S = 0.1  # between two checks whether the remote rank can still set the flag


@dataclass
class Shared:
    """Memory of the same size on every rank, as this rank sees it, by rank (its own included). `owner` keeps it
    alive."""

    by_rank: list[Tensor]
    owner: Any = None

    def __post_init__(self) -> None:
        self.addresses = [x.data_ptr() for x in self.by_rank]


class Fabric:
    """Shared memory and signals of a group. The group is referenced weakly, because a cached fabric must not keep it alive."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device):
        self._group, self.device, self.remote = weakref.ref(group), device, Remote(group, device)

    @property
    def group(self) -> dist.ProcessGroup:
        group = self._group()
        if group is None:
            raise RuntimeError("the process group was destroyed; make the function again over an existing one")
        return group

    def allocate(self, size: int) -> Shared:
        """`size` zeroed bytes on every rank. Collective. Raises RuntimeError on all ranks if one cannot allocate
        them."""
        raise NotImplementedError

    def settle(self) -> None:
        """Waits until every rank has finished all work that it has started. Collective."""
        raise NotImplementedError

    def copy(
        self, into: Sequence[Tensor], element: int, start: int, n: int, shared: Shared, rank: int, at: Sequence[int]
    ) -> None:
        """Copies, on the current stream, from a rank's memory to the tokens `[start, start + n)` of each tensor of
        `into`: `[S, h, D]`, or batch element `element` of `[B, S, h, D]`. at: for each tensor, the byte at which its source
        begins; source tokens are contiguous. All of `into` have one shape, and the heads of a token are contiguous."""
        raise NotImplementedError

    def signalling(self, flags: Sequence[Tensor]) -> Callable[[], None]:
        """An operation that sets int32 flags to 1 after all earlier work of the current stream."""
        raise NotImplementedError

    def awaiting(self, flags: Mapping[int, Tensor], action: str) -> Callable[[], None]:
        """An operation that makes the current stream (on a CPU, the calling thread) wait until this rank's int32 flags
        are 1, then resets them to 0.

        flags: by the rank that sets each; the word after each flag is the mark of a wait.
        action: what the flag signals, for messages, as in "to publish its kv".
        The wait ends with the process group's timeout (`waits`); on a CPU it raises RuntimeError."""
        raise NotImplementedError

    def watch(self, flags: Tensor) -> None:
        """Registers this rank's flags and marks, so that waits for them have a timeout."""


def symmetric_buffer(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, group: dist.ProcessGroup
) -> tuple[Tensor, Any]:
    """A symmetric tensor and its handle. Collective. Raises RuntimeError, on every rank, where symmetric memory is not
    available."""
    before = os.environ.get(NO_MULTICAST)
    os.environ[NO_MULTICAST] = "1"
    try:
        with together(group):
            symmetric = private.symmetric_memory()
            buffer = symmetric.empty(shape, dtype=dtype, device=device)
        with together(group):
            handle = symmetric.rendezvous(buffer, group.group_name)
    finally:  # the caller's own symmetric memory may use multicast
        if before is None:
            del os.environ[NO_MULTICAST]
        else:
            os.environ[NO_MULTICAST] = before
    return buffer, handle


def agreed(group: dist.ProcessGroup, mine: str | None) -> str | None:
    """The first rank's reason that is not None, on every rank; None if all are. mine: this rank's reason. Collective."""
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    return next((reason for reason in everyone if reason), None)


@contextmanager
def together(group: dist.ProcessGroup) -> Iterator[None]:
    """If the context's body fails on one rank, every rank raises RuntimeError with the first failing rank's reason.
    Otherwise the other ranks would wait for it for ever. Collective."""
    try:
        yield
    except Exception as error:
        message = (str(error).splitlines() or [type(error).__name__])[0]
        raise RuntimeError(agreed(group, f"rank {dist.get_rank(group)}: {message}")) from error
    reason = agreed(group, None)
    if reason is not None:
        raise RuntimeError(reason)


WAIT, WRITE, WRITE_TWO = 1, 2, 5  # CU_STREAM_MEM_OP_WAIT_VALUE_32, _WRITE_VALUE_32, _WRITE_VALUE_64 (two words)
_POINTER, _ADDRESS, _SIZE, _UINT = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_uint


class _StreamOperation(ctypes.Structure):
    """CUstreamBatchMemOpParams for a wait or a write."""

    _fields_ = (
        ("operation", _UINT), ("address", _ADDRESS), ("value", ctypes.c_uint64), ("flags", _UINT),
        ("rest", ctypes.c_uint64 * 2),
    )  # fmt: skip


class _Copy2D(ctypes.Structure):
    """CUDA_MEMCPY2D: rows of `width` bytes, `source_pitch` and `target_pitch` bytes apart."""

    _fields_ = (
        ("source_x", _SIZE), ("source_y", _SIZE), ("source_type", _UINT), ("source_host", _POINTER),
        ("source", _ADDRESS), ("source_array", _POINTER), ("source_pitch", _SIZE),
        ("target_x", _SIZE), ("target_y", _SIZE), ("target_type", _UINT), ("target_host", _POINTER),
        ("target", _ADDRESS), ("target_array", _POINTER), ("target_pitch", _SIZE),
        ("width", _SIZE), ("height", _SIZE),
    )  # fmt: skip


@lru_cache(maxsize=4096)
def _rows_of(row: int, source_row: int, width: int, n: int) -> bytes:
    """The bytes of a `_Copy2D` of n rows, without its addresses."""
    types = {"source_type": UNIFIED, "target_type": UNIFIED}
    return bytes(_Copy2D(**types, source_pitch=source_row, target_pitch=row, width=width, height=n))


UNIFIED = 4  # CU_MEMORYTYPE_UNIFIED
MOST_PITCH = 2**31 - 1  # bytes


class CudaFabric(Fabric):
    """Signals are stream-ordered: a rank writes to remote memory and waits on its own. The GPU's front end does both,
    so no kernel needs a free multiprocessor."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device):
        super().__init__(group, device)
        self._copy = function("cuMemcpyAsync", _ADDRESS, _ADDRESS, _SIZE, _POINTER)
        self._copy_rows = function("cuMemcpy2DAsync_v2", _POINTER, _POINTER)
        self._operate = function("cuStreamBatchMemOp_v2", _POINTER, _UINT, _POINTER, _UINT)

    def allocate(self, size: int) -> Shared:
        buffer, handle = symmetric_buffer((size,), torch.uint8, self.device, self.group)
        buffer.zero_()
        self.settle()
        everyone = range(dist.get_world_size(self.group))
        return Shared([handle.get_buffer(rank, (size,), torch.uint8) for rank in everyone], (buffer, handle))

    def copy(
        self, into: Sequence[Tensor], element: int, start: int, n: int, shared: Shared, rank: int, at: Sequence[int]
    ) -> None:
        # Calls the driver: PyTorch's views and copies take several times as much CPU time, and PyTorch would copy strided
        # rows with a kernel, not with a copy engine.
        stream = private.raw_stream(self.device.index)
        size, width = into[0].element_size(), into[0].shape[-2] * into[0].shape[-1] * into[0].element_size()
        if n * width == 0:
            return
        rows, targets = [], []
        for x in into:
            *batch, pitch, _, _ = x.stride()
            rows.append(pitch * size)
            targets.append(x.data_ptr() + (start * pitch + (element * batch[0] if batch else 0)) * size)
        sources = [shared.addresses[rank] + each for each in at]
        whole = n == 1 or all(row == width for row in rows)
        if whole and len(into) == 2 and _together(*into):  # both as the two rows of one 2D copy
            apart = targets[1] - targets[0], sources[1] - sources[0]
            if n * width <= min(apart) and max(apart) <= MOST_PITCH:
                self._rows(targets[0], apart[0], sources[0], apart[1], n * width, 2, stream)
                return
        for target, source, row in zip(targets, sources, rows, strict=True):
            if whole:
                self._whole(target, source, n * width, stream)
            else:
                self._rows(target, row, source, width, width, n, stream)

    def _whole(self, target: int, source: int, size: int, stream: int) -> None:
        self._checked(self._copy(target, source, size, stream))

    def _rows(self, target: int, row: int, source: int, source_row: int, width: int, n: int, stream: int) -> None:
        """Copies n rows of `width` bytes that start `row` (target) and `source_row` bytes apart."""
        rows = _Copy2D.from_buffer_copy(_rows_of(row, source_row, width, n))
        rows.source, rows.target = source, target
        self._checked(self._copy_rows(ctypes.byref(rows), stream))

    def _checked(self, error: int) -> None:
        if error:
            raise RuntimeError(f"a copy from a remote rank's memory failed with CUDA error {error}")

    def settle(self) -> None:
        torch.cuda.synchronize(self.device)
        dist.barrier(self.group, device_ids=[self.device.index])
        torch.cuda.synchronize(self.device)

    def signalling(self, flags: Sequence[Tensor]) -> Callable[[], None]:
        return self._batch([(WRITE, flag.data_ptr(), 1) for flag in flags])

    def awaiting(self, flags: Mapping[int, Tensor], action: str) -> Callable[[], None]:
        places = {rank: flag.data_ptr() for rank, flag in flags.items()}
        first, *others = places.values()
        mark = first + 4
        words = {rank: self._word(place) for rank, place in places.items()}
        self.waits.every.append(Wait(self._word(mark), words, action))
        return self._batch([
            (WRITE, mark, WAITING),
            *((WAIT, place, 1) for place in places.values()),
            *((WRITE, place, 0) for place in others),
            (WRITE_TWO, first, IDLE),  # the flag and its mark
        ])  # fmt: skip

    def _word(self, address: int) -> int:
        return (address - self.flags.data_ptr()) // 4

    def watch(self, flags: Tensor) -> None:
        self.flags = flags
        memory = DeviceMemory(self.device, flags.data_ptr(), flags)
        self.waits = Waits(memory, flags.nbytes // 4)
        self.watched = Watch(self.waits.pending, memory, self.remote)
        watchdog.add(self.watched)

    def _batch(self, operations: Sequence[tuple[int, int, int]]) -> Callable[[], None]:
        # flags 0: a wait ends once the word is >= `value`; a write comes after all earlier memory operations
        every = [_StreamOperation(operation, address, value, 0) for operation, address, value in operations]
        batch = (_StreamOperation * len(every))(*every)

        def enqueue() -> None:
            with on_device(self.device.index):  # the default stream belongs to the current device
                stream = private.raw_stream(self.device.index)
                error = self._operate(stream, len(every), batch, 0)
            if error:
                raise RuntimeError(f"cuStreamBatchMemOp failed with CUDA error {error}")

        return enqueue


def _together(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors lie in one allocation, as the rows of one copy must."""
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


class HostFabric(Fabric):
    """Shared memory in anonymous files, so that a killed rank leaves nothing behind."""

    def allocate(self, size: int) -> Shared:
        number: int | None = None
        try:
            with together(self.group):
                number = os.memfd_create(MEMORY_FILE)
                os.posix_fallocate(number, 0, size)  # without reserved memory, a later write could raise SIGBUS
            places: list[Any] = [None] * dist.get_world_size(self.group)
            dist.all_gather_object(places, f"/proc/{os.getpid()}/fd/{number}", group=self.group)
            with together(self.group):  # at its end every rank has mapped the files
                mapped = [torch.from_file(place, shared=True, size=size, dtype=torch.uint8) for place in places]
        finally:
            if number is not None:
                os.close(number)
        return Shared(mapped)

    @torch.inference_mode()  # runs in the queue's thread; the caller's tensors may be inference tensors
    def copy(
        self, into: Sequence[Tensor], element: int, start: int, n: int, shared: Shared, rank: int, at: Sequence[int]
    ) -> None:
        for x, first in zip(into, at, strict=True):
            target = (x if x.dim() == 3 else x[element])[start : start + n]
            source = shared.by_rank[rank][first : first + n * x.shape[-2] * x.shape[-1] * x.element_size()]
            target.copy_(source.view(x.dtype).view(target.shape))

    def settle(self) -> None:
        dist.barrier(self.group)

    def signalling(self, flags: Sequence[Tensor]) -> Callable[[], None]:
        def signal() -> None:
            for flag in flags:
                flag.fill_(1)

        return signal

    def awaiting(self, flags: Mapping[int, Tensor], action: str) -> Callable[[], None]:
        def take() -> None:
            self.remote.check()
            start = time.monotonic()
            look = start + LOOK_S
            missing = list(flags)
            while missing := [rank for rank in missing if int(flags[rank]) != 1]:
                time.sleep(POLL_S)
                now = time.monotonic()
                if now < look:
                    continue
                look = now + LOOK_S
                why = self.remote.overdue(missing, action, now - start)
                if why is not None and any(int(flags[rank]) != 1 for rank in missing):
                    raise self.remote.fail(why)
            for flag in flags.values():
                flag.fill_(0)

        return take


def obstacle(group: dist.ProcessGroup, device: torch.device) -> str | None:
    """Why the ranks of a group cannot read each other's memory, or None; the same answer on every rank. Collective."""
    places: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(places, (socket.gethostname(), device.index), group=group)
    found: str | None = None
    if len({host for host, _ in places}) > 1:
        found = "the ranks are on several hosts"
    elif device.type == "cuda":
        unreachable = [i for _, i in places if i != device.index and not _reads(device, i)]
        found = f"GPU {device.index} cannot read the memory of GPU {unreachable[0]}" if unreachable else None
    return agreed(group, found)


def _reads(device: torch.device, other: int) -> bool:
    try:
        return torch.cuda.can_device_access_peer(device, other)
    except (AssertionError, RuntimeError):  # this rank does not see that GPU
        return False
