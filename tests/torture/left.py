"""What programs left behind: processes, worlds' folders, shared memory."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

from runner.launch.ownership import PREFIX
from runner.launch.processes import is_tracker
from tests.torture import program
from tests.torture.program import processes

GONE_S = 8.0  # within which everything must have ended
KILL_S = 5.0  # for processes to end once they are killed


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


def left(folder: Path) -> list[str]:
    """What is still there after GONE_S: of shared memory only what the trials' processes were seen to map, as others on this
    machine use it, too. Processes that are left are killed."""
    deadline = time.monotonic() + GONE_S
    while True:
        pids, worlds = processes(folder), list((folder / "tmp").glob(f"{PREFIX}*"))
        names = sorted(path.name for path in program.mapped if path.exists())
        if not (pids or worlds or names) or time.monotonic() > deadline:
            break
        time.sleep(0.1)
    kill(folder)
    program.mapped.clear()
    counts = ((len(pids), "processes"), (len(worlds), "worlds' folders"), (len(names), f"in {program.SHARED}: {names}"))
    return [f"left behind: {number} {what}" for number, what in counts if number]
