"""Phases of a run: an additional pass in which each phase is recorded and each byte that arrives is counted, and a table
that adds up: compute, transfers and waiting on each rank. Each phase also has its begin and end on one clock for all ranks."""

from __future__ import annotations

import platform
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from statistics import fmean, median, pstdev
from typing import Any

import torch

from attention.profiling import WHOLE, Recorder, in_order, recording
from runner.environment import boot_id
from runner.launch.rank import Rank
from runner.measure import timing
from runner.measure.stopwatch import Stopwatch
from runner.measure.workload import Workload

Row = dict[str, Any]  # iteration, rank, pass, phase, step, ms, start_ms, stop_ms
STRAGGLER = 1.1  # times the median over the ranks
ADD_UP = ("comp_", "wait_")  # with `other` these phases add up to the pass; all others overlap them


def measure(me: Rank, work: Workload, watch: Stopwatch, runs: int, nvtx: bool = False) -> dict[str, Any]:
    """`phase_rows`, `phases` and `comm` of the result, from all ranks. nvtx: passes and phases are NVTX ranges."""
    recorder = Recorder(me.device, torch.cuda.nvtx.range if nvtx else None)
    received: dict[str, dict[str, int]] = {}  # by this rank in the last run of each pass

    @contextmanager
    def counted(which: str) -> Iterator[None]:
        counter = work.transport.bytes_received
        counter.clear()
        with recorder.annotate(which):
            yield
        received[which] = dict(counter)

    passes, _ = timing.record(timing.Around(work, counted), watch, runs, recorder, lambda: recording(recorder))
    work.release()
    on_cpu = me.device.type == "cpu"
    origin = 0 if on_cpu else passes[0].start  # processes of a host share the monotonic clock
    mine: list[Row] = []
    for number, recorded in enumerate(passes):
        here = {"iteration": number // len(work.passes), "rank": me.rank, "pass": recorded.which}
        spans = [(WHOLE, watch.elapsed(origin, recorded.start), watch.elapsed(origin, recorded.stop))]
        spans += [(span.name, *span.since(origin)) for span in recorded.spans]
        steps = [-1, *(span.step for span in recorded.spans)]
        for step, ms, (phase, start, stop) in zip(steps, shares(spans), spans, strict=True):
            mine.append({**here, "phase": phase, "step": step, "ms": ms, "start_ms": start, "stop_ms": stop})
    clock = (boot_id() or platform.node()) if on_cpu else me.rank
    by_rank, received_by_rank, clocks = zip(*me.gather((mine, received, clock)), strict=True)
    all_rows = [row for rows in by_rank for row in rows]
    times = by_iteration(all_rows, me.world)
    return {
        "phase_rows": all_rows,
        "phases": {which: summary(iterations) for which, iterations in times.items()},
        "comm": {
            "transport": work.transport.name,
            "bytes_received_by_rank": received_by_rank,
            "bandwidth": bandwidths(times, received_by_rank),
            "clocks": on_one_clock(all_rows, clocks),
        },
    }


def on_one_clock(rows: list[Row], clocks: Sequence[Any]) -> dict[str, Any]:
    """Changes `start_ms` and `stop_ms` of the rows, which are on each rank's clock, to ms since the first pass began.
    clocks: by rank, which clock it reads; ranks of one host read the same on a CPU, and each GPU has its own.

    Ranks start each pass together. Two clocks are aligned so that the first of their ranks to start did so at the same
    time, in the median over the passes. Returns `count`, of the clocks, and `error_ms`: how far a pass's start lies from
    that in the median, on the worst clock; 0 for one clock."""
    starts: dict[Any, dict[tuple[int, str], float]] = {clock: {} for clock in clocks}
    wholes = [row for row in rows if row["phase"] == WHOLE]
    for row in wholes:
        earliest, place = starts[clocks[row["rank"]]], (row["iteration"], row["pass"])
        earliest[place] = min(earliest.get(place, row["start_ms"]), row["start_ms"])
    first = starts[clocks[0]]
    ahead = {clock: [earliest[place] - first[place] for place in first] for clock, earliest in starts.items()}
    offsets = {clock: median(lead) for clock, lead in ahead.items()}
    zero = min(row["start_ms"] - offsets[clocks[row["rank"]]] for row in wholes)
    for row in rows:
        for key in ("start_ms", "stop_ms"):
            row[key] = round(row[key] - offsets[clocks[row["rank"]]] - zero, 6)
    error = max(median(abs(ms - offsets[clock]) for ms in lead) for clock, lead in ahead.items())
    return {"count": len(starts), "error_ms": round(error, 6)}


def shares(spans: Sequence[tuple[str, float, float]]) -> list[float]:
    """The time of each phase (name, begin, end) of one pass, in the unit of the input. A transfer (`comm_*`), a user's
    block and the pass count with their whole length. Of the others, which may be on two streams, every moment counts once: the
    compute phases active at that moment share it; it is waiting only if none is active."""
    taken = [0.0 if name.startswith(ADD_UP) else stop - start for name, start, stop in spans]
    ends = sorted(
        (at, is_end, i)
        for i, (name, *times) in enumerate(spans)
        if name.startswith(ADD_UP)
        for is_end, at in enumerate(times)
    )
    active: set[int] = set()
    for (now, _, i), (then, *_) in pairwise(ends):
        active ^= {i}  # begins or ends
        among = [j for j in active if spans[j][0].startswith("comp_")] or active
        for j in among:
            taken[j] += (then - now) / len(among)
    return taken


Iteration = list[dict[str, float]]  # by rank, the ms of each phase


def by_iteration(rows: list[Row], world: int) -> dict[str, list[Iteration]]:
    """The recorded rows by pass; rows with phase `pass` are a rank's whole pass."""
    passes: dict[str, dict[int, Iteration]] = {}
    for row in rows:
        iterations = passes.setdefault(row["pass"], {})
        ranks = iterations.setdefault(row["iteration"], [defaultdict(float) for _ in range(world)])
        ranks[row["rank"]][row["phase"]] += row["ms"]
    return {which: list(iterations.values()) for which, iterations in passes.items()}


def _medians(iterations: list[Iteration], phase: str) -> list[float]:
    """By rank, over the iterations that have the phase; 0 where there is none."""
    return [median([ms[phase] for ms in times if phase in ms] or [0.0]) for times in zip(*iterations, strict=True)]


def _means(iterations: Sequence[dict[str, float]]) -> dict[str, float]:
    """By phase; one that an iteration lacks counts as 0."""
    names = {name for ms in iterations for name in ms}
    return {name: fmean(ms.get(name, 0.0) for ms in iterations) for name in names}


def summary(iterations: list[Iteration]) -> dict[str, Any]:
    """Of a pass, on the slowest rank: every phase with its share, compute, exposed communication, the rest (`other`: CPU launch
    overhead and gaps), the skew of compute between ranks, and stragglers. These are means over the same iterations, the
    middle half by length of the pass, so they add up. Each phase also has its median, mean, deviation and total over all
    iterations.

    comp_* and wait_* count every moment once (`shares`), so with `other` they add up to the pass; other phases overlap them."""
    totals = _medians(iterations, WHOLE)
    slowest = totals.index(max(totals))
    ordered = sorted(iterations, key=lambda ranks: ranks[slowest][WHOLE])
    kept = max(1, len(ordered) // 2)
    first = (len(ordered) - kept) // 2
    middle = [*map(_means, zip(*ordered[first : first + kept], strict=True))]
    total = middle[slowest][WHOLE]

    def sums(prefix: str) -> list[float]:
        return [sum(ms for name, ms in means.items() if name.startswith(prefix)) for means in middle]

    def share(ms: float) -> float:
        return ms / total if total else 0.0

    def phase(name: str) -> dict[str, Any]:
        every, ms = [ranks[slowest].get(name, 0.0) for ranks in iterations], middle[slowest].get(name, 0.0)
        by_rank = _medians(iterations, name)
        spread = {"mean_ms": fmean(every), "deviation_ms": pstdev(every), "total_ms": sum(every)}
        return {"ms": ms, "share": share(ms), "median_ms": by_rank[slowest], **spread, "by_rank_ms": by_rank}

    names = in_order({name for ranks in iterations for name in ranks[slowest]} - {WHOLE})
    computes, waits = sums("comp_"), sums("wait_")
    compute, exposed, usual = computes[slowest], waits[slowest], median(computes)
    return {
        "rank": slowest,
        "iterations": len(iterations),
        "total_ms": total,
        "phases": {name: phase(name) for name in names},
        "compute_ms": compute,
        "exposed_communication_ms": exposed,
        "transfer_ms": sums("comm_")[slowest],
        "other_ms": total - compute - exposed,
        "compute_share": share(compute),
        "communication_share": share(exposed),
        "other_share": share(total - compute - exposed),
        "compute_by_rank_ms": computes,
        "exposed_by_rank_ms": waits,
        "skew": (max(computes) - min(computes)) / usual if usual else 0.0,
        "stragglers": [rank for rank, ms in enumerate(computes) if usual and ms > STRAGGLER * usual],
    }


def bandwidths(
    passes: dict[str, list[Iteration]], received: Sequence[dict[str, dict[str, int]]]
) -> dict[str, dict[str, Any]]:
    """For each pass and kind of transfer, on the rank that receives most: bytes, ms of the transfer (its `comm_*`
    phase, including waits for late ranks), and the bandwidths of nccl-tests in GB/s. busbw counts the bytes that arrive
    at a rank; algbw is busbw W / (W - 1). passes: of `by_iteration`. received: by rank, pass and kind."""
    world = len(received)
    result: dict[str, dict[str, Any]] = {which: {} for which in received[0]}
    for which in result:
        for what in dict.fromkeys(key for rank in received for key in rank[which]):
            sizes = [rank[which].get(what, 0) for rank in received]
            size = max(sizes)
            rank = sizes.index(size)
            ms = _medians(passes[which], f"comm_{what}")[rank]
            if size and ms:
                busbw = size / ms / 1e6
                rates = {"busbw_gb_s": busbw, "algbw_gb_s": busbw * world / (world - 1)}
                result[which][what] = {"rank": rank, "bytes": size, "ms": ms, **rates}
    return {which: kinds for which, kinds in result.items() if kinds}
