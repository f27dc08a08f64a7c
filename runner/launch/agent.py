"""The agent of a part of a world, as the process that starts it holds it: a folder, and the process that forks the ranks
(runner.launch.node)."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

from runner.launch.files import Part, WorldFiles, WorldSpec, write
from runner.launch.processes import cores, is_tracker, process_group, search_path

PREFIX = "attention-world-"  # of the name of a world's folder
POLL_S = 0.02
STOP_S = 3.0


class Agent:
    """A running agent. `close` ends it with its ranks and removes its folder."""

    def __init__(self, part: Part):
        self.folder = Path(tempfile.mkdtemp(prefix=PREFIX))
        self.files = WorldFiles(self.folder, range(part.spec.world_size))
        with contextlib.ExitStack() as undone:  # where anything fails, or at Ctrl-C
            undone.callback(shutil.rmtree, self.folder)
            write(self.folder / "part.json", json.dumps(asdict(part)))  # not a command line, which every user can read
            os.mkfifo(self.folder / "jobs")
            # O_RDWR, so that no open, here or in rank 0, waits for the other process
            self._jobs = os.open(self.folder / "jobs", os.O_RDWR | os.O_NONBLOCK)
            undone.callback(os.close, self._jobs)
            with (self.folder / f"agent-{part.process}.log").open("wb") as log:
                self.process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "runner.launch.node", str(self.folder)],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=_environment(part.spec),
                    start_new_session=True,  # so that Ctrl-C reaches only this process
                )
            undone.pop_all()

    def tell(self, line: str) -> None:
        """Send a line to rank 0: that `job` holds its next job, or `stop`."""
        with contextlib.suppress(OSError):
            os.write(self._jobs, f"{line}\n".encode())

    def close(self) -> None:
        """End every process, idle ranks in order if they were asked to stop, and remove the folder."""
        try:
            states = self.files.states()  # starting ranks do not listen yet
            if states and all(state["phase"] == "idle" for state in states):
                self._wait()
        finally:  # even if Ctrl-C comes during the wait
            try:
                self._kill()
                self._wait()
            finally:
                os.close(self._jobs)
                shutil.rmtree(self.folder, ignore_errors=True)

    def _wait(self) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(STOP_S)

    def _kill(self) -> None:
        # Spare multiprocessing's resource tracker, even one just started: it unlinks the others' semaphores, then ends.
        deadline = time.monotonic() + STOP_S
        while (group := process_group(self.process.pid)) and time.monotonic() < deadline:
            for pid in group:
                with contextlib.suppress(OSError):
                    if not is_tracker(pid):
                        os.kill(pid, signal.SIGKILL)
            time.sleep(POLL_S)
        with contextlib.suppress(OSError):
            os.killpg(self.process.pid, signal.SIGKILL)


def _environment(spec: WorldSpec) -> dict[str, str]:
    """The environment variables of an agent and its ranks."""
    variables = {
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",  # of external packages; the library's own never uses multicast
        "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1",  # later worlds reuse what FlashAttention-4 compiled
    }
    if spec.nodes == 1:  # refuse connections from other machines
        variables |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}
    variables |= os.environ
    if spec.device == "cpu":
        threads = max(1, cores() // -(-spec.world_size // spec.nodes))
        variables |= {"OMP_NUM_THREADS": str(threads), "CUDA_VISIBLE_DEVICES": ""}
    if spec.share_gpu:
        variables["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    return (
        variables
        | dict(spec.env)
        | {
            "ATTENTION_LAUNCHER": str(os.getpid()),
            "PYTHONPATH": search_path(),
            "PYTHONUNBUFFERED": "1",  # ranks end at once, without a flush
        }
    )
