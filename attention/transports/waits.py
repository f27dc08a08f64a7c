"""Waits for remote ranks end. Where ranks read each other's memory, one waits for a flag that another sets; a rank that raised,
exited, is late or made another call never sets it. So a wait has the process group's timeout, and ends at once where the process
waited for is gone. On a CPU the waiting call raises. A CUDA stream cannot be told to stop waiting: a watchdog ends the process, as
NCCL's does."""

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

from attention.runtime.cuda_driver import function
from attention.transports.groups import timeout_s

INTERVAL_S = 1.0  # between two looks of the watchdog
IDLE, WAITING, SEEN = 0, 1, 0x0101  # of a mark: its second byte is the watchdog's, the rest is written by who waits
CHUNK = 1 << 16  # bytes that the watchdog copies at once


@dataclass(frozen=True)
class Process:
    """`started`: clock ticks after the boot, as a pid is used again."""

    pid: int
    started: int

    @staticmethod
    def of(pid: int) -> Process | None:
        """None where this process sees no living one of that number."""
        try:
            found = _stat(pid)
        except OSError:
            return None
        return None if found is None else Process(pid, found)

    def gone(self) -> bool:
        """False where nobody can tell, as without a free file descriptor."""
        try:
            return _stat(self.pid) != self.started
        except OSError:
            return False


def _stat(pid: int) -> int | None:
    """When a living process started, by /proc. Raises OSError where that cannot be read, which says nothing of the process."""
    try:
        found = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, *fields = found.rpartition(b")")[2].split()
    return None if state in (b"Z", b"X") else int(fields[18])


class Remote:
    """A group's other ranks, as this one waits for them; ranks are those of the group, and named as the world knows them.
    Collective. `failed`: why nothing that goes through their memory can be trusted any more."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device):
        self._group, self.device = weakref.ref(group), device
        self.rank = dist.get_rank(group)
        world = dist.get_world_size(group)
        self.names = [dist.get_global_rank(group, rank) for rank in range(world)]
        found: list[Any] = [None] * world
        dist.all_gather_object(found, Process.of(os.getpid()), group=group)
        # only those that are seen from here: containers number their processes themselves
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
        """Raises RuntimeError, on every rank, where they do not all ask for the same. Collective."""
        found: list[Any] = [None] * len(self.names)
        dist.all_gather_object(found, mine, group=self._group())
        if len(set(found)) > 1:
            asked = ", ".join(f"rank {name} shares {each}" for name, each in zip(self.names, found, strict=True))
            raise self.fail(
                f"transport=symm: the ranks made different calls: {asked}; all ranks of a group must make the same "
                "calls in the same order; start all ranks again"
            )

    def overdue(self, ranks: Sequence[int], deed: str, waited_s: float) -> str | None:
        """Why this rank need not wait any longer for those to have done `deed`, or None."""
        me = f"transport=symm: rank {self.names[self.rank]}"
        for rank in ranks:
            process = self.processes.get(rank)
            if process is not None and process.gone():
                return (
                    f"{me} waited for rank {self.names[rank]} {deed}, but its process {process.pid} is gone; "
                    "its own output says why; start all ranks again"
                )
        group = self._group()
        limit_s = float("inf") if group is None else timeout_s(group, self.device)
        if waited_s < limit_s:
            return None
        names = ", ".join(str(self.names[rank]) for rank in ranks)
        return (
            f"{me} waited {limit_s:g} s, the process group's timeout, for rank {names} {deed}: it raised, hangs, is late or "
            "made another call; start all ranks again, with a longer timeout where a call takes that long"
        )


@dataclass(frozen=True)
class Pending:
    """A wait that a stream is at, with the number of its mark and what that reads; and who has not done `deed`."""

    mark: int
    state: int
    missing: tuple[int, ...]
    deed: str


class Memory(Protocol):
    """int32 words that streams write to."""

    def read(self, first: int, n: int) -> Sequence[int]: ...

    def see(self, mark: int) -> None:
        """Set the second byte of that word to 1."""


@dataclass(frozen=True)
class Wait:
    """A wait that a stream may come to: the words of a mark, and of a flag by rank. Who waits sets the mark to WAITING before it and
    to IDLE behind it."""

    mark: int
    flags: dict[int, int]
    deed: str


class Waits:
    """Those of a pool of flags, `words` of them."""

    def __init__(self, memory: Memory, words: int):
        self.memory, self.words = memory, words
        self.every: list[Wait] = []

    def pending(self) -> list[Pending]:
        words = self.memory.read(0, self.words)
        return [
            Pending(x.mark, words[x.mark], tuple(rank for rank, at in x.flags.items() if words[at] != 1), x.deed)
            for x in list(self.every)
            if words[x.mark] & 0xFF == WAITING
        ]


class Watch:
    """Follows one source of waits from look to look. A mark is the same wait's as at the last look if it still has the byte that was
    set there: whoever comes to a wait writes the whole word."""

    def __init__(self, pending: Callable[[], list[Pending]], memory: Memory, remote: Remote):
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
            why = self.remote.overdue(each.missing, each.deed, now - since[each.mark]) if each.missing else None
            if why is not None and each in self.pending():
                return why
        return None


class DriverError(RuntimeError):
    """The device no longer answers; whoever uses it is told so by the next call."""


class DeviceMemory:
    """Read by copies on a stream of the watchdog's own, which no wait of another one holds up. For its thread alone. `keep`: what
    the memory lives as long as."""

    def __init__(self, device: torch.device, address: int, keep: Any):
        self.device, self.address, self.keep = device, address, keep

    def read(self, first: int, n: int) -> Sequence[int]:
        found = array("i")
        side = _side(self.device.index)
        for at in range(4 * first, 4 * (first + n), CHUNK):
            found.frombytes(side.copied(self.address + at, min(CHUNK, 4 * (first + n) - at)))
        return found

    def see(self, mark: int) -> None:
        _side(self.device.index).set_byte(self.address + 4 * mark + 1)


class _Side:
    """A stream and pinned memory of a device, by the driver: PyTorch's streams come from a pool and may be someone else's, too."""

    def __init__(self, index: int):
        address, size, pointer = ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p
        self.index = index
        self._copy = function("cuMemcpyDtoHAsync_v2", pointer, address, size, pointer)
        self._set = function(
            "cuMemcpyHtoDAsync_v2", address, pointer, size, pointer
        )  # no kernel, which may find no room
        self._wait = function("cuStreamSynchronize", pointer)
        self.stream, self.host = pointer(), pointer()
        self._enter()
        non_blocking = 1
        _checked(function("cuStreamCreate", pointer, ctypes.c_uint)(ctypes.byref(self.stream), non_blocking))
        _checked(function("cuMemHostAlloc", pointer, size, ctypes.c_uint)(ctypes.byref(self.host), CHUNK + 1, 0))
        self.one = pointer((self.host.value or 0) + CHUNK)
        ctypes.memset(self.one, 1, 1)

    def _enter(self) -> None:
        torch.cuda.set_device(self.index)  # of this thread

    def copied(self, address: int, size: int) -> bytes:
        self._enter()
        _checked(self._copy(self.host, address, size, self.stream))
        _checked(self._wait(self.stream))
        return ctypes.string_at(self.host, size)

    def set_byte(self, address: int) -> None:
        """To 1."""
        self._enter()
        _checked(self._set(address, self.one, 1, self.stream))
        _checked(self._wait(self.stream))


def _checked(error: int) -> None:
    if error:
        raise DriverError(f"CUDA error {error}")


@lru_cache(maxsize=64)
def _side(index: int) -> _Side:
    return _Side(index)


def end(why: str) -> None:
    """End the process, as nothing that its streams do can be trusted."""
    sys.stderr.write(f"{why}\n")
    sys.stderr.flush()
    os.abort()


FAILURES = 5  # looks in a row that may fail before a watch is given up


class Watchdog:
    """One thread of a process, which looks at every watch that is still held by someone. A look that fails is tried again; after
    some in a row the watch is given up, which is said."""

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
        except Exception as error:  # of the driver, of PyTorch, of /proc: none may end the watch over other waits
            self.failed[reference] = self.failed.get(reference, 0) + 1
            if self.failed[reference] >= FAILURES:
                del self.failed[reference]
                with contextlib.suppress(OSError, ValueError):  # nobody listens
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
    """What this thread calls is no part of a CUDA graph that another one captures, and must not break it."""
    relaxed = ctypes.c_int(2)  # CU_STREAM_CAPTURE_MODE_RELAXED
    function("cuThreadExchangeStreamCaptureMode", ctypes.c_void_p)(ctypes.byref(relaxed))


watchdog = Watchdog()
