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


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Linux: this process gets a signal when the one that started it ends, however it ends."""
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


def _stat(pid: int) -> list[str]:
    """A process's state, parent, group and more; empty where it is gone."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return []


def process_group(leader: int) -> list[int]:
    """The living processes of a process group."""
    stats = {pid: _stat(pid) for pid in map(int, filter(str.isdigit, os.listdir("/proc")))}
    return [pid for pid, stat in stats.items() if stat and int(stat[2]) == leader and stat[0] != "Z"]


def is_tracker(pid: int) -> bool:
    """Whether a process is multiprocessing's resource tracker."""
    with contextlib.suppress(OSError):
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def is_stopped(pid: int) -> bool:
    return _stat(pid)[:1] == ["T"]
