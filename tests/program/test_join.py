"""Programs that torchrun, srun, mpirun or SkyPilot started join into one world: real processes with the launchers'
variables, over the loopback."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from torch.distributed import PrefixStore, TCPStore

from runner.config.place import Place, first_host, from_environment
from runner.config.values import InvalidConfig
from runner.launch.parents import Head
from tests.support.command import SMALL
from tests.support.ports import free_port

QUICK = [*SMALL, "phases=false", "baseline=none", "hardware=cpu", "timing.settle_ms=0"]
ELASTIC = {"TORCHELASTIC_RUN_ID": "x", "MASTER_ADDR": "node0", "MASTER_PORT": "29500"}


def place(**variables):
    return from_environment({key: str(value) for key, value in variables.items()})


def test_torchruns_variables_are_a_place():
    found = place(**ELASTIC, RANK=3, WORLD_SIZE=4, LOCAL_RANK=1, LOCAL_WORLD_SIZE=2, GROUP_WORLD_SIZE=2)
    assert (found.launcher, found.process, found.processes, found.local, found.nodes) == ("torchrun", 3, 4, 1, 2)
    assert (found.host, found.port, found.has_store, found.whole_node) == ("node0", 29500, False, False)


def test_where_torchrun_serves_a_store_processes_meet_there():
    shared = {**ELASTIC, "RANK": 0, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "TORCHELASTIC_USE_AGENT_STORE": "True"}
    assert (place(**shared).host, place(**shared).port, place(**shared).has_store) == ("node0", 29500, True)


def test_sruns_variables_are_a_place():
    step = {"SLURM_STEP_NUM_NODES": 2, "SLURM_STEP_NODELIST": "n[08-11,14],m1", "SLURM_JOB_ID": 7, "SLURM_STEP_ID": 0}
    one_each = place(**step, SLURM_PROCID=1, SLURM_STEP_NUM_TASKS=2)
    assert (one_each.host, one_each.process, one_each.whole_node) == ("n08", 1, True)
    assert one_each.whole_world(gpus=8) == 16
    ranks = place(**step, SLURM_PROCID=9, SLURM_LOCALID=1, SLURM_STEP_NUM_TASKS=16)
    assert (ranks.local, ranks.whole_node, ranks.whole_world(gpus=8)) == (1, False, 16)
    assert ranks.port == place(**step, SLURM_PROCID=0, SLURM_STEP_NUM_TASKS=16).port


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"SLURM_PROCID": 0, "SLURM_NTASKS": 8},
        {"OMPI_COMM_WORLD_RANK": 0, "OMPI_COMM_WORLD_SIZE": 1},
        {"WORLD_SIZE": 8},
    ],
    ids=["nothing", "a batch script", "one process", "no rank"],
)
def test_a_program_that_no_launcher_joined_runs_for_itself(variables):
    assert place(**variables) is None


@pytest.mark.parametrize(
    ("variables", "why"),
    [
        ({"RANK": 0, "WORLD_SIZE": 2}, "need MASTER_ADDR and MASTER_PORT"),
        ({**ELASTIC, "RANK": 2, "WORLD_SIZE": 2}, "process 2 of 2"),
        ({**ELASTIC, "RANK": "x", "WORLD_SIZE": 2}, "RANK=x"),
        ({"OMPI_COMM_WORLD_RANK": 0, "OMPI_COMM_WORLD_SIZE": 4, "OMPI_COMM_WORLD_LOCAL_SIZE": 2}, "mpirun -x MASTER_ADDR=HOST"),
        ({"SKYPILOT_NODE_RANK": 0, "SKYPILOT_NUM_NODES": 2}, "SKYPILOT_NODE_IPS"),
    ],
)  # fmt: skip
def test_variables_that_are_no_place_are_refused(variables, why):
    with pytest.raises(InvalidConfig, match=why):
        place(**variables)


@pytest.mark.parametrize(
    ("listed", "first"), [("a", "a"), ("a1,b2", "a1"), ("n[3-5]-ib", "n3-ib"), ("n[08,10]", "n08")]
)
def test_the_first_of_slurms_hosts(listed, first):
    assert first_host(listed) == first


def test_a_world_is_the_first_processes_and_their_ranks():
    ranks = Place("torchrun", 0, 8, 0, 2, "h", 1, "j")
    assert [ranks.agents(n, 4) for n in (1, 4, 8)] == [1, 4, 8]
    assert [ranks.nodes_of(n, 4) for n in (1, 4, 5, 8)] == [1, 1, 2, 2]
    nodes = Place("srun", 0, 2, 0, 2, "h", 1, "j", whole_node=True)
    assert [nodes.agents(n, 8) for n in (4, 8, 16)] == [1, 1, 2]
    assert (nodes.agents(6, 0), nodes.ranks_each(6, 0)) == (2, 3)  # on CPUs, any number a node


@pytest.mark.parametrize(("whole_node", "gpus", "size"), [(False, 4, 9), (True, 8, 12), (True, 8, 24), (True, 0, 3)])
def test_a_world_that_the_processes_cannot_form_is_refused(whole_node, gpus, size):
    processes = 2 if whole_node else 8
    with pytest.raises(InvalidConfig, match=f"world_size={size}: .*(leave it out|a multiple)"):
        Place("srun", 0, processes, 0, 2, "h", 1, "j", whole_node=whole_node).check(size, gpus)


@contextlib.contextmanager
def programs(*starts, apart_s=0.0):
    """Programs by (command before `-m runner`, its overrides, variables), started one after another; ended here at the latest."""
    started = []
    try:
        for before, overrides, variables in starts:
            if started:
                time.sleep(apart_s)
            command = [sys.executable, *before, "-m", "runner", *overrides]
            env = {**os.environ, **{key: str(value) for key, value in variables.items()}}
            pipe = subprocess.PIPE
            started.append(
                subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=env, start_new_session=True)
            )
        yield started
    finally:
        for program in started:
            with contextlib.suppress(OSError):
                os.killpg(program.pid, signal.SIGKILL)
            program.communicate()


def torchrun(port, node):
    where = ["--node-rank", str(node), "--master-addr", "localhost", "--master-port", str(port)]
    return ["-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2", *where]


def results(folder):
    found = [json.loads(path.read_text()) for path in Path(folder).glob("**/result.json")]
    return sorted(found, key=lambda value: value["environment"]["started_at"])


def end(started, timeout=300):
    said = [program.communicate(timeout=timeout) for program in started]
    return [program.returncode for program in started], "\n".join("".join(texts) for texts in said)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("order", "late_s", "fault", "said"),
    [
        ((1, 0), 3.0, "3:timing:kill", "rank 3 was killed by SIGKILL"),
        ((0, 1), 1.0, "2:timing:raise", "provoked by launch.fault"),
    ],
    ids=["the second first", "the first first"],
)
def test_two_torchruns_are_one_world_in_either_order_and_a_rank_that_dies_elsewhere_ends_its_own_run(
    tmp_path, order, late_s, fault, said
):
    port = free_port()
    given = ["-m", f"output={tmp_path}", *QUICK, f"launch.fault=null,{fault}", "order=sequential"]
    given += ["launch.start_timeout_s=120"]
    with programs(*[(torchrun(port, node), given, {}) for node in order], apart_s=late_s) as started:
        statuses, printed = end(started)
    assert statuses == [1, 1], printed
    ok, died = results(tmp_path)
    assert ok["status"] == "ok", ok["reason"]
    assert (ok["experiment"]["world_size"], ok["experiment"]["launch"]["nodes"]) == (4, 2)
    assert (died["status"], died["failure"]["rank"]) == ("crash", int(fault[0])) and said in died["reason"]
    assert died["failure"]["phase"] == "timing"
    assert list(tmp_path.glob("multirun/*/summary.csv"))


def launched(kind, process, port):
    """The variables of process `process` of two."""
    local = {"MASTER_ADDR": "localhost", "MASTER_PORT": port}
    return {
        "slurm": {
            "SLURM_PROCID": process, "SLURM_STEP_NUM_TASKS": 2, "SLURM_STEP_NUM_NODES": 2, "SLURM_NODEID": process,
            "SLURM_STEP_NODELIST": "localhost", "SLURM_JOB_ID": port, "SLURM_STEP_ID": 0,
        },
        "ompi": {
            "OMPI_COMM_WORLD_RANK": process, "OMPI_COMM_WORLD_SIZE": 2, "OMPI_COMM_WORLD_LOCAL_SIZE": 2,
            "OMPI_COMM_WORLD_LOCAL_RANK": process, "PMIX_NAMESPACE": port,
        },
        "skypilot": {
            "SKYPILOT_NODE_RANK": process, "SKYPILOT_NUM_NODES": 2, "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.1",
            "SKYPILOT_TASK_ID": port,
        },
        "by hand": {"RANK": process, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "LOCAL_RANK": process, **local},
    }[kind]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["slurm", "ompi", "skypilot"])
def test_processes_with_a_launchers_variables_are_one_world(tmp_path, kind):
    port = free_port()
    given = [f"output={tmp_path}", *QUICK, *(["world_size=4"] if kind == "slurm" else [])]
    with programs(*[([], given, launched(kind, process, port)) for process in (1, 0)]) as started:
        statuses, said = end(started)
    assert statuses == [0, 0], said
    (value,) = results(tmp_path)
    assert (value["status"], value["experiment"]["world_size"]) == ("ok", 4 if kind == "slurm" else 2), value["reason"]


@pytest.mark.slow
def test_a_process_that_is_killed_is_a_crash_and_nothing_hangs(tmp_path):
    port = free_port()
    given = [f"output={tmp_path}", *QUICK, "launch.fault=0:timing:hang", "launch.timeout_s=100"]
    with programs(*[([], given, launched("by hand", process, port)) for process in (0, 1)]) as (head, other):
        log = []
        while not log:  # the world is up: rank 1 has a folder
            log = [p for p in Path("/proc").glob("[0-9]*/status") if f"PPid:\t{other.pid}\n" in _read(p)]
            assert head.poll() is None and other.poll() is None
            time.sleep(0.1)
        time.sleep(8.0)
        os.kill(other.pid, signal.SIGKILL)
        ((status,), said) = end([head], timeout=30)
    assert status == 1, said
    (value,) = results(tmp_path)
    assert value["status"] == "crash"
    assert "process 1 of 2 (WORLD_SIZE) left" in value["reason"]


def _read(path):
    with contextlib.suppress(OSError):
        return path.read_text()
    return ""


def test_a_larger_world_than_was_started_is_refused_by_all(tmp_path):
    port = free_port()
    given = [f"output={tmp_path}", *QUICK, "world_size=3"]
    with programs(*[([], given, launched("by hand", process, port)) for process in (0, 1)]) as started:
        statuses, said = end(started)
    assert statuses == [2, 2]
    assert "world_size=3: WORLD_SIZE started 2 processes, for 2 ranks" in said


@pytest.mark.parametrize("process", [0, 1])
def test_variables_of_an_earlier_launch_are_said_and_a_signal_ends_the_wait(tmp_path, process):
    with programs(([], [f"output={tmp_path}", *QUICK], launched("by hand", process, free_port()))) as (program,):
        waits = next(line for line in program.stderr if "waits for" in line)
        time.sleep(5.0)  # process 0 has opened its world
        program.terminate()
        statuses, _ = end([program], timeout=20)
    assert statuses == [128 + signal.SIGTERM]
    assert f"process {process} waits for" in waits and "to run without others, unset RANK" in waits


def test_nothing_that_others_send_stops_process_0():
    place = Place("WORLD_SIZE", 0, 2, 0, 1, "127.0.0.1", free_port(), "job")
    head = Head(place)
    with contextlib.ExitStack() as strangers:
        for sent in (b"", b"x", b"GET / HTTP/1.1\r\n\r\n", b"[" * 200_000):
            strangers.enter_context(socket.create_connection((place.host, place.port))).sendall(sent)
        other = PrefixStore("job", TCPStore(place.host, place.port, is_master=False, wait_for_workers=False))
        news = ["[" * 200_000, "[]", "{}", '{"world": []}', '{"world": 1, "now": "noon", "files": 3}', '{"end": true}']
        for number, text in enumerate(news):
            other.set(f"news/1/{number}", text)
            other.get(f"news/1/{number}")  # a store answers before a value that was set is there
        head.poll()
        assert head.taken == {1: len(news)}
        head.end(0)
