"""The profiler method: an additional pass under torch.profiler, with a trace and a kernel table for each rank. From the
trace's intervals: the busy time of compute and of communication, their overlap, and how much communication is exposed.

On a CPU the intervals are the executors' phases, which the recorder writes into the trace. On CUDA a trace shows nothing
while a stream waits for a remote rank's flag, so these waits come from the recorder's events. There the CPU also gets ahead
of the GPU by what the profiler costs it, which would appear as idle time otherwise."""

from __future__ import annotations

import gzip
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean

import torch
from torch.profiler import ProfilerActivity

from attention.gpu import private
from attention.profiling import Recorder
from runner.launch.files import write
from runner.measure.phases import record
from runner.measure.statistics import Fields
from runner.measure.stopwatch import Stopwatch
from runner.measure.timing import Called
from runner.measure.workload import Workload
from runner.record.fields import RankProfile
from runner.record.result import Tables

Span = tuple[float, float]
PATTERNS = {  # of kernels' names; others compute
    "alignment": re.compile(r"AllReduce_\w+_[ui]8"),  # of a `Stopwatch`, as is the next: no variant reduces bytes
    "lead": re.compile("spin_kernel"),
    "communication": re.compile(r"nccl|PtoP|Peer|symm|^_exchange$", re.IGNORECASE),
}
SHOWN = 40  # kernels in the table


def covered(spans: Iterable[Span]) -> float:
    """How long at least one of the intervals lasts."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total


def _kind(category: str, name: str, device: str) -> str | None:
    """What an event of a trace is: compute, communication, alignment, lead, or other (only in the kernel table); None: it does not
    count."""
    if device == "cuda":
        kind = next((kind for kind, pattern in PATTERNS.items() if pattern.search(name)), "compute")
        return kind if category in ("kernel", "gpu_memcpy", "gpu_memset") else None
    by_prefix = {"comm_": "communication", "comp_": "compute"}
    return by_prefix.get(name[:5]) or ("other" if category == "cpu_op" else None)


def analyse(
    trace: Iterable[Fields], device: str, waits: Sequence[Sequence[Span]] = (), runs: int = 1
) -> tuple[RankProfile, list[Fields]]:
    """ms an iteration, of `runs`, of one rank's trace (Chrome format), and the table of its kernels. waits: for each pass, when its compute stream waited for a transfer, in
    ms since the pass was aligned."""
    spans: dict[str, list[Span]] = defaultdict(list)
    kernels: dict[str, list[float]] = defaultdict(list)
    for event in trace:
        if event.get("ph") == "X" and (kind := _kind(event.get("cat", ""), event["name"], device)):
            start, length = float(event["ts"]), float(event.get("dur", 0))
            spans[kind].append((start, start + length))
            if kind not in ("alignment", "lead"):
                kernels[event["name"]].append(length)
    compute, communication, aligned = spans["compute"], spans["communication"], sorted(spans["alignment"])
    everything = compute + communication
    if placed := len(waits) == len(aligned):  # else it is unknown where they belong
        for (_, start), pass_waits in zip(aligned, waits, strict=True):
            everything += [(start + a * 1e3, start + b * 1e3) for a, b in pass_waits]
    busy, moving, whole = covered(compute), covered(communication), covered(everything)
    both, idle = busy + moving - covered(compute + communication), 0.0
    if everything:
        begin = min(everything)[0]
        pauses = [span for span in aligned + spans["lead"] if span[0] > begin]
        idle = max(stop for _, stop in everything) - begin - covered(everything + pauses)
    a_ms = 1e3 * runs
    profile = RankProfile(
        stretch_ms=(whole + idle) / a_ms,
        compute_ms=busy / a_ms,
        communication_ms=moving / a_ms,
        overlapped_ms=both / a_ms,
        overlapped_share=both / moving if moving else None,
        exposed_communication_ms=(whole - busy) / a_ms,
        idle_ms=idle / a_ms,
        waits_known=placed or not any(waits),
        runs=runs,
    )
    table = [
        {"kernel": name, "calls": len(lengths), "total_ms": sum(lengths) / 1e3, "mean_us": fmean(lengths)}
        for name, lengths in sorted(kernels.items(), key=lambda item: -sum(item[1]))[:SHOWN]
    ]
    return profile, table


def profile(work: Workload, runs: int, folder: Path, tables: Tables) -> list[RankProfile]:
    """Of `runs` iterations, by rank, with their kernels and traces in `tables`. Each rank writes its trace into
    `folder`, on its node. Raises OSError when the disk is full."""
    me, watch = work.me, Stopwatch(work.me)
    activities, more = [ProfilerActivity.CPU, ProfilerActivity.CUDA], Fields()
    if not watch.on_gpu:
        activities, more = activities[:1], private.profile_all_threads()  # the transport has its own thread
    ranges = torch.profiler.record_function

    def run(which: str) -> None:
        with ranges(f"pass {which}"):
            work.run(which)

    observed = partial(torch.profiler.profile, activities=activities, **more)
    passes, profiler = record(Called(work.passes, run), watch, runs, Recorder(me.device, ranges), observed)
    waits = [
        [span.since(whole.begin) for span in spans if span.name.startswith("wait_")] for _, (whole, *spans) in passes
    ]
    scratch = me.folder / f"trace{me.rank}.json"
    profiler.export_chrome_trace(str(scratch))
    text = scratch.read_text()
    scratch.unlink()
    name = f"trace_rank{me.rank}.json.gz"
    about, kernels = analyse(json.loads(text)["traceEvents"], me.device.type, waits, runs)
    write(folder / name, gzip.compress(text.encode(), 3))
    profiles, of_ranks, tables.traces = zip(*me.gather((about, kernels, name)), strict=True)
    tables.kernels = [{"rank": rank, **row} for rank, rows in enumerate(of_ranks) for row in rows]
    return list(profiles)
