"""Worlds: groups of rank processes that stay warm between runs. The program starts an agent process
(runner.launch.node), which starts the ranks, sends jobs to rank 0 through a named pipe and reads the replies from a
second one. Whatever happens to a rank comes back as an `Outcome`."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from runner.launch import endpoint
from runner.launch.files import State, WorldFiles, WorldSpec
from runner.launch.outcome import Diagnosis, Outcome, silent
from runner.launch.ownership import own_folder, remove_abandoned
from runner.launch.processes import belongs, cores, is_tracker, lives, process_group, search_path

if TYPE_CHECKING:
    from runner.launch.join import Head

POLL_S = 0.02
STOPPED_S = 1.0  # beyond this, time between two polls is time in which this program was stopped, and its ranks with it
STOP_S = 3.0
AGENT_S = 10.0  # time for an agent to report how a dead rank ended
Progress = Callable[[list[State]], None]
Job = Callable[..., Any] | str  # a module's function, or "module:function" if this process must not import it


class World:
    """One living world. `call` runs a job in it; `close` ends every process of it."""

    def __init__(self, spec: WorldSpec, head: Head | None = None):
        self.spec = spec
        self.head = head if spec.agents > 1 else None
        remove_abandoned()
        self.folder, self.owned = own_folder()
        self.files = WorldFiles(self.folder, range(spec.world_size))
        self.jobs = 0
        self.alive = True
        try:
            self._start()
        except BaseException:  # Ctrl-C, too
            shutil.rmtree(self.folder, ignore_errors=True)
            os.close(self.owned)
            raise

    def _start(self) -> None:
        spec = self.spec
        os.mkfifo(self.folder / "jobs")
        os.mkfifo(self.folder / "replies")
        # O_RDWR on both pipes, so that no open, here or in rank 0, waits for the other process
        self.replies = os.open(self.folder / "replies", os.O_RDWR | os.O_NONBLOCK)
        self.buffer = b""
        self.log = (self.folder / "agent.log").open("wb")
        plain: dict[str, Any] = asdict(spec) | {"agent": 0, "first_local": 0, "store": None}
        if self.head is None:
            self.agent = start_node(spec, plain, self.folder, self.log)
        else:
            with endpoint.listen(None if spec.nodes == 1 else self.head.host) as listener:
                descriptor, (own_host, port) = listener.fileno(), endpoint.local(listener)
                plain["store"] = own_host, port, descriptor
                self.agent = start_node(spec, plain, self.folder, self.log, (descriptor,))
            self.number = self.head.open(spec, self.folder, (self.head.host, port))
        self.pipe = os.open(self.folder / "jobs", os.O_RDWR | os.O_NONBLOCK)
        self.unsent = b""

    def pids(self) -> list[int]:
        return [state["pid"] for state in self.files.states() if state["pid"]]

    def ended(self) -> int | None:
        """The exit status of the first agent that ended; None while all are alive."""
        if self.head is not None:
            self.head.poll()
            others = self.head.ended(self.number)
            if others is not None:
                return others
        return self.agent.poll()

    def call(
        self,
        job: Job,
        arguments: dict[str, Any],
        timeout_s: float = 300.0,
        log: Path | None = None,
        progress: Progress | None = None,
    ) -> Outcome:
        """Call `job` on every rank with the `Rank` and the arguments. Returns the `Outcome`, with rank 0's return
        value (plain data), once all ranks have ended the job. `timeout_s`: how long a rank may be silent; at least ten times
        a phase's expected duration, where it has one. `log`: the file for the ranks' output of this job."""
        assert self.alive, "this world is gone"
        target, offsets = job_name(job), self.files.log_sizes()
        self.jobs += 1
        self.unsent = json.dumps({"job": self.jobs, "target": target, "arguments": arguments}).encode() + b"\n"
        try:
            outcome = self._await(timeout_s, progress)
        finally:
            if log is not None:
                with contextlib.suppress(OSError):
                    self.files.copy_logs(log, offsets)
        if outcome.world_lost or self.ended() is not None:
            self.close()
        return outcome

    def _await(self, timeout_s: float, progress: Progress | None) -> Outcome:
        # all processes of a machine share the monotonic clock, which nobody sets
        called = polled = time.monotonic()
        stopped, died = 0.0, None
        while True:
            self._send()
            ended = self.ended()
            joined = self.head.joined(self.number) if self.head else 1
            why_lost = Diagnosis(self.spec, self.files, self.jobs, joined)
            reply = self._read_reply()  # after `ended`: a reply may come just before the agent's end
            if reply is not None:
                return Outcome(reply["status"], reply.get("reason"), reply.get("result"))
            if ended is not None:
                return why_lost.ended(ended)
            before, polled = polled, time.monotonic()
            stopped += max(0.0, polled - before - STOPPED_S)
            now, states = polled - stopped, self.files.states()
            if progress is not None:
                progress(states)
            dead = next((state for state in states if state["pid"] and not lives(state["pid"])), None)
            if dead is not None:  # the agent will soon report how this rank ended
                died = died or now
                if now - died > AGENT_S:
                    return why_lost.died(dead, AGENT_S)
                continue
            late = silent(self.spec, self.jobs, states, called, now, timeout_s)
            if late is not None:
                if self.head is not None:
                    self.head.request_stacks(self.number)
                return why_lost.timed_out(late)

    def _send(self) -> None:
        """Write as much of the job as the pipe takes. A long job exceeds the pipe's capacity, and rank 0 may never read it."""
        if self.unsent:
            with contextlib.suppress(BlockingIOError):
                self.unsent = self.unsent[os.write(self.pipe, self.unsent) :]

    def _read_reply(self) -> dict[str, Any] | None:
        ready, _, _ = select.select([self.replies], [], [], POLL_S)
        if ready:
            with contextlib.suppress(BlockingIOError):
                self.buffer += os.read(self.replies, 1 << 20)
        while b"\n" in self.buffer:
            line, self.buffer = self.buffer.split(b"\n", 1)
            reply = json.loads(line)
            if reply["job"] == self.jobs:
                return reply
        return None

    def ask_to_stop(self) -> None:
        """Ask idle ranks to end by themselves. Does not wait, so several worlds can end at once."""
        if self.alive:
            with contextlib.suppress(OSError):
                os.write(self.pipe, b'{"job": 0, "target": "stop"}\n')

    def close(self) -> None:
        """End every process of this world and remove its folder. Safe to call twice."""
        if not self.alive:
            return
        pids = self.pids()
        try:
            self.ask_to_stop()
            states = self.files.states()  # starting ranks do not listen yet
            if len(states) == self.spec.world_size and all(state["phase"] == "idle" for state in states):
                self.agent.wait(STOP_S)
        except subprocess.TimeoutExpired:
            pass
        finally:  # even if Ctrl-C comes during the wait
            self.alive = False
            if self.head is not None:
                self.head.close(self.number)
            try:
                self._kill(pids)
            finally:
                self._tidy()

    def _tidy(self) -> None:
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.agent.wait(STOP_S)
        finally:
            for descriptor in (self.pipe, self.replies):
                os.close(descriptor)
            self.log.close()
            shutil.rmtree(self.folder, ignore_errors=True)
            os.close(self.owned)

    def _kill(self, pids: list[int]) -> None:
        # Spare multiprocessing's resource tracker, even one just started: it unlinks the others' semaphores, then ends.
        ranks = {pid for pid in pids if belongs(pid, self.folder)}
        deadline = time.monotonic() + STOP_S
        while group := set(process_group(self.agent.pid)) | ranks:
            for pid in group:
                with contextlib.suppress(OSError):
                    if not is_tracker(pid):
                        os.kill(pid, signal.SIGKILL)
            if time.monotonic() > deadline:
                break
            ranks = set()
            time.sleep(POLL_S)
        with contextlib.suppress(OSError):
            os.killpg(self.agent.pid, signal.SIGKILL)


def start_node(
    spec: WorldSpec, plain: dict[str, Any], folder: Path, log: IO[bytes], descriptors: tuple[int, ...] = ()
) -> subprocess.Popen[bytes]:
    """Start an agent (`runner.launch.node`). `plain`: the spec as plain data, with additions. The agent has its own session, so
    that Ctrl-C reaches only this process."""
    readable = {key: value for key, value in plain.items() if key != "env"}  # a command line, by every user
    command = [sys.executable, "-P", "-m", "runner.launch.node", str(folder), json.dumps(readable)]
    environment, null = node_environment(spec, folder), subprocess.DEVNULL
    return subprocess.Popen(
        command, stdin=null, stdout=log, stderr=log, env=environment, start_new_session=True, pass_fds=descriptors
    )


def node_environment(spec: WorldSpec, folder: Path) -> dict[str, str]:
    """The environment variables of an agent and its ranks."""
    environment = dict(os.environ)
    if spec.device == "cpu":
        environment["OMP_NUM_THREADS"] = str(max(1, cores() // -(-spec.world_size // spec.nodes)))
        environment["CUDA_VISIBLE_DEVICES"] = ""
    if spec.share_gpu:
        environment["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    if spec.nodes == 1:  # refuse connections from other machines
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
        environment.setdefault("NCCL_SOCKET_IFNAME", "=lo")
    environment |= dict(spec.env)
    environment["ATTENTION_LAUNCHER"] = str(os.getpid())
    environment["ATTENTION_WORLD"] = str(folder)  # marks the ranks as this world's
    environment.setdefault("PYTHONUNBUFFERED", "1")
    # symmetric memory of external packages; the library's own never uses multicast
    environment.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    # later worlds reuse what FlashAttention-4 compiled
    environment.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    environment["PYTHONPATH"] = search_path()
    return environment


def job_name(job: Job) -> str:
    """The name "module:function" by which each rank imports the job."""
    if isinstance(job, str):
        return job
    if "<" in job.__qualname__:  # <lambda>, <locals>
        raise ValueError(f"job={job.__qualname__}: ranks import a job by its name; make it a function of a module")
    return f"{job.__module__}:{job.__qualname__}"
