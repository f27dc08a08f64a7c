"""The definition of every metric."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from attention.geometry import counts
from runner.config.experiment import ITEMSIZE, Experiment
from runner.measure import call_costs
from runner.measure.call_costs import Part

CEILINGS = {
    "compute": "matrix product measured here",
    "memory": "copy within a device measured here",
    "communication": "all-gather measured here",
}
EXCEEDED = 1.03  # a run above this share of its limit shows that the measured ceiling is too low
ADAMW = 7  # parameter, gradient and two states are read, all but the gradient written


def flops(experiment: Experiment) -> dict[str, int]:
    """FLOPs of the whole problem, see `counts.forward_flops` and `backward_flops`, of a module with its projections. Of a model
    `Config.flops`, and twice that for the backward, whatever is computed again; the optimizer step, which is bound by memory,
    counts none."""
    work = experiment.workload
    if experiment.model is not None:
        forward = experiment.model.config(work).flops(work.batch, work.seq_len)
        later = {"backward": 2 * forward, "optimizer": 0}
    else:
        hidden, products = work.heads * work.head_dim, 0
        if experiment.is_module:  # x to q, k and v, and to out
            products = 2 * work.batch * work.seq_len * hidden * (2 * hidden + 2 * work.kv_heads * work.head_dim)
        about = replace(work.shapes, batch=1, heads=1), experiment.head_pairs
        forward = counts.forward_flops(*about) + products
        later = {"backward": counts.backward_flops(*about) + 2 * products}
    if not experiment.backward:
        return {"forward": forward}
    return {"forward": forward, **later, "total": forward + later["backward"]}


def iteration_flops(experiment: Experiment) -> int:
    """FLOPs of an iteration on all ranks."""
    return list(flops(experiment).values())[-1]


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
    work, options = experiment.workload, experiment.call_options
    parts = call_costs.parts(experiment, pulls)
    by_rank = [sum(flops) for flops in zip(*(part.flops() for part in parts), strict=True)]
    fields = {"tokens": work.batch * work.queries, "flops": flops(experiment), "flops_forward_by_rank": by_rank}
    fields |= sparsity(experiment)
    if "grouping" in options:
        about, ranks = (parts[0].problem, work.shapes), range(parts[0].problem.world)
        fields["kv_bytes_read_by_rank"] = [counts.kv_bytes_read(*about, r, options["grouping"]) for r in ranks]
    if experiment.model is not None:
        fields["matmul_tflops"] = ceilings["matmul_tflops"] if ceilings else None
    passes = {}
    for which in median_ms:
        # the exchange of an external package does not follow a schedule
        received = None if experiment.is_peer else _received(experiment, parts, which)
        passes[which] = {"bytes_received_by_rank": received}
        if ceilings:
            passes[which] |= _limit(experiment, parts, which, fields, received, ceilings)
    return at({**fields, "passes": passes}, median_ms, experiment)


def at(fields: dict[str, Any], median_ms: dict[str, float], experiment: Experiment) -> dict[str, Any]:
    """The metrics of `compute`, with other medians (pass to ms). A pass faster than its limit has `sol` null and the reason in
    `no_sol`: a short pass may have higher clocks than a long matrix product, and caches are faster than memory."""
    passes, sharing = {}, float(experiment.sharing)
    if experiment.model is None and not experiment.is_module:  # where the counts are of all the work
        own = sum(fields["flops_forward_by_rank"]) / experiment.world_size
        sharing = fields["flops"]["forward"] / max(own, 1)
    for which, ms in median_ms.items():
        entry = {key: x for key, x in fields["passes"][which].items() if key not in ("sol", "no_sol")}
        most = _most(entry["bytes_received_by_rank"])
        entry |= {
            "tokens_per_s": fields["tokens"] / ms * 1e3,
            "tflops_per_device": fields["flops"][which] / ms / sharing / 1e9,
            "received_gb_s": most / ms / 1e6 if most is not None else None,
        }
        if fields.get("matmul_tflops"):  # of a model
            entry["mfu"] = entry["tflops_per_device"] / fields["matmul_tflops"]
        if "limit_ms" in entry:
            entry["sol"] = sol = entry["limit_ms"] / ms
            if sol > EXCEEDED:
                why = f"{sol:.0%} of what the {CEILINGS[entry['limited_by']]} allows: that is no ceiling of this pass"
                entry |= {"sol": None, "no_sol": why}
        passes[which] = entry
    return {**fields, "passes": passes}


def _most(received: list[dict[str, int]] | None) -> int | None:
    """The bytes of the rank that receives most."""
    return max(sum(r.values()) for r in received) if received is not None else None


def gain(
    baseline: Mapping[str, Any], ms: dict[str, float], world: int, fields: Mapping[str, Any]
) -> dict[str, dict[str, float]]:
    """Speedup of a run on `world` ranks over its baseline, by pass. Efficiency is speedup over ranks; against dense
    attention it is speedup over the ratio of FLOPs. fields: the metrics of `compute`."""
    speedup = {which: baseline["passes"][which] / ms[which] for which in ms}
    ideal: dict[str, float] = dict.fromkeys(ms, world)
    if baseline.get("kind") == "dense":
        ideal = {which: max(fields["dense_flops"][which], 1) / max(fields["flops"][which], 1) for which in ms}
    return {"speedup": speedup, "efficiency": {which: x / ideal[which] for which, x in speedup.items()}}


def exceeds(fields: Mapping[str, Any]) -> bool:
    """Whether a pass was faster than its limit, by more than the error of a measurement."""
    return any("no_sol" in entry for entry in fields["passes"].values())


def _backwards(experiment: Experiment, which: str) -> tuple[bool, ...]:
    """Whether each attention call of a pass is a backward; with recompute a forward stands before it."""
    again = (False,) if experiment.model is not None and experiment.model.recompute else ()
    return {"forward": (False,), "backward": (*again, True), "optimizer": (), "total": (False, *again, True)}[which]


def _received(experiment: Experiment, parts: Sequence[Part], which: str) -> list[dict[str, int]]:
    """By rank, the bytes that attention receives in a pass; the sum of a model's gradients is not in it."""
    by_rank: list[Counter[str]] = []
    for rank in range(experiment.world_size):
        by_rank.append(Counter())
        for part, backward in product(parts, _backwards(experiment, which)):
            by_rank[-1].update(part.received(rank, backward))
    return [dict(received) for received in by_rank]


def _limit(
    experiment: Experiment,
    parts: Sequence[Part],
    which: str,
    fields: Mapping[str, Any],
    received: list[dict[str, int]] | None,
    ceilings: dict[str, float],
) -> dict[str, Any]:
    """The least time that this machine's ceilings allow the slowest rank, and the binding ceiling. Of a model its share of the matrix
    products, and then AdamW's sweep over memory."""
    work, link = experiment.workload, ceilings.get("link_gb_s")
    if experiment.model is not None:
        rank_flops: float = fields["flops"][which] / experiment.world_size
        swept = ADAMW * experiment.model.config(work).matrices * ITEMSIZE[work.dtype]
        moved, most = swept if experiment.backward and which in ("optimizer", "total") else 0, None
    else:
        backwards, ranks = _backwards(experiment, which), range(experiment.world_size)
        times = sum(work.shapes.backward_ratio if backward else 1.0 for backward in backwards)
        rank_flops, most = max(fields["flops_forward_by_rank"]) * times, _most(received)
        moved = max(sum(p.moved(r, x) for p in parts for x in backwards) for r in ranks)
    terms = {
        "compute": rank_flops / ceilings["matmul_tflops"] / 1e9,
        "memory": moved / ceilings["copy_gb_s"] / 1e6,
        "communication": most / link / 1e6 if most and link else 0.0,
    }
    limit = {"limited_by": max(terms, key=lambda term: terms[term])}
    if experiment.model is not None:
        return limit | {"limit_ms": sum(terms.values())}
    return limit | {"limit_ms": max(terms.values()), "memory_bytes": moved}
