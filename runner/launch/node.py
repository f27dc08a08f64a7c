"""One process's part of a world: `python -m runner.launch.node FOLDER` forks its ranks and records which failed. The program
runs this for its own ranks, and so does each other process of a launched world. FOLDER has a `Part` as `part.json`.

A fork is there at once, while a new process would import torch first. What is forked must have neither threads, since a
lock that one holds at the fork is never released in the child, nor asked the driver for GPUs, which a child could not
use then. That is why this is a process of its own, which imports what ranks need (runner.preload) and does nothing else."""

from __future__ import annotations

import importlib
import json
import os
import resource
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

from runner.launch.files import Part, write
from runner.launch.processes import die_with_parent

PARENT_ENDED = signal.SIGUSR2  # which nobody else sends
PRELOAD = "runner.preload"  # by name: it imports what stands above this package


def main(folder: Path) -> int:
    """Fork this process's ranks and wait until they end; the exit status. If the parent ends first, end them and remove the
    folder, which nobody else would."""
    signal.signal(PARENT_ENDED, lambda *_: sys.exit(1))
    ranks: dict[int, int] = {}
    try:
        die_with_parent(PARENT_ENDED)
        if os.environ["ATTENTION_LAUNCHER"] != str(os.getppid()):
            sys.exit(1)  # the parent ended before die_with_parent took effect
        part = Part.of(json.loads((folder / "part.json").read_text()))
        _fork(ranks, part, folder)
        return _await(ranks, folder / f"failures-{part.process}.json")
    except SystemExit:
        for rank in ranks:
            os.kill(rank, signal.SIGKILL)
        for _ in ranks:
            os.wait()
        shutil.rmtree(folder, ignore_errors=True)
        return 1


def _fork(ranks: dict[int, int], part: Part, folder: Path) -> None:
    """Fork the ranks of this process, by process id."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)  # ranks have connections to all others
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 1 << 16)), hard))
    importlib.import_module(PRELOAD)
    from runner.launch.rank import live

    for rank in part.ranks:
        pid = os.fork()
        if pid == 0:
            live(part, rank, folder)
        ranks[pid] = rank


def _await(ranks: dict[int, int], path: Path) -> int:
    """Wait for ranks by process id. The first failure ends the others; it and those that came with it are written."""
    failures: list[dict[str, Any]] = []
    while ranks:
        pid, status = os.wait()
        rank, code = ranks.pop(pid), os.waitstatus_to_exitcode(status)
        if code == 0 or (failures and code == -signal.SIGKILL):  # killed here
            continue
        failures.append({"rank": rank, "exitcode": code, "time": time.monotonic()})
        write(path, json.dumps(failures))
        for other in ranks:
            os.kill(other, signal.SIGKILL)
    return 1 if failures else 0


if __name__ == "__main__":
    os._exit(main(Path(sys.argv[1])))  # an orderly exit of torch takes half a second
