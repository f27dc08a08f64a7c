"""The definition of every metric."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from attention.geometry import counts
from attention.geometry.counts import Shapes
from runner.config.experiment import Experiment
from runner.measure import call_costs, model_metrics
from runner.measure.call_costs import Part
from runner.peers import variant

PARTS = {"forward": (False,), "backward": (True,), "total": (False, True)}  # whether each part is a backward
CEILINGS = {
    "compute": "matrix product measured here",
    "memory": "copy within a device measured here",
    "communication": "all-gather measured here",
}
EXCEEDED = 1.03  # a run above this share of its limit shows that the measured ceiling is too low


def flops(experiment: Experiment) -> dict[str, int]:
    """FLOPs of the whole problem, see `counts.forward_flops` and `backward_flops`, of a module with its projections; of a model see `model_metrics.flops`."""
    if experiment.model is not None:
        return model_metrics.flops(experiment)
    about = replace(experiment.workload.shapes, batch=1, heads=1), experiment.head_pairs
    forward = counts.forward_flops(*about) + projections(experiment)
    if not experiment.backward:
        return {"forward": forward}
    backward = counts.backward_flops(*about) + 2 * projections(experiment)
    return {"forward": forward, "backward": backward, "total": forward + backward}


def projections(experiment: Experiment) -> int:
    """FLOPs of a module's matrix products around its attention in the forward: x to q, k and v, and to out. 0 for attention alone."""
    if not experiment.is_module:
        return 0
    call = experiment.workload
    hidden = call.heads * call.head_dim
    return 2 * call.batch * call.seq_len * hidden * (hidden + (call.heads + 2 * call.kv_heads) * call.head_dim)


def sparsity(experiment: Experiment) -> dict[str, Any]:
    """What the mask leaves of dense attention. connections: (query, key) pairs of a head and batch element, the mean of them
    where they differ. density: of all queries times all keys. sparsity_ratio: the share removed of the pairs of dense attention in the same direction, which
    is causal if no query sees a later key. Both are None where a pair may count several times. dense_flops: FLOPs of dense attention."""
    work, dilation = experiment.workload, experiment.dilation
    repeats = dilation is not None and dilation.mixing == "longnet" and len(dilation.pairs) > 1
    pairs = experiment.head_pairs / (work.batch * work.heads)
    keys = sum(work.ends) / work.batch + (work.prefix or 0)
    return {
        "connections": round(pairs),
        "density": None if repeats else pairs / (work.queries * keys),
        "sparsity_ratio": None if repeats else 1 - pairs * work.batch / work.dense.batch_pairs,
        "dense_flops": flops(replace(experiment.dense, variant="dense", options={})),
    }


def compute(
    experiment: Experiment, median_ms: dict[str, float], ceilings: dict[str, float] | None, pulls: bool = False
) -> dict[str, Any]:
    """All metrics, from the slowest rank's medians (pass to ms) and this machine's ceilings. pulls: whether the run's
    transport pulls, as in `dry_run`."""
    work, sizes, options = experiment.workload, experiment.workload.shapes, experiment.call_options
    chosen = variant(experiment.variant)
    problem = chosen.problem(work.cu_seqlens, experiment.world_size, work.mask, options, work.q_len)
    parts = call_costs.parts(experiment, chosen, problem, pulls)
    by_rank = [sum(each) for each in zip(*(part.flops() for part in parts), strict=True)]
    found = {"tokens": work.batch * work.queries, "flops": flops(experiment), "flops_forward_by_rank": by_rank}
    found |= sparsity(experiment)
    if "grouping" in options:
        ranks = range(problem.world)
        found["kv_bytes_read_by_rank"] = [
            counts.kv_bytes_read(problem, sizes, rank, options["grouping"]) for rank in ranks
        ]
    if experiment.model is not None:
        passes = model_metrics.passes(experiment, median_ms, ceilings, pulls)
        found["matmul_tflops"] = ceilings["matmul_tflops"] if ceilings else None
        return at({**found, "passes": passes}, median_ms, experiment)
    passes = {}
    for which in median_ms:
        # the exchange of an external package does not follow a schedule
        received = None if experiment.is_peer else _received(parts, problem.ranks, which)
        passes[which] = {"bytes_received_by_rank": received}
        if ceilings:
            moved = max(sum(p.moved(r, x) for p in parts for x in PARTS[which]) for r in range(problem.ranks))
            passes[which] |= {"memory_bytes": moved} | _limit(
                sizes, which, max(by_rank), moved, _most(received), ceilings
            )
    return at({**found, "passes": passes}, median_ms, experiment)


def at(found: dict[str, Any], median_ms: dict[str, float], experiment: Experiment) -> dict[str, Any]:
    """The metrics of `compute`, with other medians (pass to ms)."""
    passes, sharing = {}, float(experiment.sharing)
    if experiment.model is None and not experiment.is_module:  # where the counts are of all the work
        own = sum(found["flops_forward_by_rank"]) / experiment.world_size
        sharing = found["flops"]["forward"] / max(own, 1)
    for which, ms in median_ms.items():
        entry = {key: x for key, x in found["passes"][which].items() if key != "no_sol"}
        most = _most(entry["bytes_received_by_rank"])
        entry |= {
            "tokens_per_s": found["tokens"] / ms * 1e3,
            "tflops_per_device": found["flops"][which] / ms / sharing / 1e9,
            "received_gb_s": most / ms / 1e6 if most is not None else None,
        }
        if found.get("matmul_tflops"):  # of a model
            entry["mfu"] = entry["tflops_per_device"] / found["matmul_tflops"]
        passes[which] = entry | ({"sol": entry["limit_ms"] / ms} if "limit_ms" in entry else {})
    return {**found, "passes": passes}


def _most(received: list[dict[str, int]] | None) -> int | None:
    """The bytes of the rank that receives most."""
    return max(sum(r.values()) for r in received) if received is not None else None


def gain(
    baseline: Mapping[str, Any], ms: dict[str, float], world: int, found: Mapping[str, Any]
) -> dict[str, dict[str, float]]:
    """Speedup of a run on `world` ranks over its baseline, by pass. Efficiency is speedup over ranks; against dense
    attention it is speedup over the ratio of FLOPs. found: the metrics of `compute`."""
    times = {which: baseline["passes"][which] / ms[which] for which in ms}
    ideal: dict[str, float] = dict.fromkeys(ms, world)
    if baseline.get("kind") == "dense":
        ideal = {which: max(found["dense_flops"][which], 1) / max(found["flops"][which], 1) for which in ms}
    return {"speedup": times, "efficiency": {which: x / ideal[which] for which, x in times.items()}}


def exceeds(found: dict[str, Any]) -> bool:
    """Whether a pass was faster than its limit, by more than the error of a measurement."""
    return any((entry.get("sol") or 0) > EXCEEDED for entry in found["passes"].values())


def without_exceeded(found: dict[str, Any]) -> dict[str, Any]:
    """The metrics of `compute`, where a pass faster than its limit has `sol` null and the reason in `no_sol`. A short
    pass may have higher clocks than a long matrix product, and caches are faster than memory."""
    passes = dict(found["passes"])
    for which, entry in passes.items():
        if (entry.get("sol") or 0) > EXCEEDED:
            ceiling = CEILINGS[entry["limited_by"]]
            why = f"{entry['sol']:.0%} of what the {ceiling} allows: that is no ceiling of this pass"
            passes[which] = {**entry, "sol": None, "no_sol": why}
    return {**found, "passes": passes}


def _received(parts: Sequence[Part], ranks: int, which: str) -> list[dict[str, int]]:
    found: list[dict[str, int]] = [{} for _ in range(ranks)]
    for rank, of_rank in enumerate(found):
        for part in parts:
            for backward in PARTS[which]:
                for key, size in part.received(rank, backward).items():
                    of_rank[key] = of_rank.get(key, 0) + size
    return found


def _limit(
    sizes: Shapes,
    which: str,
    most_flops: int,
    moved: int,
    most_bytes: int | None,
    ceilings: dict[str, float],
) -> dict[str, Any]:
    """The least time that this machine's ceilings allow the slowest rank, and the binding ceiling."""
    times = sum(sizes.backward_ratio if backward else 1.0 for backward in PARTS[which])
    link = ceilings.get("link_gb_s")
    terms = {
        "compute": most_flops * times / ceilings["matmul_tflops"] / 1e9,
        "memory": moved / ceilings["copy_gb_s"] / 1e6,
        "communication": most_bytes / link / 1e6 if most_bytes and link else 0.0,
    }
    binding = max(terms, key=lambda term: terms[term])
    return {"limit_ms": terms[binding], "limited_by": binding}
