"""Worlds: groups of rank processes that stay warm between runs. This side never imports torch: it starts an agent
process (runner.launch.node), which starts the ranks through torch.distributed's elastic launch, hands rank 0 one job after
another through a named pipe and reads the replies from a second one. Whatever happens to a rank comes back as an
`Outcome`."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import resource
import select
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from runner import ROOT

POLL_S = 0.02
STOP_S = 3.0
STACK_S = 0.1  # a log that does not grow for so long has the stack whole
AGENT_S = 10.0  # that an agent gets to report how a dead rank ended
AGENT_FILES, RANK_FILES = 40, 4  # open files that an agent needs, and a rank more for each rank of its world
PREFIX, OWNED = "attention-world-", "owned"  # a world's folder, and the file in it that its program holds locked
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
TAIL_LINES = 20
UNKNOWN = 255  # multiprocessing's exit code of a process whose fork server is gone
Progress = Callable[[list[dict[str, Any]]], None]
Job = (
    Callable[..., Any] | str
)  # a module's function; or "module:function", where this process must not import the module


@dataclass(frozen=True)
class WorldSpec:
    """What makes a world: runs that agree on it can share one."""

    world_size: int
    device: str
    nodes: int = 1
    endpoint: str | None = None
    start_timeout_s: float = 300.0
    share_gpu: bool = False  # all ranks on the first GPU
    env: tuple[tuple[str, str], ...] = ()  # more variables of the ranks' environment on this node, and their values


@dataclass
class Outcome:
    """How a job ended: ok, invalid, unsupported (the world lives on), or oom, timeout, crash (it does not)."""

    status: str
    reason: str | None = None
    result: Any = None
    rank: int | None = None
    phase: str | None = None
    log_tail: list[str] = field(default_factory=list)
    begun: bool = True  # False: what failed had not begun this job, so this is no outcome of it

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
        self.folder, self.owned = own_folder()
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
        self.log = (self.folder / "agent.log").open("wb")
        self.agent = subprocess.Popen(
            [sys.executable, "-P", "-m", "runner.launch.node", str(self.folder), json.dumps(asdict(spec))],
            stdin=subprocess.DEVNULL,
            stdout=self.log,
            stderr=self.log,
            env=node_environment(spec, self.folder),
            start_new_session=True,  # Ctrl-C is ours to handle
        )
        self.pipe = os.open(self.folder / "jobs", os.O_RDWR | os.O_NONBLOCK)
        self.unsent = b""

    @property
    def local_ranks(self) -> range:
        """The ranks of this node, whose states can be read here."""
        return range(self.spec.world_size // self.spec.nodes)

    def states(self) -> list[dict[str, Any]]:
        """What each rank last said it was doing: rank, pid, job, phase, since, expected_s, waiting, note."""
        found = []
        for rank in self.local_ranks:
            try:
                found.append(json.loads((self.folder / f"rank{rank}.state").read_text()))
            except (OSError, ValueError):
                continue
        return found

    def pids(self) -> list[int]:
        return [state["pid"] for state in self.states()]

    def call(
        self,
        job: Job,
        arguments: dict[str, Any],
        timeout_s: float = 300.0,
        log: Path | None = None,
        progress: Progress | None = None,
    ) -> Outcome:
        """Run `job` on every rank, called with the rank and the arguments. Rank 0's return value, which must be plain data,
        comes back once all ranks have ended the job. `timeout_s` is the longest silence of a rank; a rank that says how
        long its next stretch should take is given ten times that. `log`: where the ranks' output of this job goes."""
        assert self.alive, "this world is gone"
        target = job_name(job)
        self.jobs += 1
        offsets = self._log_sizes()
        self.unsent = json.dumps({"job": self.jobs, "target": target, "arguments": arguments}).encode() + b"\n"
        try:
            outcome = self._await(timeout_s, progress)
        finally:
            if log is not None:
                with contextlib.suppress(OSError):
                    self._copy_logs(log, offsets)
        if outcome.world_lost or self.agent.poll() is not None:  # where the nodes could not meet, say
            self.close()
        return outcome

    def _await(self, timeout_s: float, progress: Progress | None) -> Outcome:
        started, died = time.time(), None
        while True:
            self._send()
            reply = self._read_reply()
            if reply is not None:
                return Outcome(reply["status"], reply.get("reason"), reply.get("result"))
            if self.agent.poll() is not None:
                reply = self._read_reply()  # one last look: the reply may have come just before the end
                return Outcome(reply["status"], reply.get("reason"), reply.get("result")) if reply else self._lost()
            states = self.states()
            if progress is not None:
                progress(states)
            dead = next((state for state in states if not _lives(state["pid"])), None)
            if dead is not None:  # which its agent will soon say, with how it ended
                died = died or time.monotonic()
                if time.monotonic() - died > AGENT_S:
                    return self._died(dead)
                continue
            silent = self._silent(states, started, timeout_s)
            if silent is not None:
                return self._timed_out(silent)

    def _send(self) -> None:
        """As much of the job as the pipe takes: a long one is more than it holds, and rank 0 may never read it."""
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

    def _silent(self, states: list[dict[str, Any]], started: float, timeout_s: float) -> _Silence | None:
        """The rank that has been silent for too long, the longest where there are several. A rank that waits for others
        is late only when all wait, and none of them said anything meanwhile."""
        now = time.time()
        here = {state["rank"]: state for state in states if state["job"] == self.jobs}
        first = (self.spec.start_timeout_s, "start_timeout_s")  # a rank's first job imports what it needs
        usual = (timeout_s, "timeout_s")
        late = []
        for rank in self.local_ranks:
            state = here.get(rank)
            if state is None:
                since, phase, (limit, key) = started, "start", first if self.jobs == 1 else usual
            elif state["waiting"]:
                continue
            else:
                since, phase = state["since"], state["phase"]
                limit, key = max(timeout_s, 10 * state["expected_s"]), "timeout_s"
                if self.jobs == 1 and phase == "start":
                    limit, key = first
            if now - since > limit:
                late.append((since, _Silence(rank, phase, limit, key)))
        if late:
            return min(late)[1]
        all_wait = len(here) == len(self.local_ranks) and all(state["waiting"] for state in here.values())
        if all_wait and now - max(state["since"] for state in here.values()) > timeout_s:
            state = min(here.values(), key=lambda s: (s["phase"] == "end", s["since"]))
            return _Silence(state["rank"], state["phase"], *usual)
        return None

    def _begun(self, rank: int | None) -> bool:
        """Whether a rank, or any where it is not known which, has begun the job that was called last."""
        return any(state["job"] == self.jobs for state in self.states() if rank in (None, state["rank"]))

    def _failed(self, status: str, reason: str, rank: int | None, phase: str | None, log_tail: list[str]) -> Outcome:
        """The outcome of a world that is lost: whose job it was, and whether the disk under it is full."""
        return Outcome(status, reason + self._no_room(), None, rank, phase, log_tail, self._begun(rank))

    def _no_room(self) -> str:
        """A full disk takes the logs and states of the ranks, and with them any other reason."""
        try:
            (self.folder / "room").write_bytes(bytes(1 << 14))
        except OSError as error:
            return f"; {self.folder.parent} cannot be written ({error.strerror}): free space there or set TMPDIR"
        return ""

    def _timed_out(self, silence: _Silence) -> Outcome:
        stopped = next((state for state in self.states() if _is_stopped(state["pid"])), None)
        if stopped is not None:  # for which the others waited
            rank, phase = stopped["rank"], stopped["phase"]
            reason = f"rank {rank} was found stopped (as by SIGSTOP) in phase {phase} after {silence.limit_s:.0f} s of silence"
            return self._failed("timeout", reason, rank, phase, self._tail(rank))
        allows = f"launch.{silence.key}=N allows more"
        if not self.states():
            tail = self._agent_said()
            if (joined := self._joined()) < self.spec.nodes:
                endpoint = str(self.spec.endpoint)
                reason = (
                    f"{joined} of {self.spec.nodes} nodes had joined after {silence.limit_s:.0f} s: run `python -m runner.agent "
                    f"{endpoint}` on each of the others, where {endpoint.rpartition(':')[0]} must be an address of the program's "
                    f"node; {allows}"
                )
                return self._failed("timeout", reason, None, "start", tail)
            reason = f"no rank had started after {silence.limit_s:.0f} s{f' ({tail[-1]})' if tail else ''}; {allows}"
            return self._failed("timeout", reason, None, "start", tail)
        self._log_stacks()
        reason = (
            f"rank {silence.rank} was silent for more than {silence.limit_s:.0f} s in phase {silence.phase}; "
            f"its stack is in run.log; {allows}"
        )
        return self._failed("timeout", reason, silence.rank, silence.phase, self._stack(silence.rank))

    def _died(self, state: dict[str, Any]) -> Outcome:
        """A rank is dead, and its agent has not said how it ended."""
        rank, phase, error = state["rank"], state["phase"], state.get("error")
        if error:
            status = "oom" if error["kind"] == "oom" else "crash"
            return self._failed(
                status, f"rank {rank} in phase {phase}: {error['message']}", rank, phase, self._tail(rank)
            )
        reason = f"rank {rank} died in phase {phase}; its agent did not report how within {AGENT_S:.0f} s"
        return self._failed("crash", reason, rank, phase, self._tail(rank))

    def _joined(self) -> int:
        """How many nodes have joined this world, the program's included."""
        if self.spec.nodes > 1:
            with contextlib.suppress(OSError, ValueError):
                return int((self.folder / "joined").read_text())
        return 1

    def _agent_said(self) -> list[str]:
        """The end of the agent's log."""
        with contextlib.suppress(OSError):
            return (self.folder / "agent.log").read_text(errors="replace").splitlines()[-TAIL_LINES:]
        return []

    def _agent_ended(self) -> Outcome:
        """The agent ended without a word about its ranks."""
        tail, status = self._agent_said(), self.agent.returncode
        with contextlib.suppress(OSError, ValueError):
            end = json.loads((self.folder / "end.json").read_text())
            return self._failed(end["status"], end["reason"], None, "start", [])
        if status < 0:
            name = signal.Signals(-status).name
            reason = f"the agent that had started the ranks was killed by {name}{_oom_hint(name)}"
        else:
            said = tail[-1] if tail else f"its agent ended with exit code {status} and no output"
            reason = f"the world ended: {said}"
        return self._failed("crash", reason, None, None, tail)

    def _lost(self) -> Outcome:
        """The agent ended: find the rank that was first to fail."""
        try:
            failures = json.loads((self.folder / "failures.json").read_text())
        except (OSError, ValueError):
            return self._agent_ended()
        states = {state["rank"]: state for state in self.states()}
        told = {rank: state["error"] for rank, state in states.items() if state.get("error")}
        killed = [f for f in failures if f["exitcode"] < 0 and f["rank"] not in told]
        oom = [rank for rank, error in told.items() if error["kind"] == "oom"]
        if killed:
            first = min(killed, key=lambda f: f["time"])
            rank = first["rank"]
            name = signal.Signals(-first["exitcode"]).name
            phase = states.get(rank, {}).get("phase")
            reason = f"rank {rank} was killed by {name} in phase {phase}{_oom_hint(name)}"
            return self._failed("crash", reason, rank, phase, self._tail(rank))
        if told:
            rank = min(oom or told, key=lambda r: told[r]["time"])
            phase, error = states[rank]["phase"], told[rank]
            status = "oom" if error["kind"] == "oom" else "crash"
            return self._failed(
                status, f"rank {rank} in phase {phase}: {error['message']}", rank, phase, self._tail(rank)
            )
        first = failures[0]
        rank = first["rank"]
        phase = states.get(rank, {}).get("phase", "start")
        if first["exitcode"] == UNKNOWN:
            reason = f"the process that the ranks were forked off was killed in phase {phase}"
            hint = f"the kernel's out-of-memory killer does that (or rank {rank} ended with exit code {UNKNOWN})"
            return self._failed("crash", f"{reason}; {hint}", None, phase, [])
        reason = f"rank {rank} ended with exit code {first['exitcode']} in phase {phase}"
        return self._failed("crash", reason, rank, phase, self._tail(rank))

    def _log_sizes(self) -> dict[int, int]:
        sizes = {}
        for rank in self.local_ranks:
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
        return len(states) == len(self.local_ranks) and all(s["phase"] == "idle" for s in states)

    def _kill(self, pids: list[int]) -> None:
        # multiprocessing's tracker ends by itself once the others have, and unlinks their semaphores: not before
        trackers = [pid for pid in process_group(self.agent.pid) if _is_tracker(pid)]
        for pid in {*process_group(self.agent.pid), *(pid for pid in pids if _belongs(pid, self.folder))} - set(
            trackers
        ):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + STOP_S
        while set(trackers) & set(process_group(self.agent.pid)) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        with contextlib.suppress(OSError):
            os.killpg(self.agent.pid, signal.SIGKILL)


def node_environment(spec: WorldSpec, folder: Path) -> dict[str, str]:
    """What the ranks of a node inherit."""
    environment = dict(os.environ)
    if spec.device == "cpu":
        environment["OMP_NUM_THREADS"] = str(max(1, cores() // (spec.world_size // spec.nodes)))
        environment["CUDA_VISIBLE_DEVICES"] = ""
    if spec.share_gpu:
        environment["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    if spec.nodes == 1:  # nobody beyond this machine has anything to connect to
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
        environment.setdefault("NCCL_SOCKET_IFNAME", "=lo")
    environment |= dict(spec.env)
    environment["ATTENTION_LAUNCHER"] = str(os.getpid())
    environment["ATTENTION_WORLD"] = str(folder)  # marks the ranks as this world's
    environment.setdefault("PYTHONUNBUFFERED", "1")
    # what FlashAttention-4 compiled serves later worlds too
    environment.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    environment["PYTHONPATH"] = search_path()
    return environment


def own_folder() -> tuple[Path, int]:
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
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError), _opened_lock(folder) as descriptor:  # locked, or gone meanwhile
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.read(descriptor, 100) == BOOT_ID.read_bytes():
                shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _opened_lock(folder: Path) -> Iterator[int]:
    """The descriptor of a world's lock. Anyone may put anything into a shared folder for temporary files: what is not this
    user's own folder with a regular file in it, without symbolic links, raises OSError, and nothing is waited for."""
    flags = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # opening a pipe waits for its other end
    with contextlib.ExitStack() as opened:
        here = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | flags)
        opened.callback(os.close, here)
        lock = os.open(OWNED, os.O_RDWR | flags, dir_fd=here)
        opened.callback(os.close, lock)
        if not stat.S_ISREG(os.fstat(lock).st_mode) or {os.fstat(x).st_uid for x in (here, lock)} != {os.geteuid()}:
            raise PermissionError(errno.EPERM, "not a world's folder of this user", str(folder))
        yield lock


def _stack_in(lines: list[str]) -> int | None:
    """Which line of a log the last stack of a rank's main thread begins with."""
    return next((i for i in reversed(range(len(lines))) if lines[i].startswith("Current thread")), None)


def process_group(leader: int) -> list[int]:
    """The living processes of a process group."""
    found = []
    for process in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, group = process.read_text().rpartition(")")[2].split()[:3]
            if int(group) == leader and state != "Z":
                found.append(int(process.parent.name))
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


def _process_state(pid: int) -> str | None:
    """The kernel's letter for the state of a process; None where there is none."""
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return None


def _is_stopped(pid: int) -> bool:
    return _process_state(pid) == "T"


def _lives(pid: int) -> bool:
    return _process_state(pid) not in (None, "Z", "X")


def _oom_hint(signal_name: str) -> str:
    return "; the kernel's out-of-memory killer does that too" if signal_name == "SIGKILL" else ""


def _too_few_files(spec: WorldSpec) -> str | None:
    """Why this process may open too few files for a world; its own limit is raised first, where it may be."""
    needed = AGENT_FILES + RANK_FILES * spec.world_size
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if resource.RLIM_INFINITY in (soft, hard) or soft >= needed:
        return None
    if hard >= needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
        return None
    return f"ulimit -n is {hard}: {spec.world_size} ranks need {needed} open files; raise it with ulimit -n {needed}"


def search_path() -> str:
    """PYTHONPATH of a process of ours, for `python -P`: this program's packages, then the working folder with what a user has
    there, whatever its files are called, then what was searched before."""
    return os.pathsep.join([ROOT, os.getcwd(), *filter(None, [os.environ.get("PYTHONPATH")])])


def cores() -> int:
    """The CPU cores that this process may use."""
    return len(os.sched_getaffinity(0))


def job_name(job: Job) -> str:
    """The name "module:function" by which each rank imports the job."""
    if isinstance(job, str):
        return job
    if "<" in job.__qualname__:  # <lambda>, <locals>
        raise ValueError(f"job={job.__qualname__}: ranks import a job by its name; make it a function of a module")
    return f"{job.__module__}:{job.__qualname__}"


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

    def call(
        self,
        spec: WorldSpec,
        job: Job,
        arguments: dict[str, Any],
        timeout_s: float = 300.0,
        log: Path | None = None,
        progress: Progress | None = None,
        fresh: bool = False,
    ) -> Outcome:
        """`World.call` in a world like `spec`. Where that world had been lost before the job began, as when a rank died
        between two jobs, the job is called again in a new one."""
        few = _too_few_files(spec)
        if few is not None:
            return Outcome("unsupported", few)
        for again in (False, True):
            try:
                world = self.get(spec, fresh and not again)
            except OSError as error:
                where = f"TMPDIR={tempfile.gettempdir()}"
                return Outcome(
                    "crash", f"no world could be started in {where} ({error.strerror}): free space there or set TMPDIR"
                )
            outcome = world.call(job, arguments, timeout_s, log, progress)
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
