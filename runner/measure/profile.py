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
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from attention.profiling import Recorder, recording
from attention.runtime import private
from runner.launch.rank import Rank
from runner.measure.stopwatch import Stopwatch
from runner.measure.timing import leads_ms, record
from runner.measure.workload import Passes

Span = tuple[float, float]
LEAD = re.compile("spin_kernel")  # of `CudaStopwatch`, as is the next: no variant reduces bytes
ALIGNMENT = re.compile(r"AllReduce_\w+_[ui]8")  # NCCL has several names for a minimum
COMMUNICATION = re.compile(r"nccl|PtoP|Peer|symm|^_exchange$", re.IGNORECASE)
SHOWN = 40  # kernels in the table
IN_MS = ("stretch_ms", "compute_ms", "communication_ms", "overlapped_ms", "exposed_communication_ms", "idle_ms")


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
    x, y = [*a], [*b]
    return covered(x) + covered(y) - covered(x + y)


def _kind(event: dict[str, Any], device: str) -> str | None:
    """What a trace event is: compute, communication, alignment, lead, other (only in the kernel table), or None."""
    category, name = event.get("cat", ""), event["name"]
    if device == "cuda":
        if category not in ("kernel", "gpu_memcpy", "gpu_memset"):
            return None
        patterns = {"alignment": ALIGNMENT, "lead": LEAD, "communication": COMMUNICATION}
        return next((kind for kind, pattern in patterns.items() if pattern.search(name)), "compute")
    by_prefix = {"comm_": "communication", "comp_": "compute"}
    return by_prefix.get(name[:5]) or ("other" if category == "cpu_op" else None)


def analyse(events: list[dict[str, Any]], device: str, waits: Sequence[Sequence[Span]] = ()) -> dict[str, Any]:
    """ms of one rank's trace events (Chrome format, us). waits: for each pass, when its compute stream waited for a transfer,
    in ms since the pass was aligned."""
    spans: dict[str, list[Span]] = defaultdict(list)
    kernels: dict[str, list[float]] = defaultdict(list)
    for event in events:
        kind = _kind(event, device) if event.get("ph") == "X" else None
        if kind is not None:
            start, length = float(event["ts"]), float(event.get("dur", 0))
            spans[kind].append((start, start + length))
            if kind not in ("alignment", "lead"):
                kernels[event["name"]].append(length)
    compute, communication = spans["compute"], spans["communication"]
    busy, moving, both = covered(compute), covered(communication), overlap(compute, communication)
    waiting: list[Span] = []
    placed = len(waits) == len(spans["alignment"])  # else it is unknown where they belong
    if placed:
        for (_, start), pass_waits in zip(sorted(spans["alignment"]), waits, strict=True):
            waiting += [(start + a * 1e3, start + b * 1e3) for a, b in pass_waits]
    everything = merged([*compute, *communication, *waiting])
    length = everything[-1][1] - everything[0][0] if everything else 0.0
    pauses = [span for span in spans["alignment"] + spans["lead"] if everything and span[0] > everything[0][0]]
    length -= covered(pauses) - overlap(pauses, everything)
    us = (length, busy, moving, both, covered(everything) - busy, length - covered(everything))
    table = [
        {"kernel": name, "calls": len(each), "total_ms": sum(each) / 1e3, "mean_us": sum(each) / len(each)}
        for name, each in sorted(kernels.items(), key=lambda item: -sum(item[1]))
    ]
    return {
        **{name: x / 1e3 for name, x in zip(IN_MS, us, strict=True)},
        "overlapped_share": both / moving if moving else None,
        "waits_known": placed or not any(waits),
        "kernels": table,
    }


def _write(path: Path, text: str) -> None:
    """Writes a trace, whole or not at all. Raises OSError when the disk is full."""
    part = path.with_name(f".{path.name}")
    try:
        with gzip.open(part, "wt", compresslevel=3) as out:
            out.write(text)
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)
        raise


def profile(
    me: Rank, work: Passes, watch: Stopwatch, runs: int, folder: Path | None
) -> tuple[dict[str, Any], list[str]]:
    """Profile `runs` iterations on every rank. Returns this rank's analysis, by iteration, and the trace's file name
    (written into `folder`, on this rank's node)."""
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if me.device.type == "cuda" else [])
    # on a CPU the transport has its own thread
    extra: dict[str, Any] = private.profile_all_threads() if me.device.type == "cpu" else {}
    recorder = Recorder(me.device, torch.profiler.record_function)

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
    found |= {key: found[key] / runs for key in IN_MS} | {"runs": runs, "kernels": found["kernels"][:SHOWN]}
    if folder is None:
        return found, []
    name = f"trace_rank{me.rank}.json.gz"
    _write(folder / name, text)
    return found, [name]
