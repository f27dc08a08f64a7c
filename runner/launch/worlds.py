"""Worlds: groups of rank processes that stay warm between runs. The program starts an agent (runner.launch.agent), which
forks the ranks. It sends jobs to rank 0 through a named pipe; all else that ranks tell are files of the world's folder.
Whatever happens to a rank comes back as an `Outcome`."""

from __future__ import annotations

import contextlib
import pickle
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from runner.launch.agent import POLL_S, Agent
from runner.launch.files import Part, State, WorldSpec, write
from runner.launch.outcome import Diagnosis, Outcome, silent
from runner.launch.parents import Head

STOPPED_S = 1.0  # beyond this, time between two polls is time in which this program was stopped, and its ranks with it
Progress = Callable[[list[State]], None]
Job = Callable[..., Any] | str  # a module's function, or "module:function" if this process must not import it


class World:
    """One living world. `call` runs a job in it; `close` ends every process of it."""

    def __init__(self, spec: WorldSpec, head: Head | None = None):
        self.spec = spec
        self.head = head if spec.agents > 1 else None
        self.part = self.head.part(spec) if self.head else Part(spec)
        self.agent = Agent(self.part)
        self.folder, self.files = self.agent.folder, self.agent.files
        if self.head is not None:
            self.head.start(self.part, self.folder)
        self.jobs = 0
        self.alive = True

    def ended(self) -> int | None:
        """The exit status of the first agent that ended; None while all are alive."""
        status = self.agent.process.poll()
        if self.head is not None and status is None:
            self.head.poll()
            status = 1 if self.files.failures() or self.files.json("left.json") else None
        return status

    def call(
        self,
        job: Job,
        arguments: dict[str, Any],
        timeout_s: float = 300.0,
        log: Path | None = None,
        progress: Progress | None = None,
    ) -> Outcome:
        """Call `job` on every rank with the `Rank` and the arguments. Returns the `Outcome`, with rank 0's return
        value, once all ranks have ended the job. `timeout_s`: how long a rank may be silent; at least ten times
        a phase's expected duration, where it has one. `log`: the file for the ranks' output of this job."""
        assert self.alive, "this world is gone"
        # the name by which each rank imports the job
        target = job if isinstance(job, str) else f"{job.__module__}:{job.__qualname__}"
        offsets = self.files.log_sizes()
        self.jobs += 1
        try:
            write(self.folder / "job", pickle.dumps((self.jobs, target, arguments)))
            self.agent.tell("job")
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
        why_lost = Diagnosis(self.spec, self.files, self.jobs)
        stopped = 0.0
        while True:
            ended = self.ended()
            with contextlib.suppress(FileNotFoundError):  # after `ended`: a reply may come just before the agent's end
                outcome: Outcome = pickle.loads((self.folder / f"reply{self.jobs}").read_bytes())
                return outcome
            if ended is not None:
                return why_lost.ended(ended)
            time.sleep(POLL_S)
            before, polled = polled, time.monotonic()
            stopped += max(0.0, polled - before - STOPPED_S)
            now, states = polled - stopped, self.files.states()
            if progress is not None:
                progress(states)
            late = silent(self.spec, self.jobs, states, called, now, timeout_s)
            if late is not None:
                if self.head is not None:
                    self.head.command(stacks=self.part.number)
                self.files.await_stacks(self.ended)
                return why_lost.timed_out(late)

    def ask_to_stop(self) -> None:
        """Ask idle ranks to end by themselves. Does not wait, so several worlds can end at once."""
        if self.alive:
            self.agent.tell("stop")

    def close(self) -> None:
        """End every process of this world and remove its folder. Safe to call twice."""
        if not self.alive:
            return
        self.ask_to_stop()
        self.alive = False
        try:
            if self.head is not None:
                self.head.stop(self.part)
        finally:
            self.agent.close()


class Pool:
    """Living worlds by what they are made of, the most recently used last."""

    def __init__(self, limit: int = 4):
        self.limit = limit
        self.head: Head | None = None  # to the other processes of a launched world
        self.worlds: dict[WorldSpec, World] = {}

    def get(self, spec: WorldSpec, fresh: bool = False) -> World:
        """A living world like `spec`, started if there is none."""
        world = self.worlds.pop(spec, None)
        if world is None or fresh or not world.alive or world.ended() is not None:
            if world is not None:
                world.close()
            while len(self.worlds) >= self.limit:
                self.worlds.pop(next(iter(self.worlds))).close()
            world = World(spec, self.head)
        self.worlds[spec] = world
        return world

    def call(self, spec: WorldSpec, job: Job, arguments: dict[str, Any], *awaited: Any, fresh: bool = False) -> Outcome:
        """`World.call` in a world like `spec`; awaited: its other arguments. Where that world had been lost before the job
        began, as when a rank died between two jobs, the job is called again in a new one."""
        for again in (False, True):
            try:
                world = self.get(spec, fresh and not again)
            except OSError as error:
                where = f"TMPDIR={tempfile.gettempdir()} ({error.strerror})"
                return Outcome("crash", f"no world could be started in {where}: free space there or set TMPDIR")
            outcome = world.call(job, arguments, *awaited)
            if outcome.begun or world.jobs == 1:
                break
        return outcome

    def close(self) -> None:
        for world in self.worlds.values():
            world.ask_to_stop()
        while self.worlds:
            self.worlds.popitem()[1].close()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
