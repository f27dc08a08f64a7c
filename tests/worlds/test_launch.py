"""Worlds: warm, and whatever can happen to a rank comes back as an outcome with nothing left behind."""

import contextlib
import json
import os
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from runner.launch.files import Part, WorldFiles, WorldSpec
from runner.launch.worlds import Pool, World
from tests.jobs import faults

TWO = WorldSpec(2, "cpu")


@pytest.fixture
def world():
    world = World(TWO)
    yield world
    world.close()


def lives(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:  # it ended, perhaps while it was read
        return False


def gone(pids):
    deadline = time.time() + 60  # it takes an instant
    while any(map(lives, pids)) and time.time() < deadline:
        time.sleep(0.05)
    return not any(map(lives, pids))


def test_a_world_is_reused_after_a_refusal_and_takes_a_job_longer_than_the_pipe(pool):
    world, value = pool.get(TWO), "x" * 300_000
    first, outcome = world.call(faults.pids, {}).result, world.call(faults.refuse, {})
    assert (outcome.status, outcome.reason) == ("unsupported", "not here")
    assert all(0 <= time.monotonic() - state["since"] < 600 for state in world.files.states())  # no clock that is set
    assert world.call(faults.echo, {"value": value}).result == [value, value]
    assert pool.get(TWO).call(faults.pids, {}).result == first


@pytest.fixture
def patient(monkeypatch):
    """A world that does not end by itself is waited for so long that it shows, on a busy machine, too."""
    monkeypatch.setattr("runner.launch.agent.STOP_S", 30.0)
    return 15.0


def test_a_world_that_is_still_starting_is_not_waited_for_and_its_command_line_holds_no_value_of_launch_env(patient):
    world = World(WorldSpec(1, "cpu", env=(("NAME", "hidden"),)))
    proc = Path(f"/proc/{world.agent.process.pid}")
    try:
        while not (variables := (proc / "environ").read_bytes()):  # until it is executed
            time.sleep(0.01)
        line = (proc / "cmdline").read_bytes()
    finally:
        start = time.time()
        world.close()
    assert time.time() - start < patient and not world.folder.exists()
    assert b"hidden" not in line and b"NAME=hidden" in variables


def test_a_timeout_names_the_limit_that_it_went_over():
    world = World(WorldSpec(2, "cpu", start_timeout_s=0.2))
    outcome = world.call(faults.pids, {}, timeout_s=60)
    assert (outcome.status, outcome.phase) == ("timeout", "start")
    assert "launch.start_timeout_s=N allows more" in outcome.reason


@pytest.mark.parametrize(
    ("job", "arguments", "expected", "reason"),
    [
        (faults.fail_on, {"rank": 1}, ("crash", 1, "working"), "the disk of this rank fell over"),
        (faults.stop, {"rank": 1}, ("timeout", 1, "working"), "rank 1 was found stopped (as by SIGSTOP) in phase working"),
        (faults.finish, {"fault": "1:finish:kill"}, ("crash", 1, "finish"), "rank 1 was killed by SIGKILL"),
        (faults.hoard, {"gigabytes": 0.5}, ("oom", None, "working"), ""),  # both ranks
    ],
    ids=["raise", "stop", "kill", "limit"],
)  # fmt: skip
def test_what_happens_to_a_rank_is_an_outcome_and_nothing_is_left(world, job, arguments, expected, reason):
    pids = world.call(faults.pids, {}).result  # what jobs need is imported
    outcome = world.call(job, arguments, timeout_s=1.0 if job is faults.stop else 60.0)
    rank = outcome.rank if expected[1] is not None else None
    assert (outcome.status, rank, outcome.phase) == expected, outcome.reason
    assert reason in outcome.reason and outcome.begun
    for said in ("a line of the job", reason) if "fell" in reason else ():
        assert any(said in line for line in outcome.log_tail), said
    assert gone(pids) and not world.alive and not world.folder.exists()


def test_an_agent_that_was_killed_is_named_with_the_signal(world):
    pids = world.call(faults.pids, {}).result

    def kill():
        while [state["phase"] for state in world.files.states()] != ["working"] * 2:
            time.sleep(0.02)
        os.kill(world.agent.process.pid, 39)  # a real-time signal without a name

    threading.Thread(target=kill, daemon=True).start()
    outcome = world.call(faults.sleep_on, {"rank": 1, "seconds": 60})
    assert (outcome.status, outcome.rank) == ("crash", None) and outcome.begun
    assert "the agent that had started the ranks was killed by signal 39" in outcome.reason
    assert gone(pids)


def test_a_hanging_rank_is_a_timeout_with_its_stack_which_may_take_a_while(world, tmp_path):
    pids, start = world.call(faults.pids, {}).result, time.time()
    arguments = {"rank": 1, "seconds": 60, "late_s": 0.2, "stack_after_s": 1.0}
    outcome = world.call(faults.sleep_on, arguments, timeout_s=1.0, log=tmp_path / "log")
    assert time.time() - start < 50  # of 60
    # rank 0 is silent for longer, but its stack says that it waits for another
    assert (outcome.status, outcome.rank, outcome.phase) == ("timeout", 1, "working")
    assert "launch.timeout_s=N allows more" in outcome.reason
    assert any("faults.py" in line for line in outcome.log_tail)
    log = (tmp_path / "log").read_text()
    assert "[rank 0] Current thread" in log and "[rank 1] Current thread" in log and " in late" in log
    assert gone(pids)


def test_time_in_which_the_program_was_stopped_does_not_count(world):
    """As between two polls that are far apart. Without that, the rank would be silent for longer than its limit."""
    gaps = iter([4.0])
    world.call(faults.pids, {})  # so that the ranks have started
    arguments = {"rank": 1, "seconds": 5.0}
    outcome = world.call(faults.sleep_on, arguments, 3.0, progress=lambda _: time.sleep(next(gaps, 0.0)))
    assert outcome.status == "ok", outcome.reason


@pytest.mark.parametrize("how", ["fork", "spawn"])
def test_a_rank_is_forked_off_a_process_without_threads_and_may_start_processes_itself(pool, how):
    """What a thread holds at a fork no child can ever get."""
    world = pool.get(TWO)
    assert world.call(faults.starts_a_process, {"how": how}).result == [7, 7]
    (parent,) = set(world.call(faults.parents, {}).result)
    assert parent == world.agent.process.pid
    assert len(list(Path(f"/proc/{parent}/task").iterdir())) == 1


def test_a_world_leaves_nothing_behind(tmp_path, monkeypatch):
    tmp_path = tmp_path / ("long" * 30)  # a socket's path may have 107 characters
    tmp_path.mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for how in ("killed", "lost"):
        world = World(TWO)
        pids = [pid for job in (faults.pids, faults.parents) for pid in world.call(job, {}).result]
        assert world.folder.parent == tmp_path
        if how == "killed":
            os.kill(world.agent.process.pid, signal.SIGKILL)
        if how == "lost":  # between two jobs, where the other rank waits for the next one
            os.kill(pids[0], signal.SIGKILL)
            outcome = world.call(faults.pids, {})
            assert (outcome.status, outcome.rank, outcome.phase) == ("crash", 0, "idle"), outcome.reason
            assert not outcome.begun
        world.close()
        assert gone([*pids, world.agent.process.pid])
        assert [path.name for path in tmp_path.iterdir() if "torchinductor" not in path.name] == [], how


@pytest.mark.parametrize(
    ("frames", "waits"),
    [
        (['"/x/torch/distributed/distributed_c10d.py", line 9 in barrier', '"/x/runner/launch/rank.py", line 9 in say'], True),
        (['"/x/threading.py", line 3 in wait', '"/x/concurrent/futures/_base.py", line 3 in wait',
          '"/x/attention/transports/queues.py", line 3 in wait'], True),
        (['"/x/mine.py", line 3 in loop', '"/x/torch/distributed/elastic/multiprocessing/api.py", line 6 in _wrap'], False),
        (['"/x/threading.py", line 3 in wait', '"/x/mine.py", line 3 in loop'], False),
        ([], False),
    ],
)  # fmt: skip
def test_a_stack_says_whether_its_rank_waits_for_others(tmp_path, frames, waits):
    lines = ["said before", "Current thread 0x1 (most recent call first):", *(f"  File {frame}" for frame in frames)]
    (tmp_path / "rank0.log").write_text("\n".join(lines))
    assert WorldFiles(tmp_path, range(1)).in_exchange(0) is waits


def test_a_rank_that_died_or_exited_between_two_jobs_is_no_outcome_of_the_next_one_and_fresh_replaces_a_world(tmp_path):
    with Pool() as pool:
        pids = pool.call(TWO, faults.pids, {}).result
        os.kill(pids[1], signal.SIGKILL)
        assert pool.call(TWO, faults.echo, {"value": 1}).result == [1, 1]
        os.mkfifo(told := tmp_path / "told")
        assert pool.call(TWO, faults.exits_when_told, {"rank": 1, "pipe": str(told)}).status == "ok"
        rank = pool.get(TWO).files.states()[1]["pid"]
        told.write_text("exit")
        while lives(rank):
            time.sleep(0.01)
        assert pool.call(TWO, faults.echo, {"value": 1}).result == [1, 1]
        before = pool.call(TWO, faults.pids, {}).result
        after = pool.get(TWO, fresh=True).call(faults.pids, {}).result
        assert before != after and gone(before)
    assert gone(after)


def test_the_ranks_and_their_folder_end_with_the_program(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    code = (
        "import sys, time\nfrom runner.launch.files import WorldSpec\nfrom runner.launch.worlds import World\n"
        "w = World(WorldSpec(2, 'cpu'))\nprint(*w.call('tests.jobs.faults:pids', {}).result, w.agent.process.pid, w.folder, flush=True)\n"
        "time.sleep(60)"
    )
    program = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    *pids, folder = program.stdout.readline().split()
    assert Path(folder).parent == tmp_path
    assert all(map(lives, map(int, pids)))
    program.kill()
    program.wait()
    assert gone([int(pid) for pid in pids])
    assert not Path(folder).exists()


def test_an_agent_whose_program_has_ended_already_ends(tmp_path):
    (tmp_path / "part.json").write_text(json.dumps(asdict(Part(WorldSpec(1, "cpu")))))
    command = [sys.executable, "-m", "runner.launch.node", str(tmp_path)]
    assert subprocess.run(command, env={**os.environ, "ATTENTION_LAUNCHER": "-1"}, timeout=60).returncode == 1


def listening(pids):
    """The addresses at which processes listen, as the kernel writes them."""
    sockets = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":
                sockets[f"socket:[{fields[9]}]"] = fields[1].partition(":")[0]
    found = []
    for pid in pids:
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                found.append(sockets.get(os.readlink(descriptor)))
    return {address for address in found if address}


def test_a_world_on_one_node_listens_on_the_loopback_only_and_meets_where_its_user_alone_can_read(pool):
    world = pool.get(TWO)
    pids = world.call(faults.pids, {}).result
    assert listening(pids) == {"0100007F"}
    assert listening([world.agent.process.pid]) == set()
    assert (world.folder / "store").stat().st_size and stat.S_IMODE(world.folder.stat().st_mode) == 0o700
