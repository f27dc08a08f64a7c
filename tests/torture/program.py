"""The program in a fork of a warm interpreter, in a folder of its own."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MARK = "TORTURE"  # an environment variable of everything that a trial starts
SHARED = Path("/dev/shm")
POLL_S = 0.02
LOOK_S = 0.5  # between two looks at the shared memory of a program's processes
_living: set[int] = set()  # the forks that nobody has waited for
mapped: set[Path] = set()  # files in SHARED that processes of trials were seen to map


@dataclass(frozen=True)
class Ended:
    """How a program ended. status: its exit status, minus a signal's number, or None for one that hung."""

    status: int | None
    out: str
    err: str
    cpu_s: float
    took_s: float

    def wrong(self, *statuses: int) -> list[str]:
        """What is wrong with it, where one of `statuses` was expected."""
        found = []
        if self.status is None:
            found.append(f"hung for {self.took_s:.0f} s")
        elif self.status not in statuses:
            found.append(f"ended with {self.status}: {last(self.err)}")
        if "Traceback" in self.err + self.out:
            found.append(f"a traceback: {last(self.err)}")
        return found


def last(text: str) -> str:
    """The last line of a text."""
    return next((line.strip()[:300] for line in reversed(text.splitlines()) if line.strip()), "no reason")


@dataclass(frozen=True)
class Running:
    pid: int
    out: Path
    err: Path
    started: float

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def wait(self, limit_s: float) -> Ended:
        """Wait for its end; one that takes longer than limit_s is killed."""
        deadline, hung, next_look = time.monotonic() + limit_s, False, 0.0
        while True:
            pid, status, used = os.wait4(self.pid, 0 if hung else os.WNOHANG)
            if pid:
                break
            now = time.monotonic()
            if now > next_look:
                look(self.out.parent)
                next_look = now + LOOK_S
            if hung := now > deadline:
                self.signal(signal.SIGKILL)
            time.sleep(POLL_S)
        _living.discard(self.pid)
        return Ended(
            None if hung else os.waitstatus_to_exitcode(status),
            self.out.read_text(errors="replace"),
            self.err.read_text(errors="replace"),
            used.ru_utime + used.ru_stime,
            time.monotonic() - self.started,
        )


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


def look(folder: Path) -> None:
    """Add the shared memory of the living processes of `folder` to `mapped`."""
    for pid in processes(folder):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines():
                if f" {SHARED}/" in line and not line.endswith(" (deleted)"):
                    mapped.add(Path(line[line.index(f"{SHARED}/") :]))


def warm() -> None:
    """Import what the programs need, so that a fork starts at once."""
    from hydra.core.plugins import Plugins

    from runner import app, compare, environment, pack  # noqa: F401
    from runner.config import overrides, resolve
    from runner.report import command  # noqa: F401

    with contextlib.suppress(ImportError):  # extra `report`
        import altair  # noqa: F401
        import jinja2  # noqa: F401
    resolve.register()
    Plugins.instance()
    environment.host()
    environment.gpu_count()
    overrides.check(["config=tiny", "seq_len=128"], False)


def start(folder: Path, main: Callable[[], Any], arguments: Sequence[str], file_limit: int | None = None) -> Running:
    """Start `main` with these arguments in a fork. folder: has its working folder, its temporary files and what it
    prints. file_limit: the most bytes that it may write into a file."""
    number = len(list(folder.glob("*.out")))
    out, err = folder / f"{number}.out", folder / f"{number}.err"
    for name in ("work", "tmp"):
        (folder / name).mkdir(exist_ok=True)
    sys.stdout.flush()
    started = time.monotonic()
    pid = os.fork()
    if pid == 0:
        status = 70
        try:
            _become(folder, out, err, file_limit)
            sys.argv = ["runner", *arguments]
            status = _status(main)
            sys.stdout.flush()
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    _living.add(pid)
    return Running(pid, out, err, started)


def kill_all() -> None:
    """End the programs that were started and not waited for."""
    while _living:
        pid = _living.pop()
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _become(folder: Path, out: Path, err: Path, file_limit: int | None) -> None:
    os.setsid()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    for path, descriptor in ((out, 1), (err, 2)):
        with path.open("wb") as file:
            os.dup2(file.fileno(), descriptor)
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    os.chdir(folder / "work")
    os.environ |= {MARK: str(folder), "TMPDIR": str(folder / "tmp"), "PYTHONDONTWRITEBYTECODE": "1"}
    tempfile.tempdir = None
    if file_limit is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit, file_limit))


def _status(main: Callable[[], Any]) -> int:
    try:
        return main() or 0
    except SystemExit as ended:  # as the interpreter takes it
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
            return 1
        return ended.code or 0
