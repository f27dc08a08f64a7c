"""The profiler method: an additional pass under torch.profiler, with a trace and a kernel table for each rank. From the
trace's intervals: the busy time of compute and of communication, their overlap, and how much communication is exposed. Of
the last iteration also when each kernel ran, on one clock for all ranks.

On a CPU the intervals are the executors' phases, which the recorder writes into the trace. On CUDA a trace shows nothing
while a stream waits for a remote rank's flag, so these waits come from the recorder's events. There the CPU also gets ahead
of the GPU by what the profiler costs it, which would appear as idle time otherwise."""

from __future__ import annotations

import gzip
import json
import platform
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from attention.gpu import private
from attention.profiling import WHOLE, Recorder, recording
from runner.environment import boot_id
from runner.launch.rank import Rank
from runner.measure.phases import Row, on_one_clock
from runner.measure.stopwatch import Stopwatch
from runner.measure.timing import Around, record
from runner.measure.workload import Passes

Span = tuple[float, float]
PATTERNS = {  # of kernels' names; others compute
    "alignment": re.compile(r"AllReduce_\w+_[ui]8"),  # of `CudaStopwatch`, as is the next: no variant reduces bytes
    "lead": re.compile("spin_kernel"),
    "communication": re.compile(r"nccl|PtoP|Peer|symm|^_exchange$", re.IGNORECASE),
}
SHOWN = 40  # kernels in the table
MOST_TIMES = 400  # intervals of a rank's kernels that are kept, the longest
PASS = "pass "  # with the pass: the range around it in a trace


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


def _spans(events: Iterable[dict[str, Any]], device: str) -> list[tuple[Span, str, str]]:
    """When each event of a trace that counts was, in us, with its name and what it is: compute, communication, alignment,
    lead, pass, or other (only in the kernel table)."""
    spans = []
    for event in events:
        if event.get("ph") == "X" and (kind := _kind(event.get("cat", ""), event["name"], device)):
            start = float(event["ts"])
            spans.append(((start, start + float(event.get("dur", 0))), event["name"], kind))
    return sorted(spans)


def _kind(category: str, name: str, device: str) -> str | None:
    if device == "cuda":
        if category not in ("kernel", "gpu_memcpy", "gpu_memset"):
            return None
        return next((kind for kind, pattern in PATTERNS.items() if pattern.search(name)), "compute")
    if name.startswith(PASS) and category == "user_annotation":
        return "pass"
    by_prefix = {"comm_": "communication", "comp_": "compute"}
    return by_prefix.get(name[:5]) or ("other" if category == "cpu_op" else None)


def analyse(
    events: list[dict[str, Any]], device: str, waits: Sequence[Sequence[Span]] = (), runs: int = 1
) -> dict[str, Any]:
    """ms an iteration, of `runs`, of one rank's trace events (Chrome format, us). waits: for each pass, when its compute stream waited for a transfer,
    in ms since the pass was aligned."""
    spans: dict[str, list[Span]] = defaultdict(list)
    kernels: dict[str, list[float]] = defaultdict(list)
    for (start, stop), name, kind in _spans(events, device):
        spans[kind].append((start, stop))
        if kind not in ("alignment", "lead", "pass"):
            kernels[name].append(stop - start)
    compute, communication = spans["compute"], spans["communication"]
    placed = len(waits) == len(spans["alignment"])  # else it is unknown where they belong
    waiting = [
        (start + a * 1e3, start + b * 1e3)
        for (_, start), pass_waits in (zip(spans["alignment"], waits, strict=True) if placed else ())
        for a, b in pass_waits
    ]
    everything = merged([*compute, *communication, *waiting])
    length = everything[-1][1] - everything[0][0] if everything else 0.0
    pauses = [span for span in spans["alignment"] + spans["lead"] if everything and span[0] > everything[0][0]]
    length -= covered(pauses) - overlap(pauses, everything)
    busy, moving, both, whole = (
        covered(compute),
        covered(communication),
        overlap(compute, communication),
        covered(everything),
    )
    us = {
        "stretch": length,
        "compute": busy,
        "communication": moving,
        "overlapped": both,
        "exposed_communication": whole - busy,
        "idle": length - whole,
    }
    table = [
        {"kernel": name, "calls": len(lengths), "total_ms": sum(lengths) / 1e3, "mean_us": fmean(lengths)}
        for name, lengths in sorted(kernels.items(), key=lambda item: -sum(item[1]))[:SHOWN]
    ]
    return {
        **{f"{name}_ms": x / 1e3 / runs for name, x in us.items()},
        "overlapped_share": both / moving if moving else None,
        "waits_known": placed or not any(waits),
        "kernels": table,
    }


def kernel_times(trace: dict[str, Any], device: str, order: Sequence[str]) -> tuple[list[Row], int, int]:
    """When each kernel of a rank's last iteration ran, as rows without `rank`, in ms since that iteration began; on a CPU the
    executors' phases. In each pass (`order`: of an iteration) the first row is `pass`, the whole. Also how many kernels
    were left out, the shortest, and when the iteration began, in ns of the host's clock.

    A pass begins on CUDA where the all-reduce that aligns the ranks ends, on a CPU where its range does. Without these
    there are no rows."""
    spans = _spans(trace["traceEvents"], device)
    begins = [span for span, _, kind in spans if kind == "pass"]  # on a CPU with their ends
    begins += [(stop, stop) for (_, stop), _, kind in spans if kind == "alignment"]
    begins = begins[-len(order) :]
    if len(begins) < len(order):
        return [], 0, 0
    zero = begins[0][0]
    kernels = [entry for entry in spans if entry[0][0] >= zero and entry[2] in ("compute", "communication")]
    kept = sorted(sorted(kernels, key=lambda entry: entry[0][0] - entry[0][1])[:MOST_TIMES])
    rows: list[Row] = []
    ends = [start for start, _ in begins[1:]] + [float("inf")]
    for which, (start, stop), end in zip(order, begins, ends, strict=True):
        last = max([stop, *(span[1] for span, *_ in kernels if start <= span[0] < end)])
        within = [entry for entry in kept if start <= entry[0][0] < end]
        for (a, b), name, kind in [((start, last), WHOLE, WHOLE), *within]:
            times = {"start_ms": (a - zero) / 1e3, "stop_ms": (b - zero) / 1e3}
            rows.append({"pass": which, "kernel": name, "kind": kind, **times})
    # a float holds no time since 1970 in ns
    return rows, len(kernels) - len(kept), int(trace.get("baseTimeNanoseconds", 0)) + round(zero * 1e3)


def together(everyone: Sequence[tuple[list[Row], int, Any]]) -> list[Row]:
    """The rows of all ranks on one clock, in ms since the first rank began. everyone: by rank, its rows, when they begin in
    ns of its host's clock, and which clock that is. The clocks of several hosts are aligned as those of phases are."""
    if not all(rows for rows, *_ in everyone):
        return []
    zero = min(begin for _, begin, _ in everyone)
    shifted = [
        {"iteration": 0, "rank": rank, **row, "phase": row["kernel"]}
        | {key: row[key] + (begin - zero) / 1e6 for key in ("start_ms", "stop_ms")}
        for rank, (rows, begin, _) in enumerate(everyone)
        for row in rows
    ]
    on_one_clock(shifted, [clock for *_, clock in everyone])
    return shifted


def profile(
    me: Rank, work: Passes, watch: Stopwatch, runs: int, folder: Path | None
) -> tuple[dict[str, Any], list[str]]:
    """Profile `runs` iterations on every rank. Returns this rank's analysis, by iteration, with `kernel_times` as `together`
    takes them, and the trace's file name (written into `folder`, on this rank's node)."""
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if me.device.type == "cuda" else [])
    # on a CPU the transport has its own thread
    extra: dict[str, Any] = private.profile_all_threads() if me.device.type == "cpu" else {}
    recorder = Recorder(me.device, torch.profiler.record_function)

    @contextmanager
    def observed() -> Iterator[torch.profiler.profile]:
        with torch.profiler.profile(activities=activities, **extra) as profiler, recording(recorder):
            yield profiler

    ranged = Around(work, lambda which: torch.profiler.record_function(f"{PASS}{which}"))
    passes, profiler = record(ranged, watch, runs, recorder, observed)
    waits = [[s.since(each.start) for s in each.spans if s.name.startswith("wait_")] for each in passes]
    scratch = me.folder / f"trace{me.rank}.json"
    profiler.export_chrome_trace(str(scratch))
    text = scratch.read_text()
    scratch.unlink()
    trace = json.loads(text)
    analysis = analyse(trace["traceEvents"], me.device.type, waits, runs)
    rows, left_out, begin = kernel_times(trace, me.device.type, work.passes)
    analysis |= {
        "kernel_times": (rows, begin, boot_id() or platform.node()),
        "kernels_left_out": left_out,
        "runs": runs,
    }
    if folder is None:
        return analysis, []
    name = f"trace_rank{me.rank}.json.gz"
    part = folder / f".{name}"
    try:
        with gzip.open(part, "wt", compresslevel=3) as out:
            out.write(text)
        part.replace(folder / name)
    finally:  # raises OSError when the disk is full
        part.unlink(missing_ok=True)
    return analysis, [name]
