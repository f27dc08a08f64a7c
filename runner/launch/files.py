"""What the processes of a world write into its folder, as the program reads it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runner.config.values import redacted

TAIL_LINES = 20
STACKS_S = 3.0  # most that ranks get to write their stacks
STACK_S = 0.1  # a log that has not grown for so long holds the whole stack
EXCHANGES = (
    "torch/distributed/",
    "attention/transports/",
    "attention/agreement.py",
)  # files whose functions wait for other ranks
THREADS = ("/threading.py", "/concurrent/futures/")  # whose functions wait for other threads, as those of a transport
State = dict[str, Any]  # rank, pid, job, phase, since, expected_s, waiting, note, perhaps error


@dataclass(frozen=True)
class WorldSpec:
    """What makes a world: runs with the same spec can share one."""

    world_size: int
    device: str
    nodes: int = 1
    agents: int = 1  # processes that start an equal share of the ranks
    start_timeout_s: float = 300.0
    share_gpu: bool = False  # all ranks on the first GPU
    env: tuple[tuple[str, str], ...] = ()  # more environment variables of the ranks


@dataclass(frozen=True)
class Part:
    """The share of a world that one process starts."""

    spec: WorldSpec
    number: int = 0  # of the world, in a launch
    process: int = 0
    first_local: int = 0  # the number of its first rank on the node
    # host, port and prefix of the store where the world's ranks meet; None: in a file of the folder, where one process
    # starts all ranks, since any user of the machine can reach a port
    store: tuple[str, int, str] | None = None

    @property
    def ranks(self) -> range:
        count = self.spec.world_size // self.spec.agents
        return range(self.process * count, (self.process + 1) * count)

    @staticmethod
    def of(plain: dict[str, Any]) -> Part:
        """From JSON of its dict."""
        return Part(**plain | {"spec": WorldSpec(**plain["spec"])})


def write(path: Path, data: str | bytes) -> None:
    """Write a file so that a reader never sees a part of it. Raises OSError, and leaves nothing, when the disk is full."""
    scratch = path.with_name(f".{path.name}")
    try:
        scratch.write_bytes(data.encode() if isinstance(data, str) else data)
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)


@dataclass(frozen=True)
class WorldFiles:
    folder: Path
    ranks: range  # of the world

    def states(self) -> list[State]:
        """The state that each rank wrote last."""
        states = [self.json(f"rank{rank}.state") for rank in self.ranks]
        return [state for state in states if state is not None]

    def failures(self) -> list[dict[str, Any]]:
        """rank, exitcode and time of the ranks that failed, the first one first."""
        failures = [one for path in self.folder.glob("failures-*.json") for one in self.json(path.name) or ()]
        return sorted(failures, key=lambda one: one["time"])

    def joined(self) -> int:
        """How many processes have started an agent of this world."""
        return len(list(self.folder.glob("agent-*.log")))

    def json(self, name: str) -> Any:
        """What a file of the folder holds; None where there is none."""
        with contextlib.suppress(OSError, ValueError):
            return json.loads((self.folder / name).read_text())
        return None

    def _log(self, rank: int) -> bytes:
        with contextlib.suppress(OSError):
            return (self.folder / f"rank{rank}.log").read_bytes()
        return b""

    def log_sizes(self) -> dict[int, int]:
        return {rank: len(self._log(rank)) for rank in self.ranks}

    def lines(self, rank: int, offset: int = 0) -> list[str]:
        """The lines of a rank's log from a byte on."""
        return self._log(rank)[offset:].decode(errors="replace").splitlines()

    def agent_tail(self) -> list[str]:
        """The end of the agents' logs."""
        logs = [path.read_text(errors="replace") for path in sorted(self.folder.glob("agent-*.log"), reverse=True)]
        return "".join(logs).splitlines()[-TAIL_LINES:]

    def copy_logs(self, target: Path, offsets: dict[int, int]) -> None:
        """Append what each rank has logged since its offset, without secrets. Raises OSError."""
        with target.open("a") as out:
            for rank, offset in offsets.items():
                out.write(redacted("".join(f"[rank {rank}] {line}\n" for line in self.lines(rank, offset))))

    def request_stacks(self) -> None:
        """Make the ranks of this process write their stacks to their logs."""
        for state in self.states():
            if state["pid"]:  # else of another process
                with contextlib.suppress(OSError):
                    os.kill(state["pid"], signal.SIGUSR1)

    def await_stacks(self, poll: Callable[[], object]) -> None:
        """Request all ranks' stacks, and wait until they are in the logs here, which takes a while on a busy machine.
        `poll` takes in what other processes send."""
        before = sizes = self.log_sizes()
        self.request_stacks()
        ranks = [state["rank"] for state in self.states()]
        deadline, written = time.monotonic() + STACKS_S, False
        while not written and time.monotonic() < deadline:
            time.sleep(STACK_S)
            poll()
            sizes, last = self.log_sizes(), sizes
            written = sizes == last and all(_stack_in(self.lines(rank, before[rank])) is not None for rank in ranks)

    def stack(self, rank: int) -> list[str]:
        """Where a rank was when its stack was requested: innermost first, as faulthandler writes it."""
        lines = self.lines(rank)
        start = _stack_in(lines)
        return lines[-TAIL_LINES:] if start is None else lines[start:][:TAIL_LINES]

    def in_exchange(self, rank: int) -> bool:
        """Whether a rank was in a collective or a transfer, and so waited for others, when its stack was requested."""
        frames = (line for line in self.stack(rank) if line.startswith("  File "))
        innermost = next((line for line in frames if not any(part in line for part in THREADS)), "")
        return any(part in innermost for part in EXCHANGES)


def _stack_in(lines: list[str]) -> int | None:
    """The line of a log where the last stack of a rank's main thread begins."""
    return next((i for i in reversed(range(len(lines))) if lines[i].startswith("Current thread")), None)
