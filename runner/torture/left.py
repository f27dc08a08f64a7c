"""What programs left behind: processes, worlds' folders, shared memory."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

from runner.launch.ownership import PREFIX
from runner.launch.processes import is_tracker
from runner.torture.program import MARK

SHARED = Path("/dev/shm")
GONE_S = 8.0  # within which everything must have ended
KILL_S = 5.0  # for processes to end once they are killed


def processes(folder: Path) -> list[int]:
    """The living processes that the trials in `folder` or below it started, by the environment that they inherit."""
    mark = f"{MARK}={folder}".encode()
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            variables = path.read_bytes().split(b"\0")
            if any(text == mark or text.startswith(mark + b"/") for text in variables):
                found.append(int(path.parent.name))
    return found


def kill(folder: Path) -> None:
    """End the processes that the trials in `folder` started; those that they start meanwhile, too. Trackers, which unlink
    the others' semaphores, end by themselves."""
    deadline = time.monotonic() + KILL_S
    while pids := processes(folder):
        late = time.monotonic() > deadline
        for pid in pids:
            with contextlib.suppress(OSError):
                if late or not is_tracker(pid):
                    os.kill(pid, signal.SIGKILL)
        if late:
            break
        time.sleep(0.02)


def shared() -> set[str]:
    return set(os.listdir(SHARED)) if SHARED.exists() else set()


def _unused(names: set[str]) -> set[str]:
    """Those that no process has mapped: others on this machine use shared memory, too."""
    for path in Path("/proc").glob("[0-9]*/maps") if names else ():
        with contextlib.suppress(OSError):
            text = path.read_text(errors="replace")
            names = {name for name in names if f"{SHARED}/{name}" not in text}
    return names


def left(folder: Path, before: set[str]) -> list[str]:
    """What is still there after GONE_S. before: the names in shared memory when the trial began. Processes that are left
    are killed."""
    deadline = time.monotonic() + GONE_S
    while True:
        pids, worlds = processes(folder), list((folder / "tmp").glob(f"{PREFIX}*"))
        names = _unused(shared() - before)
        if not (pids or worlds or names) or time.monotonic() > deadline:
            break
        time.sleep(0.1)
    kill(folder)
    counts = ((len(pids), "processes"), (len(worlds), "worlds' folders"), (len(names), f"in {SHARED}: {sorted(names)}"))
    return [f"left behind: {number} {what}" for number, what in counts if number]
