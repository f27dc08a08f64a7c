"""A rank process: it joins the world, then does one job after another until it is stopped."""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import json
import os
import pickle
import re
import resource
import signal
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from runner.config.values import InvalidConfig, UnsupportedHere
from runner.launch.files import Part, write
from runner.launch.outcome import Outcome
from runner.launch.processes import cores, die_with_parent

FOREVER = timedelta(days=7)  # the launcher decides what is too long
# the last one is oneDNN's
OUT_OF_MEMORY = re.compile(
    "can't allocate memory|out of memory|Cannot allocate memory|DefaultCPUAllocator|could not create a primitive"
)
SETTLE_S = 1.0  # delay of a rank that only noticed another rank's failure, so that the failed rank is reported first
# what the exception of a rank says that only noticed another rank's failure
REMOTE_RANK_GONE = re.compile("onnection|Broken pipe|closed by peer|gloo|NCCL|transport=symm: rank|Disagreement")
PROVOKED_GIB = 0.3  # memory left to a CPU rank that launch.fault makes run out of memory


@dataclass
class Rank:
    """The first argument of every job: the rank's place in the world, and functions to announce its progress."""

    rank: int
    world: int
    device: torch.device
    folder: Path
    control: dist.ProcessGroup  # gloo, for plain objects; the default group carries tensors
    job: int = 0
    phase: str = "start"
    fault: str | None = None
    facts: dict[str, Any] = field(default_factory=dict)  # announced once, repeated with every state of the job
    stages: dict[str, float] = field(default_factory=dict)  # seconds of the job by phase
    entered: float = 0.0

    def say(
        self, phase: str, expected_s: float = 0.0, note: str | None = None, waiting: bool = False, **facts: Any
    ) -> None:
        """Announce that a phase begins. The launcher uses this to show progress and to detect hangs. `expected_s`: how long
        the phase should take. `waiting`: in this phase the rank only waits for others."""
        self.facts |= facts
        now = time.perf_counter()
        self.stages[self.phase] = self.stages.get(self.phase, 0.0) + now - self.entered
        self.phase, self.entered = phase, now
        state = {"rank": self.rank, "pid": os.getpid(), "job": self.job, "phase": phase, "since": time.monotonic()}
        state |= {"expected_s": expected_s, "waiting": waiting, "note": note, **self.facts}
        write(self.folder / f"rank{self.rank}.state", json.dumps(state))
        if self.fault is not None:
            _provoke(self, self.fault)

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, on every rank."""
        if self.world == 1:
            return [value]
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value, group=self.control)
        return values

    def agree(self, value: Any) -> Any:
        """Rank 0's value, on every rank."""
        if self.world == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.control)
        return box[0]

    def barrier(self) -> None:
        dist.barrier(group=self.control)


def live(part: Part, rank: int, folder: Path) -> NoReturn:
    """The life of a rank process, which an agent has just forked."""
    die_with_parent()
    log = os.open(folder / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    me = None
    try:
        me = _join(part, rank, folder)
        me.say("idle")
        _work(me)
        me.barrier()  # a rank that leaves early breaks the connections of the others
    except BaseException as error:
        _give_up(me, error)
    os._exit(0)  # no orderly end: it could wait for other ranks, and that of NCCL takes seconds


def _join(part: Part, rank: int, folder: Path) -> Rank:
    """This rank, once all of its world are there."""
    world, share_gpu = part.spec.world_size, part.spec.share_gpu
    local = part.first_local + rank - part.ranks[0]
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(local), LOCAL_WORLD_SIZE=str(len(part.ranks))
    )
    if part.spec.device == "cpu":
        device = torch.device("cpu")
        torch.set_num_threads(max(1, cores() // world))
    else:
        device = torch.device("cuda", 0 if share_gpu else local % torch.cuda.device_count())
        torch.cuda.set_device(device)
    store: dist.Store
    if part.store is None:
        store = dist.FileStore(str(folder / "store"), world)
    else:
        host, port, prefix = part.store
        store = dist.PrefixStore(prefix, dist.TCPStore(host, port, is_master=False, wait_for_workers=False))
    store.set_timeout(FOREVER)
    by_gloo = device.type == "cpu" or share_gpu  # NCCL refuses two ranks on one GPU
    dist.init_process_group(
        "gloo" if by_gloo else "nccl",
        store=store,
        rank=rank,
        world_size=world,
        timeout=FOREVER,
        device_id=None if by_gloo else device,
    )
    return Rank(rank, world, device, folder, control=dist.new_group(backend="gloo", timeout=FOREVER))


def _work(me: Rank) -> None:
    jobs = (me.folder / "jobs").open() if me.rank == 0 else None
    while True:
        message = None
        if jobs is not None:
            line = jobs.readline()
            if not line:  # the program has ended, and the agent ends this rank
                signal.pause()
            if line == "job\n":
                message = (me.folder / "job").read_bytes()
        message = me.agree(message)
        if message is None:
            return
        me.job, target, arguments = pickle.loads(message)
        me.facts, me.stages = {}, {}
        reply = _reply(me, target, arguments)
        me.say("idle")
        if me.rank == 0:
            write(me.folder / f"reply{me.job}", pickle.dumps(reply))


def _reply(me: Rank, target: str, arguments: dict[str, Any]) -> Outcome:
    """The reply of one job, once every rank has ended it. A refusal by the whole world is a reply. Any other exception
    ends this rank and with it the world, since other ranks may wait for it."""
    me.say("start")
    module, _, name = target.partition(":")
    try:
        reply = Outcome("ok", result=getattr(importlib.import_module(module), name)(me, **arguments))
    except InvalidConfig as error:
        reply = Outcome("invalid", str(error))
    except UnsupportedHere as error:
        reply = Outcome("unsupported", str(error))
    me.fault = None
    me.say("end", waiting=True)
    statuses = me.gather(reply.status)
    if len(set(statuses)) > 1:
        raise RuntimeError(f"the ranks ended the job differently: {statuses}")
    return reply


def _give_up(me: Rank | None, error: BaseException) -> NoReturn:
    """End this rank. me: None before its world is complete."""
    try:
        out_of_memory = is_out_of_memory(error)
        text = f"{type(error).__name__}: {str(error).strip()}".partition("\n")[0]
        if not out_of_memory and REMOTE_RANK_GONE.search(text):
            time.sleep(SETTLE_S)
        if me is not None and me.phase != "idle":  # in a job
            me.fault = None
            kind = "oom" if out_of_memory else "raise"
            me.say(me.phase, error={"kind": kind, "message": text[:500], "time": time.monotonic()})
        traceback.print_exception(error)
    finally:  # on a full disk neither state nor log can be written
        os._exit(1)


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, (RuntimeError, OSError)) and OUT_OF_MEMORY.search(str(error)) is not None


@contextlib.contextmanager
def memory_limit(me: Rank, gigabytes: float | None) -> Iterator[None]:
    """Limit this rank's memory to `gigabytes` GiB: on a GPU in all, on a CPU in addition to what the process holds
    already."""
    with contextlib.ExitStack() as limits:
        if gigabytes is not None and me.device.type == "cuda":
            total = torch.cuda.get_device_properties(me.device).total_memory
            set_fraction = torch.cuda.set_per_process_memory_fraction
            limits.callback(set_fraction, 1.0, me.device)
            set_fraction(min(1.0, gigabytes * 2**30 / total), me.device)
        elif gigabytes is not None:
            held_kib = Path("/proc/self/status").read_text().partition("VmData:")[2].split()[0]
            before = resource.getrlimit(resource.RLIMIT_DATA)
            limits.callback(resource.setrlimit, resource.RLIMIT_DATA, before)
            resource.setrlimit(resource.RLIMIT_DATA, (int(held_kib) * 1024 + int(gigabytes * 2**30), before[1]))
        try:
            yield
        except RuntimeError as error:
            if "can't start new thread" in str(error):  # no memory for its stack
                raise MemoryError(str(error)) from error
            raise


def _provoke(me: Rank, fault: str) -> None:
    """launch.fault: provokes a failure on this rank."""
    rank, phase, kind = fault.split(":")
    if (int(rank), phase) != (me.rank, me.phase):
        return
    me.fault = None
    if kind == "raise":
        raise RuntimeError(f"provoked by launch.fault={fault}")
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "hang":
        time.sleep(FOREVER.total_seconds())
    if kind == "oom":
        # without a limit, other programs on this machine would be killed first
        held = []
        with memory_limit(me, PROVOKED_GIB if me.device.type == "cpu" else None):
            while True:  # as any rank would: ask for more memory than there is
                held.append(torch.empty(1 << 26, device=me.device))  # not written: writing would start threads
