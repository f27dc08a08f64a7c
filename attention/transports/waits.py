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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from attention.agreement import PATIENCE_S, Calls, calls_over
from attention.gpu.cuda_driver import WORD, function
from attention.gpu.private import timeout_s

INTERVAL_S = 1.0  # between two checks of the watchdog
IDLE, WAITING, SEEN = 0, 1, 0x0101  # values of a mark: the stream writes the word, the watchdog only its second byte
MOST_WAITS = 16  # of one memory followed at once: in a call that hangs, many pieces of a mailbox wait


def gathered(group: dist.ProcessGroup, mine: Any) -> list[Any]:
    """Every rank's object, by rank. Collective."""
    objects: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(objects, mine, group=group)
    return objects


def started(pid: int) -> int | None:
    """When a running process started, in clock ticks since the boot, because pids are reused. 0 if this process sees none
    with that pid, and None if that is unknown, for instance without a free file descriptor."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    except OSError:
        return None
    state, *fields = stat.rpartition(b")")[2].split()
    return 0 if state in (b"Z", b"X") else int(fields[18])


class Remote:
    """The remote ranks of a group, as seen by waits for them. Ranks are numbered within the group; messages give global
    ranks. Construction is collective. The group is referenced weakly, because a cached pool must not keep it alive.
    `failed`: the first failure, after which data in shared memory cannot be trusted."""

    calls = Calls()

    def __init__(self, group: dist.ProcessGroup, device: torch.device):
        self._group, self.device, self.calls = weakref.ref(group), device, calls_over(group)
        self.rank, self.names = dist.get_rank(group), dist.get_process_group_ranks(group)
        self.world = len(self.names)
        # each rank starts with the next rank, so at first no two ranks pull from the same one
        self.others = [(self.rank + i) % self.world for i in range(1, self.world)]
        mine = os.getpid(), started(os.getpid())
        # only the processes that this rank can see: containers have their own pids
        self.processes = {
            rank: (pid, start)
            for rank, (pid, start) in enumerate(gathered(group, mine))
            if start and started(pid) == start
        }
        self.failed: str | None = None

    @property
    def group(self) -> dist.ProcessGroup:
        group = self._group()
        if group is None:
            raise RuntimeError("the process group was destroyed; make the function again over an existing one")
        return group

    def check(self) -> None:
        """Raises RuntimeError after a wait that failed."""
        if self.failed is not None:
            raise RuntimeError(self.failed)

    def fail(self, why: str) -> RuntimeError:
        self.failed = self.failed or why
        return RuntimeError(self.failed)

    def alike(self, mine: str) -> None:
        """Raises RuntimeError, on every rank, unless all ranks ask for the same. Collective."""
        asked = gathered(self.group, mine)
        if len(set(asked)) > 1:
            shares = ", ".join(f"rank {name} shares {share}" for name, share in zip(self.names, asked, strict=True))
            raise self.fail(
                f"transport=symm: the ranks made different calls: {shares}; all ranks of a group must make the same "
                "calls in the same order; start all ranks again"
            )

    def overdue(self, ranks: Sequence[int], action: str, waited_s: float) -> str | None:
        """Why this rank should stop waiting for `ranks` (`action`: what they should do), or None."""
        me = f"transport=symm: rank {self.names[self.rank]}"
        for rank in ranks:
            pid, start = self.processes.get(rank, (0, None))
            if start is not None and started(pid) not in (start, None):
                return (
                    f"{me} waited for rank {self.names[rank]} {action}, but its process {pid} is gone; "
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


Wait = tuple[Mapping[int, int], str]  # by remote rank the word of the flag that it sets; what this signals


@dataclass(eq=False)
class Watch:
    """The waits for flags in one memory. Each has a mark, which is set to WAITING before the wait and to IDLE after it. A mark
    in which the byte set at the last check is still set belongs to the same wait, because a new wait writes the whole word.

    marks: the words that may be marks. wait_of: the wait of a mark that is set."""

    memory: DeviceMemory
    remote: Remote
    marks: range
    wait_of: Callable[[int], Wait]
    since: Mapping[int, float] = field(default_factory=dict)

    def look(self, now: float) -> str | None:
        """Why the process has to end, or None."""
        before, since = self.since, dict[int, float]()
        self.since = since
        words = self.memory.read(self.marks[0], self.marks[-1] - self.marks[0] + 1)[:: self.marks.step]
        for i in np.flatnonzero(words & 0xFF == WAITING)[:MOST_WAITS].tolist():
            mark = self.marks[i]
            if words[i] != SEEN or mark not in before:
                self.memory.see(mark)
                since[mark] = now
                continue
            since[mark] = before[mark]
            flags, action = self.wait_of(mark)
            missing = self._missing(flags)
            why = self.remote.overdue(missing, action, now - since[mark]) if missing else None
            if why and self._missing(flags) == missing and self.memory.read(mark, 1)[0] == SEEN:
                return why
        return None

    def _missing(self, flags: Mapping[int, int]) -> list[int]:
        return [rank for rank, flag in flags.items() if self.memory.read(flag, 1)[0] != 1]


class DeviceMemory:
    """Device memory, read by copies on the watchdog's own stream, which other streams' waits do not block. Only the
    watchdog's thread reads. words: int32 `[n]`. most: the largest number of words read at once."""

    def __init__(self, words: Tensor, most: int):
        self.words = words
        self.host = torch.ones(most + 1, dtype=torch.int32, pin_memory=True)  # the last stays 1
        self.stream = _side_stream(words.device.index)  # created now: later it could block on a wait that never ends

    def read(self, first: int, n: int) -> np.ndarray[Any, Any]:
        self._copy("cuMemcpyDtoHAsync_v2", self.host.data_ptr(), self.words.data_ptr() + 4 * first, 4 * n)
        return self.host[:n].numpy().copy()

    def see(self, mark: int) -> None:
        """Sets the second byte of that word to 1."""
        # a copy, because a kernel may have to wait for a multiprocessor
        self._copy("cuMemcpyHtoDAsync_v2", self.words.data_ptr() + 4 * mark + 1, self.host[-1:].data_ptr(), 1)

    def _copy(self, name: str, *arguments: int) -> None:
        torch.cuda.set_device(self.words.device)  # of this thread
        function(name, 4)(*arguments, self.stream)
        function("cuStreamSynchronize", 1)(self.stream)


@cache
def _side_stream(index: int) -> int:
    """A stream of a device, created by the driver, because PyTorch's pooled streams may be shared."""
    stream, non_blocking = WORD(), 1
    with torch.cuda.device(index):
        torch.cuda.current_stream()  # so that the thread has a context
        function("cuStreamCreate", 2)(ctypes.addressof(stream), non_blocking)
    return stream.value


def end(why: str) -> None:
    """Prints the reason and ends the process, since its streams can no longer be trusted."""
    print(why, file=sys.stderr, flush=True)
    os.abort()


FAILURES = 5  # failed checks in a row after which a watch is given up


def start(watch: Watch, end: Callable[[str], None] = end, interval_s: float = INTERVAL_S) -> Watch:
    """Checks the watch from a thread of its own, as long as it is in use. A check that fails is repeated; after several
    failures in a row the watch is given up, with a message. Returns the watch."""
    reference = weakref.ref(watch)

    def check() -> None:
        if torch.cuda.is_available():  # this thread may call the driver while another captures a CUDA graph
            relaxed = ctypes.c_int(2)  # CU_STREAM_CAPTURE_MODE_RELAXED
            function("cuThreadExchangeStreamCaptureMode", 1)(ctypes.addressof(relaxed))
        failures, why = 0, None
        while failures < FAILURES:
            time.sleep(interval_s)
            used = reference()
            if used is None:
                return
            try:
                why = used.look(time.monotonic())
                failures = 0
            except Exception as error:
                failures, reason = failures + 1, str(error)
            del used
            if why is not None:
                end(why)
        with contextlib.suppress(OSError, ValueError):  # stderr is closed
            print(
                f"transport=symm: waits are no longer watched ({reason}); one that does not end will hang",
                file=sys.stderr,
            )

    threading.Thread(target=check, name="waits", daemon=True).start()
    return watch
