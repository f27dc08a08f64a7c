"""Timeouts of waits for remote ranks. Where ranks read each other's memory, one waits for a flag that another sets. A
rank that raised, exited or made another call never sets it. So a wait ends with the process group's timeout, or at once
if the remote process is gone. On a CPU the waiting call raises. A waiting CUDA stream cannot be stopped: a watchdog ends
the process, as NCCL's does."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import threading
import time
import weakref
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from attention.agreement import PATIENCE_S, Calls, calls_over
from attention.gpu.cuda_driver import function
from attention.gpu.private import timeout_s

INTERVAL_S = 1.0  # between two checks of the watchdog
IDLE, WAITING, SEEN = 0, 1, 0x0101  # values of a mark: the stream writes the word, the watchdog only its second byte
CHUNK = 1 << 16  # bytes that the watchdog copies at once


@dataclass(frozen=True)
class Process:
    """`started`: start time in clock ticks since the boot, because pids are reused."""

    pid: int
    started: int

    @staticmethod
    def of(pid: int) -> Process | None:
        """None where this process sees no running process with that pid."""
        try:
            found = _stat(pid)
        except OSError:
            return None
        return None if found is None else Process(pid, found)

    def gone(self) -> bool:
        """Whether it has ended; False if that is unknown, for instance without a free file descriptor."""
        try:
            return _stat(self.pid) != self.started
        except OSError:
            return False


def _stat(pid: int) -> int | None:
    """The start time of a running process, from /proc. Raises OSError where /proc cannot be read; then nothing is
    known."""
    try:
        found = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, *fields = found.rpartition(b")")[2].split()
    return None if state in (b"Z", b"X") else int(fields[18])


class Remote:
    """The remote ranks of a group, as seen by waits for them. Ranks are numbered within the group; messages give global
    ranks. Construction is collective. `failed`: the first failure, after which data in shared memory cannot be trusted."""

    calls = Calls()

    def __init__(self, group: dist.ProcessGroup, device: torch.device):
        self._group, self.device, self.calls = weakref.ref(group), device, calls_over(group)
        self.rank = dist.get_rank(group)
        world = dist.get_world_size(group)
        self.names = [dist.get_global_rank(group, rank) for rank in range(world)]
        found: list[Any] = [None] * world
        dist.all_gather_object(found, Process.of(os.getpid()), group=group)
        # only the processes that this rank can see: containers have their own pids
        self.processes = {rank: p for rank, p in enumerate(found) if p is not None and Process.of(p.pid) == p}
        self.failed: str | None = None

    def check(self) -> None:
        """Raises RuntimeError after a wait that failed."""
        if self.failed is not None:
            raise RuntimeError(self.failed)

    def fail(self, why: str) -> RuntimeError:
        self.failed = self.failed or why
        return RuntimeError(self.failed)

    def alike(self, mine: str) -> None:
        """Raises RuntimeError, on every rank, unless all ranks ask for the same. Collective."""
        found: list[Any] = [None] * len(self.names)
        dist.all_gather_object(found, mine, group=self._group())
        if len(set(found)) > 1:
            asked = ", ".join(f"rank {name} shares {each}" for name, each in zip(self.names, found, strict=True))
            raise self.fail(
                f"transport=symm: the ranks made different calls: {asked}; all ranks of a group must make the same "
                "calls in the same order; start all ranks again"
            )

    def overdue(self, ranks: Sequence[int], action: str, waited_s: float) -> str | None:
        """Why this rank should stop waiting for `ranks` (`action`: what they should do), or None."""
        me = f"transport=symm: rank {self.names[self.rank]}"
        for rank in ranks:
            process = self.processes.get(rank)
            if process is not None and process.gone():
                return (
                    f"{me} waited for rank {self.names[rank]} {action}, but its process {process.pid} is gone; "
                    "its own output says why; start all ranks again"
                )
        group = self._group()
        if waited_s > PATIENCE_S and (news := self.calls.news()):
            return f"{me} waited for rank {self.names[ranks[0]]} {action}, but {news}"
        limit_s = float("inf") if group is None else timeout_s(group, self.device)
        if waited_s < limit_s:
            return None
        names = ", ".join(str(self.names[rank]) for rank in ranks)
        return (
            f"{me} waited {limit_s:g} s, the process group's timeout, for rank {names} {action}: it raised, hangs, is late or "
            f"made another call (this rank is in {self.calls.where}); start all ranks again, with a longer timeout where a call takes "
            "that long"
        )


@dataclass(frozen=True)
class Pending:
    """A wait in progress on a stream: the word and the value of its mark, the ranks that have not signalled, and the action
    that they should signal."""

    mark: int
    state: int
    missing: tuple[int, ...]
    action: str


class FlagMemory(Protocol):
    """int32 words that streams write to."""

    def read(self, first: int, n: int) -> Sequence[int]: ...

    def see(self, mark: int) -> None:
        """Set the second byte of that word to 1."""


@dataclass(frozen=True)
class Wait:
    """A wait that a stream may make: the word of its mark, and the word of each rank's flag. The stream sets the mark to
    WAITING before the wait and to IDLE after it."""

    mark: int
    flags: dict[int, int]
    action: str


class Waits:
    """All waits for flags in a memory of `words` words."""

    def __init__(self, memory: FlagMemory, words: int):
        self.memory, self.words = memory, words
        self.every: list[Wait] = []

    def pending(self) -> list[Pending]:
        words = self.memory.read(0, self.words)
        return [
            Pending(x.mark, words[x.mark], tuple(rank for rank, at in x.flags.items() if words[at] != 1), x.action)
            for x in list(self.every)
            if words[x.mark] & 0xFF == WAITING
        ]


class Watch:
    """Checks one source of waits repeatedly. A mark in which the byte set at the last check is still set belongs to the same
    wait, because a new wait writes the whole word."""

    def __init__(self, pending: Callable[[], list[Pending]], memory: FlagMemory, remote: Remote):
        self.pending, self.memory, self.remote = pending, memory, remote
        self.since: dict[int, float] = {}

    def look(self, now: float) -> str | None:
        """Why the process has to end, or None."""
        found = self.pending()
        since, self.since = self.since, {}
        for each in found:
            if each.state != SEEN or each.mark not in since:
                self.memory.see(each.mark)
                self.since[each.mark] = now
                continue
            self.since[each.mark] = since[each.mark]
            why = self.remote.overdue(each.missing, each.action, now - since[each.mark]) if each.missing else None
            if why is not None and each in self.pending():
                return why
        return None


class DriverError(RuntimeError):
    """The device no longer answers. The next call on it will raise, too."""


class DeviceMemory:
    """Device memory, read by copies on the watchdog's own stream, which other streams' waits do not block. Only the
    watchdog's thread reads. `keep` keeps the memory alive."""

    def __init__(self, device: torch.device, address: int, keep: Any):
        self.device, self.address, self.keep = device, address, keep
        self.side = _side(device.index)  # created now: later it could block on a wait that never ends

    def read(self, first: int, n: int) -> Sequence[int]:
        found = array("i")
        for at in range(4 * first, 4 * (first + n), CHUNK):
            found.frombytes(self.side.copied(self.address + at, min(CHUNK, 4 * (first + n) - at)))
        return found

    def see(self, mark: int) -> None:
        self.side.set_byte(self.address + 4 * mark + 1)


class _Side:
    """A stream and pinned memory of a device, created by the driver, because PyTorch's pooled streams may be shared."""

    def __init__(self, index: int):
        address, size, pointer = ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p
        self.index = index
        self._copy = function("cuMemcpyDtoHAsync_v2", pointer, address, size, pointer)
        # a copy, because a kernel may have to wait for a multiprocessor
        self._set = function("cuMemcpyHtoDAsync_v2", address, pointer, size, pointer)
        self._wait = function("cuStreamSynchronize", pointer)
        self.stream, self.host = pointer(), pointer()
        non_blocking = 1
        with torch.cuda.device(index):
            torch.cuda.current_stream()  # so that the thread has a context
            _checked(function("cuStreamCreate", pointer, ctypes.c_uint)(ctypes.byref(self.stream), non_blocking))
            _checked(function("cuMemHostAlloc", pointer, size, ctypes.c_uint)(ctypes.byref(self.host), CHUNK + 1, 0))
        self.one = pointer((self.host.value or 0) + CHUNK)
        ctypes.memset(self.one, 1, 1)

    def _run(self, copy: Callable[..., int], *given: Any) -> None:
        torch.cuda.set_device(self.index)  # of this thread
        _checked(copy(*given, self.stream))
        _checked(self._wait(self.stream))

    def copied(self, address: int, size: int) -> bytes:
        self._run(self._copy, self.host, address, size)
        return ctypes.string_at(self.host, size)

    def set_byte(self, address: int) -> None:
        """Sets the byte to 1."""
        self._run(self._set, address, self.one, 1)


def _checked(error: int) -> None:
    if error:
        raise DriverError(f"CUDA error {error}")


@lru_cache(maxsize=64)
def _side(index: int) -> _Side:
    return _Side(index)


def end(why: str) -> None:
    """Prints the reason and ends the process, since its streams can no longer be trusted."""
    sys.stderr.write(f"{why}\n")
    sys.stderr.flush()
    os.abort()


FAILURES = 5  # failed checks in a row after which a watch is given up


class Watchdog:
    """One thread per process that checks every watch still in use. A check that fails is repeated; after several
    failures in a row the watch is given up, with a message."""

    def __init__(self, end: Callable[[str], None] = end, interval_s: float = INTERVAL_S):
        self.end, self.interval_s = end, interval_s
        self.lock = threading.Lock()
        self.watches: list[weakref.ref[Watch]] = []
        self.failed: dict[weakref.ref[Watch], int] = {}
        self.thread: threading.Thread | None = None

    def add(self, watch: Watch) -> None:
        with self.lock:
            self.watches = [x for x in self.watches if x() is not None] + [weakref.ref(watch)]
            if self.thread is None or not self.thread.is_alive():
                self.thread = threading.Thread(target=self._run, name="waits", daemon=True)
                self.thread.start()

    def _run(self) -> None:
        if torch.cuda.is_available():
            _leave_captures_alone()
        while True:
            time.sleep(self.interval_s)
            with self.lock:
                now = list(self.watches)
            for reference in now:
                self._look(reference)

    def _look(self, reference: weakref.ref[Watch]) -> None:
        watch = reference()
        if watch is None:
            return
        try:
            why = watch.look(time.monotonic())
        except Exception as error:  # the other watches must go on
            self.failed[reference] = self.failed.get(reference, 0) + 1
            if self.failed[reference] >= FAILURES:
                del self.failed[reference]
                with contextlib.suppress(OSError, ValueError):  # stderr is closed
                    sys.stderr.write(
                        f"transport=symm: waits are no longer watched ({error}); one that does not end will hang\n"
                    )
                with self.lock:
                    self.watches.remove(reference)
            return
        self.failed.pop(reference, None)
        if why is not None:
            self.end(why)


def _leave_captures_alone() -> None:
    """Lets this thread call the driver while another thread captures a CUDA graph."""
    relaxed = ctypes.c_int(2)  # CU_STREAM_CAPTURE_MODE_RELAXED
    function("cuThreadExchangeStreamCaptureMode", ctypes.c_void_p)(ctypes.byref(relaxed))


watchdog = Watchdog()
