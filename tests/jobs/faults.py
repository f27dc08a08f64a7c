"""Jobs for tests of the launcher: what ranks report, and what can happen to them."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

from runner.config.values import UnsupportedHere
from runner.launch.rank import Rank, memory_limit


def echo(me: Rank, value: Any) -> list[Any]:
    return me.gather(value)


def pids(me: Rank) -> list[int]:
    return me.gather(os.getpid())


def parents(me: Rank) -> list[int]:
    return me.gather(os.getppid())


def starts_a_process(me: Rank, how: str) -> list[int | None]:
    process = multiprocessing.get_context(how).Process(target=sys.exit, args=(7,))
    process.start()
    process.join(20)
    code = process.exitcode
    process.kill()
    return me.gather(code)


def exits_when_told(me: Rank, rank: int, pipe: str) -> None:
    """After the job one rank ends with a plain exit code, once somebody has written to the pipe."""

    def wait() -> None:
        Path(pipe).read_text()
        os._exit(3)

    if me.rank == rank:
        threading.Thread(target=wait, daemon=True).start()


def refuse(me: Rank) -> None:
    raise UnsupportedHere("not here")


def fail_on(me: Rank, rank: int) -> None:
    me.say("working")
    if me.rank == rank:
        print("a line of the job", flush=True)
        raise RuntimeError("the disk of this rank fell over")
    me.barrier()


def stop(me: Rank, rank: int) -> None:
    me.say("working")
    if me.rank == rank:
        os.kill(os.getpid(), signal.SIGSTOP)
    me.barrier()


def sleep_on(me: Rank, rank: int, seconds: float, stack_after_s: float | None = None, late_s: float = 0.0) -> None:
    """One rank sleeps while the others wait for it. stack_after_s: the delay before it writes its stack, as on a busy
    machine. late_s: the delay before it announces its phase."""

    def late(*_: Any) -> None:
        assert stack_after_s is not None
        time.sleep(stack_after_s)
        faulthandler.dump_traceback(all_threads=True)

    time.sleep(late_s if me.rank == rank else 0.0)
    me.say("working")
    if me.rank == rank:
        if stack_after_s is not None:
            faulthandler.unregister(signal.SIGUSR1)
            signal.signal(signal.SIGUSR1, late)
        time.sleep(seconds)
    me.barrier()


def hoard(me: Rank, gigabytes: float) -> None:
    me.say("working")
    with memory_limit(me, gigabytes):
        kept = [torch.ones(1 << 28, dtype=torch.uint8) for _ in range(int(4 * gigabytes) + 4)]
        me.gather(len(kept))


def finish(me: Rank, fault: str) -> int:
    """Ends with no further collective."""
    me.fault = fault
    me.say("finish")
    return me.rank
