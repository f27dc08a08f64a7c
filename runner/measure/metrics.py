"""The definition of every metric."""

from __future__ import annotations

from typing import Any

from attention.executors import costs
from attention.executors.gather_costs import kv_bytes_read
from attention.geometry import counts
from attention.geometry.counts import Shapes
from attention.geometry.schedules import Problem
from attention.variants.base import Variant
from attention.variants.registry import variant
from runner.config.experiment import Experiment

EXCEEDED = 1.03  # a run above this share of its limit shows that the measured ceiling is too low


def flops(experiment: Experiment) -> dict[str, int]:
    """FLOPs of the whole problem under the mask: forward 4 B H D pairs, backward 2.5 times that."""
    work = experiment.workload
    forward = counts.forward_flops(experiment.workload.shapes, work.pairs)
    found = {"forward": forward}
    if experiment.mode == "forward_backward":
        found["backward"] = int(forward * counts.BACKWARD)
        found["total"] = forward + found["backward"]
    return found


def compute(
    experiment: Experiment, median_ms: dict[str, float], ceilings: dict[str, float] | None, pulls: bool = False
) -> dict[str, Any]:
    """All metrics, from the slowest rank's medians (pass to ms) and this machine's ceilings. pulls: whether the run's
    transport pulls, as in `costs.of`."""
    work = experiment.workload
    chosen = variant(experiment.variant)
    problem = chosen.problem(work.cu_seqlens, experiment.world_size, work.mask, experiment.options, work.q_len)
    sizes = experiment.workload.shapes
    whole = flops(experiment)
    by_rank = counts.rank_flops(problem, sizes)
    found: dict[str, Any] = {
        "tokens": work.batch * work.queries,
        "flops": whole,
        "flops_forward_by_rank": by_rank,
        "passes": {},
    }
    if "grouping" in experiment.options:
        how = experiment.options["grouping"]
        found["kv_bytes_read_by_rank"] = [kv_bytes_read(problem, sizes, rank, how) for rank in range(problem.world)]
    for which in median_ms:
        # the exchange of an external package does not follow a schedule
        received = None if chosen.external else _received(chosen, problem, sizes, which, experiment.options, pulls)
        entry: dict[str, Any] = {"bytes_received_by_rank": received}
        if ceilings:
            entry |= _limit(problem, sizes, which, max(by_rank), _most(received), ceilings)
        found["passes"][which] = entry
    return at(found, median_ms, experiment.world_size)


def at(found: dict[str, Any], median_ms: dict[str, float], world: int) -> dict[str, Any]:
    """The metrics of `compute` for a run on `world` ranks, with other medians (pass to ms)."""
    passes = {}
    for which, ms in median_ms.items():
        seconds = ms / 1e3
        entry = {key: x for key, x in found["passes"][which].items() if key != "no_sol"}
        most = _most(entry["bytes_received_by_rank"])
        entry |= {
            "tokens_per_s": found["tokens"] / seconds,
            "tflops_per_device": found["flops"][which] / seconds / world / 1e12,
            "received_gb_s": most / seconds / 1e9 if most is not None else None,
        }
        passes[which] = entry | ({"sol": entry["limit_ms"] / ms} if "limit_ms" in entry else {})
    return {**found, "passes": passes}


def _most(received: list[dict[str, int]] | None) -> int | None:
    """The bytes of the rank that receives most."""
    return max(sum(r.values()) for r in received) if received is not None else None


def speedup(single_ms: dict[str, float], ms: dict[str, float], world: int) -> dict[str, dict[str, float]]:
    """Speedup of a run on `world` ranks over the same work on one, by pass; efficiency is speedup over ranks."""
    found = {which: single_ms[which] / ms[which] for which in ms}
    return {"speedup": found, "efficiency": {which: x / world for which, x in found.items()}}


def exceeds(found: dict[str, Any]) -> bool:
    """Whether a pass was faster than its limit, by more than the error of a measurement."""
    return any((entry.get("sol") or 0) > EXCEEDED for entry in found["passes"].values())


def without_exceeded(found: dict[str, Any]) -> dict[str, Any]:
    """The metrics of `compute`, where a pass faster than its limit has `sol` null and the reason in `no_sol`. A short
    pass may have higher clocks than a long matrix product, and caches are faster than memory."""

    def refused(entry: dict[str, Any]) -> dict[str, Any]:
        if (entry.get("sol") or 0) <= EXCEEDED:
            return entry
        why = f"{entry['sol']:.0%} of what the {_CEILINGS[entry['limited_by']]} allows: that is no ceiling of this pass"
        return {**entry, "sol": None, "no_sol": why}

    return {**found, "passes": {which: refused(entry) for which, entry in found["passes"].items()}}


_CEILINGS = {
    "compute": "matrix product measured here",
    "memory": "copy within a device measured here",
    "communication": "all-gather measured here",
}


def _received(
    chosen: Variant[Any], problem: Problem, sizes: Shapes, which: str, options: dict[str, Any], pulls: bool
) -> list[dict[str, int]]:
    one = costs.of(chosen, problem, sizes, options, pulls=pulls).bytes_received
    if which != "total":
        return [one(rank, which == "backward") for rank in range(problem.ranks)]
    both = [(one(rank, False), one(rank, True)) for rank in range(problem.ranks)]
    return [{key: f.get(key, 0) + b.get(key, 0) for key in {*f, *b}} for f, b in both]


def _limit(
    problem: Problem,
    sizes: Shapes,
    which: str,
    most_flops: int,
    most_bytes: int | None,
    ceilings: dict[str, float],
) -> dict[str, Any]:
    """The least time that this machine's ceilings allow the slowest rank, and the binding ceiling."""
    times = {"forward": 1.0, "backward": counts.BACKWARD, "total": 1 + counts.BACKWARD}[which]
    passes = {"forward": [False], "backward": [True], "total": [False, True]}[which]
    moved = max(
        sum(counts.kernel_bytes(problem, sizes, rank, backward) for backward in passes) for rank in range(problem.ranks)
    )
    terms = {
        "compute": most_flops * times / ceilings["matmul_tflops"] / 1e9,
        "memory": moved / ceilings["copy_gb_s"] / 1e6,
        "communication": most_bytes / ceilings["link_gb_s"] / 1e6 if most_bytes and ceilings.get("link_gb_s") else 0.0,
    }
    binding = max(terms, key=lambda term: terms[term])
    return {"limit_ms": terms[binding], "limited_by": binding}
