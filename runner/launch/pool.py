"""Living worlds, kept for later runs."""

from __future__ import annotations

import tempfile
from typing import Any

from runner.launch.files import WorldSpec
from runner.launch.outcome import Outcome
from runner.launch.parents import Head
from runner.launch.worlds import Job, World


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
