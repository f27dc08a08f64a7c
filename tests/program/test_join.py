"""Programs that torchrun, srun, mpirun or SkyPilot started join into one world: real processes with the launchers'
variables, over the loopback."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time

import pytest
from torch.distributed import PrefixStore, TCPStore

from runner.config.place import Place, from_environment
from runner.config.values import InvalidConfig
from runner.launch.parents import Head
from tests.support.command import SMALL, results_in
from tests.support.ports import free_port

QUICK = [*SMALL, "phases=false", "baseline=none", "hardware=cpu", "timing.settle_ms=0"]
ELASTIC = "TORCHELASTIC_RUN_ID=x MASTER_ADDR=node0 MASTER_PORT=29500 "
SLURM = "SLURM_STEP_NUM_NODES=2 SLURM_STEP_NODELIST=n[08-11,14],m1 SLURM_JOB_ID=7 SLURM_STEP_ID=0 "
OMPI = "OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_SIZE=2 OMPI_COMM_WORLD_RANK="
SKYPILOT = "SKYPILOT_NUM_NODES=2 SKYPILOT_NODE_RANK=1"


def place(variables):
    return from_environment(dict(x.split("=", 1) for x in variables.split()))


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        (ELASTIC + "RANK=3 WORLD_SIZE=4 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 GROUP_WORLD_SIZE=2", ("torchrun", 3, 4, 1, 2, "node0", False)),
        (SLURM + "SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=2", ("srun", 1, 2, 0, 2, "n08", True)),
        (SLURM + "SLURM_PROCID=9 SLURM_LOCALID=1 SLURM_STEP_NUM_TASKS=16", ("srun", 9, 16, 1, 2, "n08", False)),
        (OMPI + "3 OMPI_COMM_WORLD_LOCAL_RANK=1 MASTER_ADDR=a", ("mpirun", 3, 4, 1, 2, "a", False)),
        (SLURM.replace("n[08-11,14],m1", "n[3-5]-ib") + "SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=2", ("srun", 1, 2, 0, 2, "n3-ib", True)),
        (SKYPILOT + " SKYPILOT_NODE_IPS=10.0.0.1", ("skypilot", 1, 2, 0, 2, "10.0.0.1", True)),
    ],
)  # fmt: skip
def test_a_launchers_variables_are_a_place(variables, expected):
    at = place(variables)
    assert (at.launcher, at.process, at.processes, at.local, at.nodes, at.host, at.whole_node) == expected
    assert at.whole_world(gpus=8) == at.processes * (8 if at.whole_node else 1) and not at.has_store


def test_where_torchrun_serves_a_store_processes_meet_there():
    found = place(ELASTIC + "RANK=0 WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 TORCHELASTIC_USE_AGENT_STORE=True")
    assert (found.host, found.port, found.has_store) == ("node0", 29500, True)


@pytest.mark.parametrize(
    "variables", ["", "SLURM_PROCID=0 SLURM_NTASKS=8", "OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=1", "WORLD_SIZE=8"]
)
def test_a_program_that_no_launcher_joined_runs_for_itself(variables):
    assert place(variables) is None


@pytest.mark.parametrize(
    ("variables", "why"),
    [
        ("RANK=0 WORLD_SIZE=2", "need MASTER_ADDR and MASTER_PORT"),
        (ELASTIC + "RANK=2 WORLD_SIZE=2", "process 2 of 2"),
        (ELASTIC + "RANK=x WORLD_SIZE=2", "RANK=x"),
        (OMPI + "0", "mpirun -x MASTER_ADDR=HOST"),
        (SKYPILOT, "SKYPILOT_NODE_IPS"),
    ],
)
def test_variables_that_are_no_place_are_refused(variables, why):
    with pytest.raises(InvalidConfig, match=why):
        place(variables)


def launched(processes, whole_node=False):
    return Place("srun", 0, processes, 0, 2, "h", 1, "j", whole_node=whole_node)


def test_a_world_is_the_first_processes_and_their_ranks():
    ranks, nodes = launched(8), launched(2, whole_node=True)
    assert [(ranks.agents(n, 4), ranks.nodes_of(n, 4)) for n in (1, 4, 5, 8)] == [(1, 1), (4, 1), (5, 2), (8, 2)]
    assert [nodes.agents(n, 8) for n in (4, 8, 16)] == [1, 1, 2]
    assert (nodes.agents(6, 0), nodes.ranks_each(6, 0)) == (2, 3)  # on CPUs, any number a node


@pytest.mark.parametrize(("whole_node", "gpus", "size"), [(False, 4, 9), (True, 8, 12), (True, 8, 24), (True, 0, 3)])
def test_a_world_that_the_processes_cannot_form_is_refused(whole_node, gpus, size):
    with pytest.raises(InvalidConfig, match=f"world_size={size}: .*(leave it out|a multiple)"):
        launched(2 if whole_node else 8, whole_node).check(size, gpus)


@contextlib.contextmanager
def programs(*starts, apart_s=0.0):
    """Programs by (command before `-m runner`, its overrides, variables), started one after another; ended here at the latest."""
    started = []
    try:
        for before, overrides, variables in starts:
            time.sleep(apart_s if started else 0.0)
            command = [sys.executable, *before, "-m", "runner", *overrides]
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
            started.append(subprocess.Popen(command, env=os.environ | variables, start_new_session=True, **pipes))
        yield started
    finally:
        for program in started:
            with contextlib.suppress(OSError):
                os.killpg(program.pid, signal.SIGKILL)
            program.communicate()


def results(folder):
    return sorted(results_in(folder).values(), key=lambda value: value["environment"]["started_at"])


def end(started, timeout=300):
    said = [program.communicate(timeout=timeout) for program in started]
    return [program.returncode for program in started], "\n".join("".join(texts) for texts in said)


def test_two_torchruns_are_one_world_in_either_order_and_a_rank_that_dies_elsewhere_ends_its_own_run(tmp_path):
    meet = ["--nnodes=2", "--nproc-per-node=2", "--master-addr=localhost", f"--master-port={free_port()}"]
    sweep = ["-m", f"output={tmp_path}", *QUICK, "launch.fault=null,3:timing:kill", "order=sequential"]
    torchruns = [(["-m", "torch.distributed.run", *meet, f"--node-rank={node}"], sweep, {}) for node in (1, 0)]
    with programs(*torchruns, apart_s=3.0) as started:
        statuses, printed = end(started)
    assert statuses == [1, 1], printed
    ok, died = results(tmp_path)
    assert (ok["status"], ok["experiment"]["world_size"], ok["experiment"]["launch"]["nodes"]) == ("ok", 4, 2)
    assert (died["status"], died["failure"]["rank"], died["failure"]["phase"]) == ("crash", 3, "timing")
    assert "rank 3 was killed by SIGKILL" in died["reason"] and list(tmp_path.glob("multirun/*/summary.csv"))


def by_hand(process, port):
    """The variables of process `process` of two."""
    texts = (
        f"RANK={process} LOCAL_RANK={process} WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 MASTER_ADDR=localhost MASTER_PORT={port}"
    )
    return dict(text.split("=") for text in texts.split())


def test_a_larger_world_than_was_started_is_refused_by_all(tmp_path):
    port = free_port()
    given = [f"output={tmp_path}", *QUICK, "world_size=3"]
    with programs(*[([], given, by_hand(process, port)) for process in (0, 1)]) as started:
        statuses, said = end(started)
    assert statuses == [2, 2], said
    assert "world_size=3: WORLD_SIZE started 2 processes" in said and "leave it out for world_size=2" in said


@pytest.mark.parametrize("process", [0, 1])
def test_variables_of_an_earlier_launch_are_said_and_a_signal_ends_the_wait(tmp_path, process):
    with programs(([], [f"output={tmp_path}", *QUICK], by_hand(process, free_port()))) as (program,):
        waits = next(line for line in program.stderr if "waits for" in line)
        time.sleep(5.0 * (process == 0))  # it has opened its world
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
