"""The real program, started in a folder of its own, and what it leaves behind."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from runner.launch.agent import PREFIX
from runner.launch.processes import cores, is_tracker
from tests.support.paths import ROOT

MARK = "TORTURE"  # an environment variable of everything that a trial starts
GONE_S = 8.0  # within which everything must have ended


def slowed(seconds):
    """As long on a machine whose cores are shared."""
    return seconds * min(4.0, max(1.0, os.getloadavg()[0] / cores()))


@dataclass(frozen=True)
class Ended:
    """How a program ended. status: its exit status, minus a signal's number, or None for one that hung."""

    status: int | None
    out: str
    err: str
    cpu_s: float

    def wrong(self, *statuses):
        """What is wrong with it, where one of `statuses` was expected."""
        last = next((line[:300] for line in reversed(self.err.splitlines()) if line.strip()), "no reason")
        wrong = [] if self.status in statuses else [f"ended with {self.status}: {last}"]
        return wrong + [f"a traceback: {last}"] * ("Traceback" in self.err + self.out)


@dataclass(frozen=True)
class Running:
    process: subprocess.Popen[bytes]
    out: Path

    def wait(self, limit_s=240.0):
        """Wait for its end; one that takes longer is killed."""
        deadline, hung = time.monotonic() + slowed(limit_s), False
        while not (waited := os.wait4(self.process.pid, 0 if hung else os.WNOHANG))[0]:
            if hung := time.monotonic() > deadline:
                self.process.kill()
            time.sleep(0.02)
        _, status, used = waited
        self.process.returncode = os.waitstatus_to_exitcode(status)
        texts = (path.read_text(errors="replace") for path in (self.out, self.out.with_suffix(".err")))
        return Ended(None if hung else self.process.returncode, *texts, used.ru_utime + used.ru_stime)


def start(folder, command):
    """Start Python with these arguments. folder: has its working folder, its temporary files and what it prints."""
    for name in ("work", "tmp"):
        (folder / name).mkdir(exist_ok=True)
    out = folder / f"{len(list(folder.glob('*.out')))}.out"
    variables = {MARK: str(folder), "TMPDIR": str(folder / "tmp"), "PYTHONPATH": str(ROOT)}

    with out.open("wb") as stdout, out.with_suffix(".err").open("wb") as stderr:
        process = subprocess.Popen(
            [sys.executable, *command], cwd=folder / "work", env=os.environ | variables, stdout=stdout, stderr=stderr,
            start_new_session=True,
        )  # fmt: skip
    return Running(process, out)


def processes(folder):
    """The living processes that were started in `folder`, by the environment that they inherit."""
    pids = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if f"{MARK}={folder}".encode() in path.read_bytes().split(b"\0"):
                pids.append(int(path.parent.name))
    return pids


def left(folder):
    """What is still there after GONE_S. Processes that are left are killed; trackers, which unlink the others' semaphores, end by
    themselves."""
    deadline = time.monotonic() + GONE_S
    while (pids := processes(folder)) and time.monotonic() < deadline:
        time.sleep(0.1)
    for pid in pids:
        with contextlib.suppress(OSError):
            if not is_tracker(pid):
                os.kill(pid, signal.SIGKILL)
    worlds = list((folder / "tmp").glob(f"{PREFIX}*"))
    return [f"left behind: {pids} {worlds}"] if pids or worlds else []
