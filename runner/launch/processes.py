"""Processes of this machine, as the kernel lists them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from pathlib import Path

from runner import ROOT


def cores() -> int:
    """The CPU cores that this process may use."""
    return len(os.sched_getaffinity(0))


def search_path() -> str:
    """PYTHONPATH for `python -P`: this program's packages, then the working folder where this process imports from it, too, then the
    path of this process."""
    here = [os.getcwd()] if {"", os.getcwd()}.intersection(sys.path) else []
    return os.pathsep.join([ROOT, *here, *filter(None, [os.environ.get("PYTHONPATH")])])


def die_with_parent() -> None:
    """Linux: this process gets SIGKILL when the one that started it ends, however it ends."""
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def process_group(leader: int) -> list[int]:
    """The living processes of a process group."""
    found = []
    for process in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, group = process.read_text().rpartition(")")[2].split()[:3]
            if int(group) == leader and state != "Z":
                found.append(int(process.parent.name))
    return found


def is_tracker(pid: int) -> bool:
    """Whether a process is multiprocessing's resource tracker."""
    with contextlib.suppress(OSError):
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def is_stopped(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    return False
