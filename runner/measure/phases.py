"""From recorded phases to a table that adds up: compute, transfers and waiting on each rank."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from runner.measure.statistics import quantile

Row = dict[str, Any]  # iteration, rank, pass, phase, step, ms
STRAGGLER = 1.1  # times the median over the ranks


def _median(values: list[float]) -> float:
    return quantile(sorted(values), 0.5)


def shares(spans: Sequence[tuple[str, float, float]]) -> list[float]:
    """The time of each phase (name, begin, end) of one pass, in the unit of the input. A transfer (`comm_*`) counts
    with its whole length. Of the others, which may be on two streams, every moment counts once: the compute phases
    active at that moment share it; it is waiting only if none is active."""
    taken = [stop - start if name.startswith("comm_") else 0.0 for name, start, stop in spans]
    here = [i for i, (name, *_) in enumerate(spans) if not name.startswith("comm_")]
    ends = sorted([(spans[i][1], 0, i) for i in here] + [(spans[i][2], 1, i) for i in here])
    going: dict[int, None] = {}
    for (now, is_end, i), (then, *_) in pairwise(ends):
        if is_end:
            del going[i]
        else:
            going[i] = None
        computes = [j for j in going if spans[j][0].startswith("comp_")]
        among = computes or list(going)
        for j in among:
            taken[j] += (then - now) / len(among)
    return taken


def summarize(rows: list[Row], world: int) -> dict[str, Any]:
    """A summary of the recorded rows; rows with phase `pass` are a rank's whole pass. For each pass, on the slowest
    rank: every phase with its share, compute, exposed communication, the rest (`other`: CPU launch overhead and gaps),
    the skew of compute between ranks, and stragglers. These are means over the same iterations, the middle half by
    length of the pass, so they add up. Each phase also has its median over all iterations.

    comp_* and wait_* count every moment once (`shares`), so with `other` they add up to the pass; comm_* overlaps
    them."""
    result: dict[str, Any] = {}
    for which in dict.fromkeys(row["pass"] for row in rows):
        by_iteration: dict[int, list[dict[str, float]]] = defaultdict(
            lambda: [defaultdict(float) for _ in range(world)]
        )
        for row in rows:
            if row["pass"] == which:
                by_iteration[row["iteration"]][row["rank"]][row["phase"]] += row["ms"]
        result[which] = _of_pass(list(by_iteration.values()))
    return result


def _mean(iterations: list[dict[str, float]]) -> dict[str, float]:
    """The mean by phase; a phase that an iteration lacks counts as 0."""
    names = dict.fromkeys(name for found in iterations for name in found)
    return {name: sum(found.get(name, 0.0) for found in iterations) / len(iterations) for name in names}


def _of_pass(iterations: list[list[dict[str, float]]]) -> dict[str, Any]:
    ranks = range(len(iterations[0]))

    def medians(phase: str) -> list[float]:
        """By rank, over the iterations that have the phase."""
        seen = [[ranks_[rank][phase] for ranks_ in iterations if phase in ranks_[rank]] for rank in ranks]
        return [_median(ms) if ms else 0.0 for ms in seen]

    totals = medians("pass")
    slowest = max(ranks, key=lambda rank: totals[rank])
    ordered = sorted(iterations, key=lambda ranks_: ranks_[slowest]["pass"])
    kept = max(1, len(ordered) // 2)
    first = (len(ordered) - kept) // 2
    middle = [_mean([ranks_[rank] for ranks_ in ordered[first : first + kept]]) for rank in ranks]
    total = middle[slowest]["pass"]
    names = sorted({name for ranks_ in iterations for name in ranks_[slowest]} - {"pass"})

    def together(prefix: str) -> list[float]:
        return [sum(ms for name, ms in middle[rank].items() if name.startswith(prefix)) for rank in ranks]

    compute, exposed, transfer = together("comp_"), together("wait_"), together("comm_")
    usual = _median(compute)
    return {
        "rank": slowest,
        "total_ms": total,
        "phases": {
            name: {
                "ms": middle[slowest].get(name, 0.0),
                "share": middle[slowest].get(name, 0.0) / total if total else 0.0,
                "median_ms": medians(name)[slowest],
                "by_rank_ms": medians(name),
            }
            for name in names
        },
        "compute_ms": compute[slowest],
        "exposed_communication_ms": exposed[slowest],
        "transfer_ms": transfer[slowest],
        "other_ms": total - compute[slowest] - exposed[slowest],
        "compute_share": compute[slowest] / total if total else 0.0,
        "communication_share": exposed[slowest] / total if total else 0.0,
        "other_share": 1 - (compute[slowest] + exposed[slowest]) / total if total else 0.0,
        "compute_by_rank_ms": compute,
        "exposed_by_rank_ms": exposed,
        "skew": (max(compute) - min(compute)) / usual if usual else 0.0,
        "stragglers": [rank for rank, ms in enumerate(compute) if usual and ms > STRAGGLER * usual],
    }


def bandwidths(rows: list[Row], received: list[dict[str, dict[str, int]]]) -> dict[str, Any]:
    """For each pass and kind of transfer, on the rank that receives most: bytes, ms of the transfer (its `comm_*`
    phase, including waits for late ranks), and the bandwidths of nccl-tests in GB/s. busbw counts the bytes that arrive
    at a rank; algbw is busbw W / (W - 1)."""
    world = len(received)
    result: dict[str, Any] = {}
    for which in received[0]:
        for what in dict.fromkeys(key for rank in received for key in rank[which]):
            rank = max(range(world), key=lambda r: received[r][which].get(what, 0))
            size = received[rank][which].get(what, 0)
            per_iteration: dict[int, float] = defaultdict(float)
            for row in rows:
                if (row["pass"], row["rank"], row["phase"]) == (which, rank, f"comm_{what}"):
                    per_iteration[row["iteration"]] += row["ms"]
            ms = _median(list(per_iteration.values())) if per_iteration else 0.0
            if size and ms:
                busbw = size / ms / 1e6
                entry = {
                    "rank": rank,
                    "bytes": size,
                    "ms": ms,
                    "busbw_gb_s": busbw,
                    "algbw_gb_s": busbw * world / (world - 1),
                }
                result.setdefault(which, {})[what] = entry
    return result
