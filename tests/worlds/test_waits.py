"""Waits for ranks that never come end, and say for whom they were."""

import errno
import os
import queue
import subprocess
import sys
import threading
from datetime import timedelta
from functools import partial
from pathlib import Path

import numpy
import pytest
import torch

from attention.geometry.mailbox import Mailbox
from attention.transports.fabric import wait_of
from attention.transports.waits import WAITING, Remote, Watch, start, started
from tests.jobs import shared_memory

LIMIT_S = 1.0
SOON_S = 60  # a busy machine's seconds; for ever is what it must not be


@pytest.mark.parametrize("doing, which", [("raises", "forward"), ("hangs", "backward"), ("calls_another", "forward")])
def test_a_rank_that_does_not_come_ends_the_others_by_the_groups_timeout(in_world, doing, which):
    first, second = in_world(shared_memory.left_waiting, 2, doing=doing, which=which, limit_s=LIMIT_S)
    told, seconds = first["first"]
    assert "rank 0 waited 1 s, the process group's timeout, for rank 1 to" in told
    assert LIMIT_S <= seconds < SOON_S
    assert first["again"][0] == told, "the next call uses flags that nobody set"
    assert first["again"][1] < LIMIT_S
    if doing == "calls_another":
        assert "rank 1 waited 1 s, the process group's timeout, for rank 0 to" in second["first"][0]


def test_calls_that_want_different_memory_are_refused_on_every_rank(in_world):
    found = in_world(shared_memory.growing_apart, 2)
    assert found[0] == found[1]
    assert (
        "the ranks made different calls: rank 0 shares 2,097,152 bytes for kv, rank 1 shares 4,096 bytes for kv"
        in found[0]
    )


EXITS = """
import os, sys, torch, torch.distributed as dist, attention
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
fn = attention.make("ring", transport="symm")
x = [torch.randn(1, 8, 2, 16) for _ in range(3)]
fn(*x)
if rank == 1:
    os._exit(0)
for _ in range(3):
    fn(*x)
"""


def test_a_rank_whose_process_is_gone_is_not_waited_for(tmp_path):
    """Long before the timeout, which is half an hour here, and though nobody has asked for its exit status yet."""
    command = [sys.executable, "-c", EXITS]
    gone = subprocess.Popen([*command, "1", str(tmp_path / "store")])
    left = subprocess.run([*command, "0", str(tmp_path / "store")], capture_output=True, text=True, timeout=SOON_S)
    assert left.returncode == 1
    assert "rank 0 waited for rank 1 to" in left.stderr
    assert f"but its process {gone.pid} is gone" in left.stderr
    gone.wait()


def test_a_process_has_started_until_it_has_ended(monkeypatch):
    """Also one whose exit status nobody has asked for yet. Nothing is known where there is no free file descriptor."""
    assert started(os.getpid()) == started(os.getpid()) > 0
    with subprocess.Popen([sys.executable, "-c", "pass"]) as child:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert started(child.pid) == 0

    def refused(path):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(Path, "read_bytes", refused)
    assert started(os.getpid()) is None


class Words:
    """Memory that the test writes to as a stream does."""

    def __init__(self, n):
        self.words = numpy.zeros(n, numpy.int32)

    def read(self, first, n):
        assert 0 <= first < first + n <= len(self.words)
        return self.words[first : first + n].copy()

    def see(self, mark):
        self.words.view(numpy.uint8)[4 * mark + 1] = 1


class Slow(Remote):
    """Rank 0 of three, whose group has a timeout of ten seconds."""

    def __init__(self):
        self.names, self.processes, self.rank, self.failed = [4, 5, 6], {}, 0, None
        self.device, self._group = torch.device("cpu"), lambda: self

    def _get_backend(self, device):
        return self

    options = property(lambda self: self)
    _timeout = timedelta(seconds=10)


@pytest.fixture
def watched():
    words = Words(8)
    waits = {1: ({1: 0, 2: 2}, "to publish its kv")}
    return words, Watch(words, Slow(), range(1, 8, 2), waits.__getitem__)


def test_a_stream_that_waits_for_too_long_is_told_for_which_ranks(watched):
    memory, watch = watched
    memory.words[1] = WAITING
    assert watch.look(0.0) is None
    assert watch.look(9.9) is None
    assert "rank 4 waited 10 s, the process group's timeout, for rank 5, 6 to publish its kv" in watch.look(10.0)
    memory.words[0] = 1
    assert "for rank 6 to" in watch.look(11.0)
    memory.words[2] = 1
    assert watch.look(12.0) is None, "it just came"


def test_a_kernel_that_waits_for_too_long_is_told_for_which_ranks():
    box = Mailbox(3, 4)
    memory = Words(box.numel)
    watch = Watch(memory, Slow(), range(box.marks, box.numel), partial(wait_of, box, memory, [1, 2]))
    assert watch.look(0.0) is None
    memory.words[box.turns + 3] = 1
    memory.words[box.marks + 3] = WAITING
    memory.words[box.flag(0, 2, 3)] = 1  # of the other slot
    memory.words[box.flag(1, 1, 3)] = 1
    assert watch.look(1.0) is None
    assert "rank 4 waited 10 s, the process group's timeout, for rank 6 to write its partial results" in watch.look(
        11.0
    )


def thread_of(watch, end):
    start(watch, end, interval_s=0.01)
    return threading.enumerate()[-1]


def test_a_watch_is_checked_until_nobody_holds_it(watched, monkeypatch):
    memory, watch = watched
    memory.words[1] = WAITING
    monkeypatch.setattr(Slow, "_timeout", timedelta(0))
    reasons = queue.Queue()
    mine = Watch(memory, Slow(), watch.marks, watch.wait_of)
    thread = thread_of(mine, reasons.put)
    assert "for rank 5, 6 to publish its kv" in reasons.get(timeout=SOON_S)
    del mine
    thread.join(SOON_S)
    assert not thread.is_alive()
