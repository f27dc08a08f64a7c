"""The profiler method: a pass of its own under torch.profiler, a trace a rank, a kernel table, and from the trace's
intervals the busy time of compute and of communication, how much of them overlaps, and how much communication is
exposed. On a CPU the same from the executors' phases, which the recorder makes ranges of the trace. On CUDA a stream
that waits for a peer's flag runs nothing that a trace could show: there the recorder's events say when it stood still.
And there the hosts get ahead of their GPUs by what the profiler costs them, or it would be seen as idle time."""

from __future__ import annotations

import gzip
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from attention.profiling import Recorder, recording
from attention.runtime import private
from runner.launch.rank import Rank
from runner.measure.timing import Stopwatch, leads_ms, record
from runner.measure.workload import Workpiece

Span = tuple[float, float]
# the stopwatch's, see runner.measure.timing; NCCL does a minimum by kernels of several names, and no variant reduces
# bytes
ALIGNMENT = re.compile(r"AllReduce_\w+_[ui]8")
LEAD = re.compile("spin_kernel")  # the stopwatch's, too
COMMUNICATION = re.compile(r"nccl|PtoP|Peer|symm|^_exchange$", re.IGNORECASE)
SHOWN = 40


def merged(spans: Iterable[Span]) -> list[Span]:
    """The union of intervals, disjoint and in order."""
    result: list[Span] = []
    for start, stop in sorted(spans):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(stop, result[-1][1]))
        else:
            result.append((start, stop))
    return result


def covered(spans: Iterable[Span]) -> float:
    return sum(stop - start for start, stop in merged(spans))


def overlap(a: Iterable[Span], b: Iterable[Span]) -> float:
    """How long both are busy."""
    x, y = merged(a), merged(b)
    return covered(x) + covered(y) - covered([*x, *y])


def analyse(
    events: list[dict[str, Any]], device: str, waits: Sequence[Sequence[tuple[float, float]]] = ()
) -> dict[str, Any]:
    """Of one rank's trace events (Chrome format, us). ms a profiled stretch. `waits`: of each pass, when its compute
    stream stood still for a transfer, in ms since the pass was aligned."""
    compute: list[Span] = []
    alignment: list[Span] = []
    lead: list[Span] = []
    communication: list[Span] = []
    kernels: dict[str, list[float]] = defaultdict(list)
    for event in events:
        if event.get("ph") != "X":
            continue
        category, name = event.get("cat", ""), event["name"]
        span = (float(event["ts"]), float(event["ts"]) + float(event.get("dur", 0)))
        if device == "cuda":
            if category not in ("kernel", "gpu_memcpy", "gpu_memset"):
                continue
            if ALIGNMENT.search(name):
                alignment.append(span)
                continue
            if LEAD.search(name):
                lead.append(span)
                continue
            (communication if COMMUNICATION.search(name) else compute).append(span)
        elif name.startswith("comm_"):
            communication.append(span)
        elif name.startswith("comp_"):
            compute.append(span)
        elif category != "cpu_op":
            continue
        kernels[name].append(span[1] - span[0])
    busy = covered(compute)
    moving = covered(communication)
    both = overlap(compute, communication)
    waiting: list[Span] = []
    placed = len(waits) == len(alignment)  # else it is not known where they belong
    if placed:
        for (_, start), spans in zip(sorted(alignment), waits, strict=True):
            waiting += [(start + a * 1e3, start + b * 1e3) for a, b in spans]
    everything = merged([*compute, *communication, *waiting])
    length = everything[-1][1] - everything[0][0] if everything else 0.0
    pauses = [span for span in (*alignment, *lead) if everything and span[0] > everything[0][0]]
    length -= covered(pauses) - overlap(pauses, everything)
    table = [
        {"kernel": name, "calls": len(us), "total_ms": sum(us) / 1e3, "mean_us": sum(us) / len(us)}
        for name, us in sorted(kernels.items(), key=lambda item: -sum(item[1]))
    ]
    return {
        "stretch_ms": length / 1e3,
        "compute_ms": busy / 1e3,
        "communication_ms": moving / 1e3,
        "overlapped_ms": both / 1e3,
        "overlapped_share": both / moving if moving else None,
        "exposed_communication_ms": (covered(everything) - busy) / 1e3,
        "idle_ms": (length - covered(everything)) / 1e3,
        "waits_known": placed or not any(waits),
        "kernels": table,
    }


def _write(path: Path, text: str) -> None:
    """A trace, whole or not at all. Raises OSError when the disk is full."""
    part = path.with_name(f".{path.name}")
    try:
        with gzip.open(part, "wt", compresslevel=3) as out:
            out.write(text)
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)
        raise


def profile(
    me: Rank, work: Workpiece, watch: Stopwatch, runs: int, folder: Path | None
) -> tuple[dict[str, Any], list[str]]:
    """Profile `runs` iterations on every rank. Returns this rank's analysis, by iteration, and the trace's file name
    (written into `folder`, on this rank's node)."""
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if me.device.type == "cuda" else [])
    extra: dict[str, Any] = {}
    if me.device.type == "cpu":  # the transport has a thread of its own
        extra = private.profile_all_threads()
    recorder = Recorder(me.device, annotate=True)

    @contextmanager
    def observed() -> Iterator[torch.profiler.profile]:
        with torch.profiler.profile(activities=activities, **extra) as profiler, recording(recorder):
            yield profiler

    leads = leads_ms(work, watch, observed)
    recorder.spans.clear()
    with observed() as profiler:
        passes = record(work, watch, runs, recorder, leads)
    waits = [[s.since(each.start) for s in each.spans if s.name.startswith("wait_")] for each in passes]
    scratch = me.folder / f"trace{me.rank}.json"
    profiler.export_chrome_trace(str(scratch))
    text = scratch.read_text()
    scratch.unlink()
    found = analyse(json.loads(text)["traceEvents"], me.device.type, waits)
    for key in ("stretch_ms", "compute_ms", "communication_ms", "overlapped_ms", "exposed_communication_ms", "idle_ms"):
        found[key] /= runs
    found["runs"] = runs
    files = []
    if folder is not None:
        name = f"trace_rank{me.rank}.json.gz"
        _write(folder / name, text)
        files.append(name)
    found["kernels"] = found["kernels"][:SHOWN]
    return found, files
