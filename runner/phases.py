"""From recorded phases to a table that adds up: what compute, transfers and waiting cost on each rank."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from runner.statistics import quantile

Row = dict[str, Any]  # iteration, rank, pass, phase, step, ms
STRAGGLER = 1.1  # times the median over the ranks


def _median(values: list[float]) -> float:
    return quantile(sorted(values), 0.5)


def summarize(rows: list[Row], world: int) -> dict[str, Any]:
    """`rows` as recorded; those with phase `pass` are a rank's whole pass. For each pass: every phase's median over the
    iterations on the slowest rank, its share of the pass, compute and exposed communication, the rest (`other`, mostly
    the host and gaps), skew between the ranks' own work and the stragglers.

    comp_* and wait_* lie one after another on the compute stream, so with `other` they add up to the pass; comm_* runs
    beside them."""
    result: dict[str, Any] = {}
    for which in dict.fromkeys(row["pass"] for row in rows):
        sums: dict[int, dict[str, dict[int, float]]] = defaultdict(lambda: defaultdict(lambda: defaultdict(float)))
        for row in rows:
            if row["pass"] == which:
                sums[row["rank"]][row["phase"]][row["iteration"]] += row["ms"]
        by_rank = [
            {phase: _median(list(per_iteration.values())) for phase, per_iteration in sums[rank].items()}
            for rank in range(world)
        ]
        result[which] = _of_pass(by_rank)
    return result


def _of_pass(by_rank: list[dict[str, float]]) -> dict[str, Any]:
    totals = [phases.get("pass", 0.0) for phases in by_rank]
    slowest = max(range(len(by_rank)), key=lambda rank: totals[rank])
    phases = {name: ms for name, ms in by_rank[slowest].items() if name != "pass"}
    total = totals[slowest]

    def together(rank: int, prefix: str) -> float:
        return sum(ms for name, ms in by_rank[rank].items() if name.startswith(prefix))

    compute = [together(rank, "comp_") for rank in range(len(by_rank))]
    exposed = [together(rank, "wait_") for rank in range(len(by_rank))]
    transfer = [together(rank, "comm_") for rank in range(len(by_rank))]
    middle = _median(compute)
    return {
        "rank": slowest,
        "total_ms": total,
        "phases": {
            name: {
                "median_ms": ms,
                "share": ms / total if total else 0.0,
                "by_rank_ms": [r.get(name, 0.0) for r in by_rank],
            }
            for name, ms in sorted(phases.items())
        },
        "compute_ms": compute[slowest],
        "exposed_communication_ms": exposed[slowest],
        "transfer_ms": transfer[slowest],
        "other_ms": max(0.0, total - compute[slowest] - exposed[slowest]),
        "compute_share": compute[slowest] / total if total else 0.0,
        "communication_share": exposed[slowest] / total if total else 0.0,
        "compute_by_rank_ms": compute,
        "exposed_by_rank_ms": exposed,
        "skew": (max(compute) - min(compute)) / middle if middle else 0.0,
        "stragglers": [rank for rank, ms in enumerate(compute) if middle and ms > STRAGGLER * middle],
    }
