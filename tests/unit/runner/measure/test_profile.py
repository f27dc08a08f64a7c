"""The profile: traces made by hand, and one real trace of a CPU."""

import gzip
import json
import time
from types import SimpleNamespace

import pytest
import torch

from attention.profiling import phase
from runner.measure.profile import analyse, profile
from runner.record.result import Tables


def event(category, name, start, stop):
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": stop - start}


CUDA = [
    event("kernel", "flash_fwd_kernel", 1000, 11_000),
    event("kernel", "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", 6000, 21_000),
    event("gpu_memcpy", "Memcpy PtoP (Device -> Device)", 19_000, 25_000),
    event("kernel", "flash_fwd_kernel", 31_000, 37_000),
    event("gpu_memset", "Memset (Device)", 37_000, 41_000),
    # none of these occupies the device
    event("cuda_runtime", "cudaLaunchKernel", 0, 90_000),
    event("user_annotation", "comm_kv", 0, 90_000),
    {"ph": "i", "cat": "kernel", "name": "instant", "ts": 80_000},
]
ALIGN = "ncclDevKernel_AllReduce_MinMax_u8_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def analysed(events, waits=()):
    return analyse(events, "cuda", waits)


def test_a_trace_tells_compute_from_communication_and_has_a_table_of_kernels_the_longest_first():
    profile, table = analysed(CUDA)
    # from 1 to 41 ms; NCCL and the copy between devices from 6 to 25, compute until 11 and from 31
    names = ("stretch", "compute", "communication", "overlapped", "exposed_communication", "idle")
    assert [getattr(profile, f"{name}_ms") for name in names] == [40, 20, 19, 5, 14, 6]
    assert profile.overlapped_share == pytest.approx(5 / 19) and analysed([])[0].overlapped_share is None
    assert [row["kernel"][:6] for row in table] == ["flash_", "ncclDe", "Memcpy", "Memset"]
    assert table[0] == {"kernel": "flash_fwd_kernel", "calls": 2, "total_ms": 16, "mean_us": 8000}


WAITING = [
    event("kernel", ALIGN, 60_000, 61_000),  # the second pass, out of order
    event("kernel", ALIGN, 0, 1000),
    event("kernel", "flash_fwd_kernel", 1000, 11_000),
    event("gpu_memcpy", "Memcpy PtoP (Device -> Device)", 9000, 13_000),
    event("kernel", "flash_fwd_kernel", 31_000, 41_000),
    event("kernel", "flash_bwd_kernel", 61_000, 71_000),
]
LEAD = event("kernel", "at::cuda::(anonymous namespace)::spin_kernel(long)", 45_000, 55_000)


@pytest.mark.parametrize(
    ("events", "waits", "exposed", "idle", "known"),
    [
        (WAITING, [], 2, 37, True),  # 13 to 31 and 41 to 60
        (WAITING, [[(9, 30)]], 2, 37, False),  # of another number of passes: not placed
        ([*WAITING, LEAD], [[(9, 30)], [(10, 14), (0, 1)]], 20 + 4, 37 - 18 - 10, True),  # 11 to 31, 71 to 75
    ],
)
def test_a_stream_that_waits_is_exposed_communication_where_nothing_computes(events, waits, exposed, idle, known):
    """Two passes: what stands still in a trace is a wait by the recorder's events, in ms since each pass was aligned."""
    found, _ = analysed(events, waits)
    assert (found.exposed_communication_ms, found.idle_ms, found.waits_known) == (exposed, idle, known)
    assert (found.compute_ms, found.communication_ms) == (30, 4)


def test_a_real_cpu_profile_is_that_of_one_iteration_and_leaves_a_trace(tmp_path):
    def run(which):
        for name in ("comp_block", "comm_kv"):
            with phase(name, 0):
                time.sleep(0.01)

    me = SimpleNamespace(rank=0, world=1, device=torch.device("cpu"), folder=tmp_path / "world", gather=lambda x: [x])
    me.folder.mkdir()
    tables = Tables()
    (about,) = profile(SimpleNamespace(me=me, passes=("forward",), run=run), 4, tmp_path, tables)
    assert about.compute_ms >= 10 <= about.communication_ms  # a sleep is never shorter
    assert about.runs == 4
    assert {(row["rank"], row["kernel"], row["calls"]) for row in tables.kernels} >= {
        (0, "comp_block", 4),
        (0, "comm_kv", 4),
    }
    assert tables.traces == ("trace_rank0.json.gz",) and not list(me.folder.iterdir())
    with gzip.open(tmp_path / "trace_rank0.json.gz", "rt") as trace:
        names = [e["name"] for e in json.load(trace)["traceEvents"]]
    assert names.count("comp_block") == names.count("comm_kv") == 4
