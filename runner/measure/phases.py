"""Phases of a run: an additional pass in which each phase is recorded and each byte that arrives is counted, and a table
that adds up: compute, transfers and waiting on each rank. Each phase also has its begin and end on one clock for all ranks."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from statistics import fmean, median, pstdev
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from attention.profiling import WHOLE, Recorder, Span, in_order, recording
from runner.environment import boot_id
from runner.measure.statistics import Fields
from runner.measure.stopwatch import Stopwatch
from runner.measure.timing import LEAD_MS, Called, undisturbed
from runner.measure.workload import Passes, Workload
from runner.record.fields import Clocks, Comm, PassPhases, Phase

Row = Fields  # iteration, rank, pass, phase, step, ms, start_ms, stop_ms
Times = dict[str, NDArray[np.float64]]  # of a pass: by phase the ms of each iteration and rank; 0 where it had none
ADD_UP = ("comp_", "wait_")  # with `other` these phases add up to the pass; all others overlap them


def measure(work: Workload, runs: int) -> tuple[list[Row], dict[str, PassPhases], Comm]:
    """Of all ranks."""
    me, watch = work.me, Stopwatch(work.me)
    recorder = Recorder(me.device, torch.cuda.nvtx.range if work.experiment.nvtx else None)
    received: dict[str, dict[str, int]] = {}  # by this rank in the last run of each pass

    def run(which: str) -> None:
        counter = work.transport.bytes_received
        counter.clear()
        with recorder.annotate(which):
            work.run(which)
        received[which] = dict(counter)

    passes, _ = record(Called(work.passes, run), watch, runs, recorder)
    work.release()
    origin = passes[0][1][0].begin if watch.on_gpu else 0  # processes of a host share the monotonic clock
    mine: list[Row] = []
    for number, (which, spans) in enumerate(passes):
        here = {"iteration": number // len(work.passes), "rank": me.rank, "pass": which}
        times = [(span.name, *span.since(origin)) for span in spans]
        for span, ms, (phase, start, stop) in zip(spans, shares(times), times, strict=True):
            mine.append({**here, "phase": phase, "step": span.step, "ms": ms, "start_ms": start, "stop_ms": stop})
    clock = (
        me.rank if watch.on_gpu else boot_id() or platform.node()
    )  # each GPU has its own, the CPUs of a host have one
    by_rank, received_by_rank, clocks = zip(*me.gather((mine, received, clock)), strict=True)
    rows = [row for rows in by_rank for row in rows]
    by_pass = times_of(rows, me.world)
    moved = list(received_by_rank)
    comm = Comm(transport=work.transport.name, bytes_received_by_rank=moved, clocks=on_one_clock(rows, clocks))
    return rows, {which: summary(times) for which, times in by_pass.items()}, comm


def record(
    work: Passes,
    watch: Stopwatch,
    runs: int,
    recorder: Recorder,
    observed: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> tuple[list[tuple[str, list[Span]]], Any]:
    """`runs` iterations as in `Timer.sample` within `observed`, where the recorder is active; and what `observed` gives. Of each pass
    its name and its spans, of which the first is the whole.

    On a GPU the CPU gets ahead by what recording costs it, which would appear as idle time of the GPU otherwise."""
    leads = dict.fromkeys(work.passes, 0.0)
    if watch.on_gpu:
        usual = _issued_ms(work, watch)
        with observed(), recording(recorder):
            slowed = _issued_ms(work, watch)
        leads = {which: LEAD_MS + max(0.0, slowed[which] - usual[which]) for which in work.passes}
    passes = []
    with observed() as observer, recording(recorder), undisturbed():
        for which in work.passes * runs:
            recorder.spans.clear()
            watch.lead_ms, whole = leads[which], Span(recorder, WHOLE)
            whole.begin, whole.finish = watch.around(work.run, which)
            passes.append((which, [whole, *recorder.spans]))
        watch.settle()
    return passes, observer


def _issued_ms(work: Passes, watch: Stopwatch) -> dict[str, float]:
    """The CPU launch overhead of each pass in ms, at its second run."""
    launched = {}
    for which in work.passes * 2:
        watch.settle()
        start = time.perf_counter()
        work.run(which)
        launched[which] = (time.perf_counter() - start) * 1e3
    watch.settle()
    return launched


def on_one_clock(rows: list[Row], clocks: Sequence[Any]) -> Clocks:
    """Changes `start_ms` and `stop_ms` of the rows, which are on each rank's clock, to ms since the first pass began.
    clocks: by rank, which clock it reads. The rows are in the order of ranks and passes.

    Ranks start each pass together. Two clocks are aligned so that the first of their ranks to start did so at the same
    time, in the median over the passes. Returns `count`, of the clocks, and `error_ms`: how far a pass's start lies from
    that in the median, on the worst clock; 0 for one clock."""
    begins = [row["start_ms"] for row in rows if row["phase"] == WHOLE]
    starts: dict[Any, Any] = dict.fromkeys(clocks, np.inf)  # the earliest of each pass
    by_rank = np.array(begins).reshape(len(clocks), -1)
    for clock, own in zip(clocks, by_rank, strict=True):
        starts[clock] = np.minimum(starts[clock], own)
    ahead = {clock: (earliest - starts[clocks[0]]).tolist() for clock, earliest in starts.items()}
    offsets = {clock: median(lead) for clock, lead in ahead.items()}
    zero = min(own[0] - offsets[clock] for clock, own in zip(clocks, by_rank.tolist(), strict=True))
    for row in rows:
        for key in ("start_ms", "stop_ms"):
            row[key] = round(row[key] - offsets[clocks[row["rank"]]] - zero, 6)
    error = max(median(abs(ms - offsets[clock]) for ms in lead) for clock, lead in ahead.items())
    return Clocks(count=len(ahead), error_ms=round(error, 6))


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


def times_of(rows: Sequence[Row], world: int) -> dict[str, Times]:
    """The times of the recorded rows by pass."""
    iterations = 1 + max(row["iteration"] for row in rows)
    passes: dict[str, Times] = {}
    for row in rows:
        ms = passes.setdefault(row["pass"], {}).setdefault(row["phase"], np.zeros((iterations, world)))
        ms[row["iteration"], row["rank"]] += row["ms"]
    return passes


def _medians(times: NDArray[np.float64]) -> list[float]:
    """Of a phase, by rank, over the iterations that have it; 0 where there is none."""
    return [median([x for x in ms if x] or [0.0]) for ms in times.T.tolist()]


def summary(times: Times) -> PassPhases:
    """Of a pass, on the slowest rank: every phase with its share, compute, exposed communication, the rest (`other`: CPU launch
    overhead and gaps), and the skew of compute between ranks. These are means over the same iterations, the
    middle half by length of the pass, so they add up. Each phase also has its mean, deviation and total over all iterations,
    and its median on each rank.

    comp_* and wait_* count every moment once (`shares`), so with `other` they add up to the pass; other phases overlap them."""
    totals = _medians(times[WHOLE])
    slowest, iterations = totals.index(max(totals)), len(times[WHOLE])
    kept = max(1, iterations // 2)
    ordered = times[WHOLE][:, slowest].argsort(kind="stable")[(iterations - kept) // 2 :][:kept]
    middle = {name: ms[ordered].mean(0).tolist() for name, ms in times.items()}  # by rank
    total = middle[WHOLE][slowest]

    def by_rank(prefix: str) -> list[float]:
        return [sum(ms[rank] for name, ms in middle.items() if name.startswith(prefix)) for rank in range(len(totals))]

    phases = {}
    for name in in_order(name for name, ms in times.items() if name != WHOLE and ms[:, slowest].any()):
        every, ms = times[name][:, slowest].tolist(), middle[name][slowest]
        spread = {"mean_ms": fmean(every), "deviation_ms": pstdev(every), "total_ms": sum(every)}
        phases[name] = Phase(ms=ms, share=ms / total, by_rank_ms=_medians(times[name]), **spread)
    computes, waits = by_rank("comp_"), by_rank("wait_")
    compute, exposed, usual = computes[slowest], waits[slowest], median(computes)
    return PassPhases(
        rank=slowest,
        iterations=iterations,
        total_ms=total,
        phases=phases,
        compute_ms=compute,
        exposed_communication_ms=exposed,
        other_ms=total - compute - exposed,
        compute_share=compute / total,
        communication_share=exposed / total,
        other_share=(total - compute - exposed) / total,
        compute_by_rank_ms=computes,
        exposed_by_rank_ms=waits,
        skew=(max(computes) - min(computes)) / usual if usual else 0.0,
    )
