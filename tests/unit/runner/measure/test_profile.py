"""The profile: intervals by hand, traces made by hand, and one real trace of a CPU."""

import gzip
import json
import time

import pytest
import torch
import torch.distributed as dist

from attention.profiling import phase
from runner.launch.rank import Rank
from runner.measure import profile as measured
from runner.measure.profile import analyse, covered, kernel_times, merged, overlap, profile, together
from runner.measure.stopwatch import CpuStopwatch


def test_merged_intervals_are_disjoint_and_in_order():
    assert merged([(5, 7), (0, 2), (1, 3), (3, 4)]) == [(0, 4), (5, 7)]
    assert merged([(0, 10), (2, 3)]) == [(0, 10)]
    assert merged([]) == []


def test_covered_counts_nothing_twice():
    assert covered([(0, 4), (2, 6), (8, 9), (8, 9)]) == 7
    assert covered([]) == 0


def test_overlap_is_where_both_are_busy():
    assert overlap([(0, 10), (20, 30)], [(5, 25)]) == 10
    assert overlap([(0, 10)], [(2, 4), (3, 6), (9, 12)]) == 5
    assert overlap([(0, 10)], [(10, 20)]) == 0
    assert overlap([], [(0, 1)]) == 0


def event(category: str, name: str, start: float, stop: float) -> dict:
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": stop - start}


CUDA = [
    event("kernel", "flash_fwd_kernel", 1000, 11_000),
    event("kernel", "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", 6000, 21_000),
    event("gpu_memcpy", "Memcpy PtoP (Device -> Device)", 19_000, 25_000),
    event("kernel", "flash_fwd_kernel", 31_000, 37_000),
    event("gpu_memset", "Memset (Device)", 37_000, 41_000),
    # none of these occupies the device
    event("cpu_op", "aten::mm", 0, 90_000),
    event("cuda_runtime", "cudaLaunchKernel", 0, 90_000),
    event("gpu_user_annotation", "comp_block", 0, 90_000),
    event("user_annotation", "comm_kv", 0, 90_000),
    {"ph": "i", "cat": "kernel", "name": "instant", "ts": 80_000},
    {"ph": "M", "name": "process_name", "args": {}},
]


def test_a_cuda_trace_tells_compute_from_communication():
    found = analyse(CUDA, "cuda")
    assert found["stretch_ms"] == 40  # 1 to 41
    assert found["compute_ms"] == 20  # 10 + 6 + 4
    assert found["communication_ms"] == 19  # 6 to 25, NCCL and the copy between devices overlapping
    assert found["overlapped_ms"] == 5  # 6 to 11
    assert found["overlapped_share"] == pytest.approx(5 / 19)
    assert found["exposed_communication_ms"] == 14
    assert found["idle_ms"] == 6  # 25 to 31


def test_a_cuda_kernel_table_has_what_ran_on_the_device_the_longest_first():
    table = analyse(CUDA, "cuda")["kernels"]
    assert [(row["kernel"][:6], row["calls"], row["total_ms"], row["mean_us"]) for row in table] == [
        ("flash_", 2, 16, 8000),
        ("ncclDe", 1, 15, 15_000),
        ("Memcpy", 1, 6, 6000),
        ("Memset", 1, 4, 4000),
    ]


@pytest.mark.parametrize(
    "kernel", ["AllReduce_Sum_u8_RING_LL", "AllReduce_MinMax_u8_RING_LL", "AllReduce_Sum_i8_TREE_LL"]
)
def test_what_aligns_the_ranks_is_neither_communication_nor_part_of_the_stretch(kernel):
    name = f"ncclDevKernel_{kernel}(ncclDevKernelArgsStorage<4096ul>)"
    between = [event("kernel", name, 0, 900), event("kernel", name, 41_000, 46_000)]
    after = [event("kernel", "flash_bwd_kernel", 46_000, 50_000)]
    found = analyse([*CUDA, *between, *after], "cuda")
    assert (found["communication_ms"], found["exposed_communication_ms"]) == (19, 14)
    assert (found["stretch_ms"], found["idle_ms"]) == (44, 6)
    assert not any("AllReduce" in row["kernel"] for row in found["kernels"])
    reduced = event(
        "kernel", "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 50_000, 51_000
    )
    assert analyse([*CUDA, *after, reduced], "cuda")["communication_ms"] == 20


def test_a_stream_that_waits_is_exposed_communication_where_nothing_computes():
    """Two passes: what stands still in a trace is a wait by the recorder's events, in ms since each pass was aligned."""
    align = "ncclDevKernel_AllReduce_MinMax_u8_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
    events = [
        event("kernel", align, 60_000, 61_000),  # the second pass, out of order
        event("kernel", align, 0, 1000),
        event("kernel", "flash_fwd_kernel", 1000, 11_000),
        event("gpu_memcpy", "Memcpy PtoP (Device -> Device)", 9000, 13_000),
        event("kernel", "flash_fwd_kernel", 31_000, 41_000),
        event("kernel", "flash_bwd_kernel", 61_000, 71_000),
    ]
    without = analyse(events, "cuda")
    assert (without["exposed_communication_ms"], without["idle_ms"]) == (2, 37)  # 13 to 31 and 41 to 60
    found = analyse(events, "cuda", [[(9, 30)], [(10, 14), (0, 1)]])
    assert found["exposed_communication_ms"] == 20 + 4  # 11 to 31, 71 to 75
    assert found["idle_ms"] == 37 - 18
    assert found["stretch_ms"] == without["stretch_ms"] + 4
    assert (found["compute_ms"], found["communication_ms"]) == (30, 4)
    assert found["waits_known"] and without["waits_known"]
    lost = analyse(events, "cuda", [[(9, 30)]])  # of another number of passes: not placed
    assert lost["idle_ms"] == 37 and not lost["waits_known"]
    spin = event("kernel", "at::cuda::(anonymous namespace)::spin_kernel(long)", 45_000, 55_000)
    led = analyse([*events, spin], "cuda", [[(9, 30)], [(10, 14), (0, 1)]])
    assert led["compute_ms"] == 30 and led["idle_ms"] == 37 - 18 - 10


def test_copies_within_a_device_are_compute():
    found = analyse([event("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 0, 1000)], "cuda")
    assert (found["compute_ms"], found["communication_ms"], found["overlapped_share"]) == (1, 0, None)


def test_a_cpu_trace_goes_by_the_phases():
    found = analyse(
        [
            event("user_annotation", "comp_block", 0, 10_000),
            event("user_annotation", "comm_kv", 4000, 16_000),
            event("user_annotation", "wait_kv", 10_000, 16_000),
            event("user_annotation", "comp_merge", 18_000, 20_000),
            event("cpu_op", "aten::mm", 0, 9000),
            event("cpu_op", "aten::add", 18_000, 19_000),
            event("python_function", "run", 0, 50_000),
        ],
        "cpu",
    )
    assert found["compute_ms"] == 12
    assert found["communication_ms"] == 12
    assert found["overlapped_ms"] == 6
    assert found["exposed_communication_ms"] == 6
    assert (found["stretch_ms"], found["idle_ms"]) == (20, 2)
    assert {row["kernel"] for row in found["kernels"]} == {
        "comp_block", "comm_kv", "comp_merge", "aten::mm", "aten::add",
    }  # fmt: skip


ALIGN = "ncclDevKernel_AllReduce_MinMax_u8_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def two_iterations(late: float, base_ns: int) -> dict:
    """A trace of a GPU whose passes begin `late` us after the 1000th, 50,000th and so on since 1970 in us, its times relative to
    base_ns."""
    events = []
    for begin, name in zip((1000, 50_000, 100_000, 150_000), ("fwd", "bwd", "fwd", "bwd"), strict=True):
        events += [
            event("kernel", "spin_kernel", begin - 800, begin - 100),
            event("kernel", ALIGN, begin - 100, begin + late),
            event("kernel", f"flash_{name}", begin + late, begin + 10_000),
            event("kernel", "ncclDevKernel_SendRecv(x)", begin + 5000, begin + 12_000),
        ]
    moved = [{**each, "ts": each["ts"] - base_ns / 1e3} for each in reversed(events)]
    return {"baseTimeNanoseconds": base_ns, "traceEvents": [*moved, {"ph": "M", "name": "process_name"}]}


def test_the_kernels_of_the_last_iteration_are_on_one_clock_whatever_the_traces_count_from():
    """Rank 1 begins 40 us later."""
    traces = [two_iterations(0, 0), two_iterations(40, 900_000)]
    found = [(*kernel_times(trace, "cuda", ("forward", "backward")), "host") for trace in traces]
    rows = together([(rows, begin, clock) for rows, _, begin, clock in found])
    assert [left_out for _, left_out, *_ in found] == [0, 0]
    assert [tuple(row[key] for key in ("rank", "pass", "kernel", "kind", "start_ms", "stop_ms")) for row in rows] == [
        (0, "forward", "pass", "pass", 0, 12),
        (0, "forward", "flash_fwd", "compute", 0, 10),
        (0, "forward", "ncclDevKernel_SendRecv(x)", "communication", 5, 12),
        (0, "backward", "pass", "pass", 50, 62),
        (0, "backward", "flash_bwd", "compute", 50, 60),
        (0, "backward", "ncclDevKernel_SendRecv(x)", "communication", 55, 62),
        (1, "forward", "pass", "pass", 0.04, 12),
        (1, "forward", "flash_fwd", "compute", 0.04, 10),
        (1, "forward", "ncclDevKernel_SendRecv(x)", "communication", 5, 12),
        (1, "backward", "pass", "pass", 50.04, 62),
        (1, "backward", "flash_bwd", "compute", 50.04, 60),
        (1, "backward", "ncclDevKernel_SendRecv(x)", "communication", 55, 62),
    ]
    # the clocks of two hosts are shifted so that the ranks begin together
    apart = together([(rows, begin, rank) for rank, (rows, _, begin, _) in enumerate(found)])
    assert [row["start_ms"] for row in apart if row["kernel"] == "pass"] == [0, 50, 0, 50]


def test_of_many_kernels_the_longest_are_kept_and_without_an_alignment_there_are_none(monkeypatch):
    monkeypatch.setattr(measured, "MOST_TIMES", 3)
    trace = two_iterations(0, 0)
    rows, left_out, _ = kernel_times(trace, "cuda", ("forward", "backward"))
    assert left_out == 1
    assert sorted(row["kind"] for row in rows) == ["communication", "compute", "compute", "pass", "pass"]
    trace["traceEvents"] = [each for each in trace["traceEvents"] if each["name"] != ALIGN]
    without = kernel_times(trace, "cuda", ("forward", "backward"))
    assert without == ([], 0, 0)
    assert together([(rows, 0, "host"), ([], 0, "host")]) == []


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_an_empty_trace_is_all_zeros(device):
    found = analyse([], device)
    assert found.pop("kernels") == []
    assert found.pop("overlapped_share") is None
    assert found.pop("waits_known") is True
    assert set(found.values()) == {0}


@pytest.fixture
def alone(tmp_path):
    """The only rank of a world in this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    folder = tmp_path / "world"
    folder.mkdir()
    yield Rank(0, 1, torch.device("cpu"), folder, dist.group.WORLD)
    dist.destroy_process_group()


def test_a_real_cpu_profile_is_that_of_one_iteration_and_leaves_a_trace(alone, tmp_path):
    class Sleeps:
        passes = ("forward",)

        def run(self, which: str) -> None:
            with phase("comp_block", 0):
                torch.ones(8).add_(1)
                time.sleep(0.02)
            with phase("comm_kv", 0):
                time.sleep(0.01)

    start = time.perf_counter()
    found, files = profile(alone, Sleeps(), CpuStopwatch(None), 4, tmp_path)
    each_ms = (time.perf_counter() - start) * 1e3 / 4
    assert found["compute_ms"] >= 20 and found["communication_ms"] >= 10
    assert found["compute_ms"] + found["communication_ms"] <= each_ms
    assert found["overlapped_ms"] == pytest.approx(0, abs=0.01)
    assert found["runs"] == 4 and found["kernels_left_out"] == 0
    rows = together([found["kernel_times"]])
    assert [(row["pass"], row["kernel"], row["kind"]) for row in rows] == [
        ("forward", "pass", "pass"), ("forward", "comp_block", "compute"), ("forward", "comm_kv", "communication"),
    ]  # fmt: skip
    whole, block, transfer = ((row["start_ms"], row["stop_ms"]) for row in rows)
    assert whole[0] == 0 <= block[0] < block[1] <= transfer[0] < transfer[1] <= whole[1]
    assert block[1] - block[0] >= 20 and transfer[1] - transfer[0] >= 10
    assert files == ["trace_rank0.json.gz"]
    with gzip.open(tmp_path / files[0], "rt") as trace:
        names = [e["name"] for e in json.load(trace)["traceEvents"]]
    assert names.count("comp_block") == names.count("comm_kv") == 4
    assert list(alone.folder.iterdir()) == []
