"""Worlds: groups of rank processes that stay warm between runs. This side never imports torch: it starts an agent
process (runner.agent), which starts the ranks through torch.distributed's elastic launch, hands rank 0 one job after
another through a named pipe and reads the replies from a second one. Whatever happens to a rank comes back as an
`Outcome`."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

POLL_S = 0.02
STOP_S = 3.0
STACK_S = 0.1  # a log that does not grow for so long has the stack whole
PREFIX, OWNED = "attention-world-", "owned"  # a world's folder, and the file in it that its program holds locked
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
TAIL_LINES = 20
UNKNOWN = 255  # multiprocessing's exit code of a process whose fork server is gone
Progress = Callable[[list[dict[str, Any]]], None]


@dataclass(frozen=True)
class WorldSpec:
    """What makes a world: runs that agree on it can share one."""

    world_size: int
    device: str
    nodes: int = 1
    endpoint: str | None = None
    start_timeout_s: float = 300.0


@dataclass
class Outcome:
    """How a job ended: ok, invalid, unsupported (the world lives on), or oom, timeout, crash (it does not)."""

    status: str
    reason: str | None = None
    result: Any = None
    rank: int | None = None
    phase: str | None = None
    log_tail: list[str] = field(default_factory=list)

    @property
    def world_lost(self) -> bool:
        return self.status in ("oom", "timeout", "crash")


class _Silence(NamedTuple):
    rank: int
    phase: str
    limit_s: float
    key: str  # of launch, that sets this limit


class World:
    """One living world. `call` runs a job in it; `close` ends every process of it."""

    def __init__(self, spec: WorldSpec):
        self.spec = spec
        remove_abandoned()
        self.folder, self.owned = _own_folder()
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
        # both ends are opened for reading and writing so that neither side's opening waits for the other's
        self.replies = os.open(self.folder / "replies", os.O_RDWR | os.O_NONBLOCK)
        self.buffer = b""
        environment = dict(os.environ)
        if spec.device == "cpu":
            environment["OMP_NUM_THREADS"] = str(max(1, cores() // spec.world_size))
            environment["CUDA_VISIBLE_DEVICES"] = ""
        environment["ATTENTION_LAUNCHER"] = str(os.getpid())
        environment["ATTENTION_WORLD"] = str(self.folder)  # marks the ranks as this world's
        environment.setdefault("PYTHONUNBUFFERED", "1")
        # what FlashAttention-4 compiled serves later worlds too
        environment.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
        environment["PYTHONPATH"] = os.pathsep.join([os.getcwd(), *filter(None, [environment.get("PYTHONPATH")])])
        self.log = (self.folder / "agent.log").open("wb")
        self.agent = subprocess.Popen(
            [sys.executable, "-m", "runner.agent", str(self.folder), json.dumps(asdict(spec))],
            stdin=subprocess.DEVNULL,
            stdout=self.log,
            stderr=self.log,
            env=environment,
            start_new_session=True,  # Ctrl-C is ours to handle
        )
        self.pipe = os.open(self.folder / "jobs", os.O_RDWR)

    def states(self) -> list[dict[str, Any]]:
        """What each rank last said it was doing: rank, pid, job, phase, since, expected_s, note."""
        found = []
        for rank in range(self.spec.world_size):
            try:
                found.append(json.loads((self.folder / f"rank{rank}.state").read_text()))
            except (OSError, ValueError):
                continue
        return found

    def pids(self) -> list[int]:
        return [state["pid"] for state in self.states()]

    def call(
        self,
        target: str,
        arguments: dict[str, Any],
        timeout_s: float = 300.0,
        log: Path | None = None,
        progress: Progress | None = None,
    ) -> Outcome:
        """Run `target` ("module:function", called with the rank and the arguments) on every rank; rank 0's return
        value, which must be plain data, comes back. `timeout_s` is the longest silence of a rank; a rank that says how
        long its next stretch should take is given ten times that. `log`: where the ranks' output of this job goes."""
        assert self.alive, "this world is gone"
        self.jobs += 1
        offsets = self._log_sizes()
        os.write(self.pipe, json.dumps({"job": self.jobs, "target": target, "arguments": arguments}).encode() + b"\n")
        try:
            outcome = self._await(timeout_s, progress)
        finally:
            if log is not None:
                with contextlib.suppress(OSError):
                    self._copy_logs(log, offsets)
        if outcome.world_lost:
            self.close()
        return outcome

    def _await(self, timeout_s: float, progress: Progress | None) -> Outcome:
        started = time.time()
        while True:
            reply = self._read_reply()
            if reply is not None:
                return Outcome(reply["status"], reply.get("reason"), reply.get("result"))
            if self.agent.poll() is not None:
                reply = self._read_reply()  # one last look: the reply may have come just before the end
                return Outcome(reply["status"], reply.get("reason"), reply.get("result")) if reply else self._lost()
            states = self.states()
            if progress is not None:
                progress(states)
            silent = self._silent(states, started, timeout_s)
            if silent is not None:
                return self._timed_out(silent)

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

    def _silent(self, states: list[dict[str, Any]], started: float, timeout_s: float) -> _Silence | None:
        """The rank that has been silent longest, when that is too long."""
        now = time.time()
        here = {state["rank"]: state for state in states if state["job"] == self.jobs}
        first = (self.spec.start_timeout_s, "start_timeout_s")  # a rank's first job imports what it needs
        if not here:
            limit, key = first if self.jobs == 1 else (timeout_s, "timeout_s")
            return _Silence(0, "start", limit, key) if now - started > limit else None
        late = []
        for rank in range(self.spec.world_size):
            state = here.get(rank)
            since = state["since"] if state else started
            limit, key = max(timeout_s, 10 * state["expected_s"]) if state else timeout_s, "timeout_s"
            if self.jobs == 1 and (state is None or state["phase"] == "start"):
                limit, key = first
            if now - since > limit:
                late.append((since, _Silence(rank, state["phase"] if state else "start", limit, key)))
        return min(late)[1] if late else None

    def _timed_out(self, silence: _Silence) -> Outcome:
        stopped = next((state for state in self.states() if _is_stopped(state["pid"])), None)
        if stopped is not None:  # for which the others waited
            rank, phase = stopped["rank"], stopped["phase"]
            reason = f"rank {rank} was found stopped (as by SIGSTOP) in phase {phase} after {silence.limit_s:.0f} s of silence"
            return Outcome("timeout", reason, None, rank, phase, self._tail(rank))
        self._log_stacks()
        return Outcome(
            "timeout",
            f"rank {silence.rank} was silent for more than {silence.limit_s:.0f} s in phase {silence.phase}; "
            f"its stack is in run.log; launch.{silence.key}=N allows more",
            rank=silence.rank,
            phase=silence.phase,
            log_tail=self._stack(silence.rank),
        )

    def _lost(self) -> Outcome:
        """The agent ended: find the rank that was first to fail."""
        try:
            failures = json.loads((self.folder / "failures.json").read_text())
        except (OSError, ValueError):
            tail = (self.folder / "agent.log").read_text(errors="replace").splitlines()[-TAIL_LINES:]
            return Outcome("crash", f"the world ended: {tail[-1] if tail else 'no output'}", log_tail=tail)
        states = {state["rank"]: state for state in self.states()}
        told = {rank: state["error"] for rank, state in states.items() if state.get("error")}
        killed = [f for f in failures if f["exitcode"] < 0 and f["rank"] not in told]
        oom = [rank for rank, error in told.items() if error["kind"] == "oom"]
        if killed:
            first = min(killed, key=lambda f: f["time"])
            rank = first["rank"]
            name = signal.Signals(-first["exitcode"]).name
            hint = "; the kernel's out-of-memory killer does that too" if name == "SIGKILL" else ""
            phase = states.get(rank, {}).get("phase")
            return Outcome("crash", f"rank {rank} was killed by {name} in phase {phase}{hint}", None, rank, phase,
                           self._tail(rank))  # fmt: skip
        if told:
            rank = min(oom or told, key=lambda r: told[r]["time"])
            phase, error = states[rank]["phase"], told[rank]
            status = "oom" if error["kind"] == "oom" else "crash"
            return Outcome(status, f"rank {rank} in phase {phase}: {error['message']}", None, rank, phase,
                           self._tail(rank))  # fmt: skip
        first = failures[0]
        rank = first["rank"]
        phase = states.get(rank, {}).get("phase", "start")
        if first["exitcode"] == UNKNOWN:
            reason = f"the process that the ranks were forked off was killed in phase {phase}"
            hint = f"the kernel's out-of-memory killer does that (or rank {rank} ended with exit code {UNKNOWN})"
            return Outcome("crash", f"{reason}; {hint}", None, None, phase)
        reason = f"rank {rank} ended with exit code {first['exitcode']} in phase {phase}"
        return Outcome("crash", reason, None, rank, phase, self._tail(rank))

    def _log_sizes(self) -> dict[int, int]:
        sizes = {}
        for rank in range(self.spec.world_size):
            path = self.folder / f"rank{rank}.log"
            sizes[rank] = path.stat().st_size if path.exists() else 0
        return sizes

    def _log_stacks(self) -> None:
        """Have each rank write its stack to its log, and wait until it is there: on a busy machine that takes a while."""
        before = sizes = self._log_sizes()
        asked = set()
        for state in self.states():
            with contextlib.suppress(OSError):
                os.kill(state["pid"], signal.SIGUSR1)
                asked.add(state["rank"])
        deadline = time.monotonic() + STOP_S
        while time.monotonic() < deadline:
            time.sleep(STACK_S)
            now = self._log_sizes()
            asked -= {r for r in asked if now[r] == sizes[r] and _stack_in(self._said(r, before[r])) is not None}
            if not asked:
                return
            sizes = now

    def _copy_logs(self, target: Path, offsets: dict[int, int]) -> None:
        with target.open("a") as out:
            for rank, offset in offsets.items():
                for line in self._said(rank, offset):
                    out.write(f"[rank {rank}] {line}\n")

    def _said(self, rank: int, offset: int = 0) -> list[str]:
        """The lines of a rank's log from a byte on."""
        try:
            with (self.folder / f"rank{rank}.log").open("rb") as file:
                file.seek(offset)
                return file.read().decode(errors="replace").splitlines()
        except FileNotFoundError:
            return []

    def _tail(self, rank: int) -> list[str]:
        return self._said(rank)[-TAIL_LINES:]

    def _stack(self, rank: int) -> list[str]:
        """Where a rank was when it was asked for its stack: innermost first, as faulthandler writes it."""
        lines = self._said(rank)
        start = _stack_in(lines)
        return lines[-TAIL_LINES:] if start is None else lines[start:][:TAIL_LINES]

    def ask_to_stop(self) -> None:
        """Idle ranks end by themselves; several worlds can do so at once."""
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
            if self._idle():
                self.agent.wait(STOP_S)
        except subprocess.TimeoutExpired:
            pass
        finally:  # also when Ctrl-C comes in here, or in there
            self.alive = False
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

    def _idle(self) -> bool:
        """Whether every rank of this node waits for a job; those that are starting do not listen yet."""
        states = self.states()
        return len(states) == self.spec.world_size // self.spec.nodes and all(s["phase"] == "idle" for s in states)

    def _kill(self, pids: list[int]) -> None:
        # multiprocessing's tracker ends by itself once the others have, and unlinks their semaphores: not before
        trackers = [pid for pid in _group(self.agent.pid) if _is_tracker(pid)]
        for pid in {*_group(self.agent.pid), *(pid for pid in pids if _belongs(pid, self.folder))} - set(trackers):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + STOP_S
        while set(trackers) & set(_group(self.agent.pid)) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        with contextlib.suppress(OSError):
            os.killpg(self.agent.pid, signal.SIGKILL)


def _own_folder() -> tuple[Path, int]:
    """A new folder of a world, and the descriptor that holds its lock as long as this program lives."""
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    owned = os.open(folder / "locking", os.O_RDWR | os.O_CREAT, 0o600)
    with contextlib.suppress(OSError):  # a file system without locks: if this program is killed, the folder stays
        fcntl.flock(owned, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(owned, BOOT_ID.read_bytes())
        (folder / "locking").rename(folder / OWNED)  # who sees it under this name finds it locked
    return folder, owned


def remove_abandoned() -> None:
    """Remove the folders of worlds whose program did not live to do so: a SIGKILL leaves them. The kernel drops a program's
    locks when it ends, which tells those folders from the ones of the living, whatever their process ids; those that
    another kernel locked, on a shared file system, are left alone."""
    for lock in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/{OWNED}"):
        with contextlib.suppress(OSError):  # locked, another user's, or gone meanwhile
            descriptor = os.open(lock, os.O_RDWR)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.read(descriptor, 100) == BOOT_ID.read_bytes():
                    shutil.rmtree(lock.parent, ignore_errors=True)
            finally:
                os.close(descriptor)


def _stack_in(lines: list[str]) -> int | None:
    """Which line of a log the last stack of a rank's main thread begins with."""
    return next((i for i in reversed(range(len(lines))) if lines[i].startswith("Current thread")), None)


def _group(leader: int) -> list[int]:
    """The living processes of a process group."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, group = stat.read_text().rpartition(")")[2].split()[:3]
            if int(group) == leader and state != "Z":
                found.append(int(stat.parent.name))
    return found


def _is_tracker(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def _belongs(pid: int, folder: Path) -> bool:
    """Whether a process is still one of this world's ranks and not a later one with its number."""
    with contextlib.suppress(OSError):
        return str(folder).encode() in Path(f"/proc/{pid}/environ").read_bytes()
    return False


def _is_stopped(pid: int) -> bool:
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    return False


def cores() -> int:
    """The CPU cores that this process may use."""
    return len(os.sched_getaffinity(0))


class Pool:
    """Living worlds by what they are made of, the most recently used last."""

    def __init__(self, limit: int = 4):
        self.limit = limit
        self.worlds: dict[WorldSpec, World] = {}

    def get(self, spec: WorldSpec, fresh: bool = False) -> World:
        """A living world like `spec`, started if there is none."""
        world = self.worlds.pop(spec, None)
        if world is not None and (fresh or not world.alive or world.agent.poll() is not None):
            world.close()
            world = None
        if world is None:
            while len(self.worlds) >= self.limit:
                self.worlds.pop(next(iter(self.worlds))).close()
            world = World(spec)
        self.worlds[spec] = world
        return world

    def close(self) -> None:
        for world in self.worlds.values():
            world.ask_to_stop()
        while self.worlds:
            self.worlds.popitem()[1].close()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
