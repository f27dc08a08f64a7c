"""Phases of a run: an additional pass in which each phase is recorded and each byte that arrives is counted, and a table
that adds up: compute, transfers and waiting on each rank. Each phase also has its begin and end on one clock for all ranks."""

from __future__ import annotations

import platform
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from statistics import mean, median, pstdev
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
ADD_UP = ("comp_", "wait_")  # with `other` these phases add up to the pass


class _Counted:
    """A workload's passes, each annotated by its name, with the bytes that the transport moved into this rank in the last run
    of each."""

    def __init__(self, work: Workload, recorder: Recorder):
        self.work, self.passes, self.annotate = work, work.passes, recorder.annotate
        self.received: dict[str, dict[str, int]] = {}

    def run(self, which: str) -> None:
        counter = self.work.transport.bytes_received
        counter.clear()
        with self.annotate(which):
            self.work.run(which)
        self.received[which] = dict(counter)


def measure(me: Rank, work: Workload, watch: Stopwatch, runs: int, nvtx: bool = False) -> dict[str, Any]:
    """`phase_rows`, `phases` and `comm` of the result, from all ranks. nvtx: passes and phases are NVTX ranges."""
    recorder = Recorder(me.device, torch.cuda.nvtx.range if nvtx else None)
    counted = _Counted(work, recorder)
    leads = timing.leads_ms(counted, watch, lambda: recording(recorder))
    recorder.spans.clear()
    origin = watch.origin()
    with recording(recorder):
        passes = timing.record(counted, watch, runs, recorder, leads)
    work.release()
    mine: list[Row] = []
    for number, each in enumerate(passes):
        here = {"iteration": number // len(work.passes), "rank": me.rank, "pass": each.which}
        whole = (WHOLE, watch.elapsed(origin, each.start), watch.elapsed(origin, each.stop))
        spans = [(s.name, *s.since(origin)) for s in each.spans]
        steps, lengths = [-1, *(s.step for s in each.spans)], [whole[2] - whole[1], *shares(spans)]
        for step, ms, (phase, start, stop) in zip(steps, lengths, [whole, *spans], strict=True):
            mine.append({**here, "phase": phase, "step": step, "ms": ms, "start_ms": start, "stop_ms": stop})
    clock = (boot_id() or platform.node()) if me.device.type == "cpu" else me.rank
    everyone = me.gather((mine, counted.received, clock))
    rows, received = [row for rows, *_ in everyone for row in rows], [received for _, received, _ in everyone]
    clocks = on_one_clock(rows, [clock for *_, clock in everyone])
    bytes_and_rates = {"bytes_received_by_rank": received, "bandwidth": bandwidths(rows, received)}
    comm = {"transport": work.transport.name, **bytes_and_rates, "clocks": clocks}
    return {"phase_rows": rows, "phases": summarize(rows, me.world), "comm": comm}


def on_one_clock(rows: list[Row], clocks: Sequence[Any]) -> dict[str, Any]:
    """Changes `start_ms` and `stop_ms` of the rows, which are on each rank's clock, to ms since the first pass began.
    clocks: by rank, which clock it reads; ranks of one host read the same on a CPU, and each GPU has its own.

    Ranks start each pass together. Two clocks are aligned so that the first of their ranks to start did so at the same
    time, in the median over the passes. Returns `count`, of the clocks, and `error_ms`: how far a pass's start lies from
    that in the median, on the worst clock; 0 for one clock."""
    starts: dict[Any, dict[tuple[int, str], float]] = {clock: {} for clock in clocks}
    for row in rows:
        if row["phase"] == WHOLE:
            found, place = starts[clocks[row["rank"]]], (row["iteration"], row["pass"])
            found[place] = min(found.get(place, row["start_ms"]), row["start_ms"])
    first = starts[clocks[0]]
    ahead = {clock: [found[place] - first[place] for place in first] for clock, found in starts.items()}
    offsets = {clock: median(each) for clock, each in ahead.items()}
    zero = min(row["start_ms"] - offsets[clocks[row["rank"]]] for row in rows if row["phase"] == WHOLE)
    for row in rows:
        back = offsets[clocks[row["rank"]]] + zero
        row |= {key: round(row[key] - back, 6) for key in ("start_ms", "stop_ms")}
    error = max(median(abs(ms - offsets[clock]) for ms in each) for clock, each in ahead.items())
    return {"count": len(starts), "error_ms": round(error, 6)}


def overlaps(phase: str) -> bool:
    """Whether a phase overlaps others, and so is no part of the sum: a transfer, or a user's block."""
    return not phase.startswith(ADD_UP)


def shares(spans: Sequence[tuple[str, float, float]]) -> list[float]:
    """The time of each phase (name, begin, end) of one pass, in the unit of the input. A transfer (`comm_*`) and a user's
    block count with their whole length. Of the others, which may be on two streams, every moment counts once: the
    compute phases active at that moment share it; it is waiting only if none is active."""
    taken = [stop - start if overlaps(name) else 0.0 for name, start, stop in spans]
    here = [i for i, (name, *_) in enumerate(spans) if not overlaps(name)]
    ends = sorted([(spans[i][1], 0, i) for i in here] + [(spans[i][2], 1, i) for i in here])
    going: dict[int, None] = {}
    for (now, is_end, i), (then, *_) in pairwise(ends):
        if is_end:
            del going[i]
        else:
            going[i] = None
        among = [j for j in going if spans[j][0].startswith("comp_")] or list(going)
        for j in among:
            taken[j] += (then - now) / len(among)
    return taken


def summarize(rows: list[Row], world: int) -> dict[str, Any]:
    """A summary of the recorded rows; rows with phase `pass` are a rank's whole pass. For each pass, on the slowest
    rank: every phase with its share, compute, exposed communication, the rest (`other`: CPU launch overhead and gaps),
    the skew of compute between ranks, and stragglers. These are means over the same iterations, the middle half by
    length of the pass, so they add up. Each phase also has its median, mean, deviation and total over all iterations.

    comp_* and wait_* count every moment once (`shares`), so with `other` they add up to the pass; other phases overlap them."""
    passes: dict[str, dict[int, list[dict[str, float]]]] = {}
    for row in rows:
        iterations = passes.setdefault(row["pass"], {})
        ranks = iterations.setdefault(row["iteration"], [defaultdict(float) for _ in range(world)])
        ranks[row["rank"]][row["phase"]] += row["ms"]
    return {which: _of_pass(list(iterations.values())) for which, iterations in passes.items()}


def _mean(iterations: list[dict[str, float]]) -> dict[str, float]:
    """The mean by phase; a phase that an iteration lacks counts as 0."""
    names = dict.fromkeys(name for found in iterations for name in found)
    return {name: sum(found.get(name, 0.0) for found in iterations) / len(iterations) for name in names}


def _of_pass(iterations: list[list[dict[str, float]]]) -> dict[str, Any]:
    ranks = range(len(iterations[0]))

    def medians(phase: str) -> list[float]:
        """By rank, over the iterations that have the phase."""
        seen = [[each[rank][phase] for each in iterations if phase in each[rank]] for rank in ranks]
        return [median(ms) if ms else 0.0 for ms in seen]

    totals = medians(WHOLE)
    slowest = max(ranks, key=lambda rank: totals[rank])
    ordered = sorted(iterations, key=lambda each: each[slowest][WHOLE])
    kept = max(1, len(ordered) // 2)
    first = (len(ordered) - kept) // 2
    middle = [_mean([each[rank] for each in ordered[first : first + kept]]) for rank in ranks]
    total = middle[slowest][WHOLE]

    def together(prefix: str) -> list[float]:
        return [sum(ms for name, ms in middle[rank].items() if name.startswith(prefix)) for rank in ranks]

    def share(ms: float) -> float:
        return ms / total if total else 0.0

    def phase(name: str) -> dict[str, Any]:
        ms, by_rank = middle[slowest].get(name, 0.0), medians(name)
        every = [each[slowest].get(name, 0.0) for each in iterations]
        spread = {"mean_ms": mean(every), "deviation_ms": pstdev(every), "total_ms": sum(every)}
        return {"ms": ms, "share": share(ms), "median_ms": by_rank[slowest], **spread, "by_rank_ms": by_rank}

    names = in_order({name for each in iterations for name in each[slowest]} - {WHOLE})
    computes, waits = together("comp_"), together("wait_")
    compute, exposed, usual = computes[slowest], waits[slowest], median(computes)
    return {
        "rank": slowest,
        "iterations": len(iterations),
        "total_ms": total,
        "phases": {name: phase(name) for name in names},
        "compute_ms": compute,
        "exposed_communication_ms": exposed,
        "transfer_ms": together("comm_")[slowest],
        "other_ms": total - compute - exposed,
        "compute_share": share(compute),
        "communication_share": share(exposed),
        "other_share": 1 - (compute + exposed) / total if total else 0.0,
        "compute_by_rank_ms": computes,
        "exposed_by_rank_ms": waits,
        "skew": (max(computes) - min(computes)) / usual if usual else 0.0,
        "stragglers": [rank for rank, ms in enumerate(computes) if usual and ms > STRAGGLER * usual],
    }


def bandwidths(rows: list[Row], received: list[dict[str, dict[str, int]]]) -> dict[str, Any]:
    """For each pass and kind of transfer, on the rank that receives most: bytes, ms of the transfer (its `comm_*`
    phase, including waits for late ranks), and the bandwidths of nccl-tests in GB/s. busbw counts the bytes that arrive
    at a rank; algbw is busbw W / (W - 1)."""
    world = len(received)
    result: dict[str, Any] = {}
    for which in received[0]:
        for what in dict.fromkeys(key for rank in received for key in rank[which]):
            sizes = [rank[which].get(what, 0) for rank in received]
            size, rank = max(sizes), sizes.index(max(sizes))
            iterations: dict[int, float] = defaultdict(float)
            for row in rows:
                if (row["pass"], row["rank"], row["phase"]) == (which, rank, f"comm_{what}"):
                    iterations[row["iteration"]] += row["ms"]
            ms = median(iterations.values()) if iterations else 0.0
            if size and ms:
                busbw = size / ms / 1e6
                rates = {"busbw_gb_s": busbw, "algbw_gb_s": busbw * world / (world - 1)}
                result.setdefault(which, {})[what] = {"rank": rank, "bytes": size, "ms": ms, **rates}
    return result
