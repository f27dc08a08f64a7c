"""The definition of every metric."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from attention.geometry import counts
from runner.config.experiment import ITEMSIZE, Experiment
from runner.measure.call_costs import parts
from runner.measure.statistics import Fields
from runner.record.fields import Baseline, Metrics, PassMetrics

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
        hidden, about = work.heads * work.head_dim, (replace(work.shapes, batch=1, heads=1), experiment.head_pairs)
        # of a module x to q, k and v, and to out
        products = (
            4 * work.batch * work.seq_len * hidden * (hidden + work.kv_heads * work.head_dim) * experiment.is_module
        )
        forward = counts.forward_flops(*about) + products
        later = {"backward": counts.backward_flops(*about) + 2 * products}
    if not experiment.backward:
        return {"forward": forward}
    return {"forward": forward, **later, "total": forward + later["backward"]}


def iteration_flops(experiment: Experiment) -> int:
    """FLOPs of an iteration on all ranks."""
    return list(flops(experiment).values())[-1]


def sparsity(experiment: Experiment) -> Fields:
    """The fields of `Metrics` of what the mask leaves of dense attention. connections: (query, key) pairs of a head and batch element, the mean of them
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
    experiment: Experiment, median_ms: dict[str, float], ceilings: Mapping[str, float] | None, pulls: bool = False
) -> Metrics:
    """All metrics, from the slowest rank's medians (pass to ms) and this machine's ceilings. pulls: whether the run's
    transport pulls, as in `dry_run`."""
    work, model, ranks = experiment.workload, experiment.model, range(experiment.world_size)
    calls = parts(experiment)
    by_rank = [sum(flops) for flops in zip(*(part.flops() for part in calls), strict=True)]
    of_all, kv_read, passes = flops(experiment), [], {}
    if grouping := experiment.call_options.get("grouping"):
        about = calls[0].problem, work.shapes
        kv_read = [counts.kv_bytes_read(*about, rank, grouping) for rank in ranks]
    for which in median_ms:
        # whether each attention call of the pass is a backward; with recompute a forward stands before it
        again = (False,) if model is not None and model.recompute else ()
        backwards = {"forward": (False,), "optimizer": ()}.get(which, (*again, True))
        if which == "total":
            backwards = (False, *backwards)
        received = None  # the exchange of an external package does not follow a schedule
        if not experiment.is_peer:  # of attention: the sum of a model's gradients is not in it
            both = [[part.received(rank, pulls) for part in calls] for rank in ranks]
            received = [
                dict(sum((of_part[x] for of_part in of_rank for x in backwards), Counter())) for of_rank in both
            ]
        entry = PassMetrics(tflops_per_device=0.0, bytes_received_by_rank=received)  # `at` adds the rates
        if ceilings and model is not None:
            # a rank's share of the matrix products, and then AdamW's sweep over memory
            swept = experiment.backward and which in ("optimizer", "total")
            moved = swept * ADAMW * model.config(work).matrices * ITEMSIZE[work.dtype] // experiment.parameter_ranks
            entry = replace(entry, **_limit(ceilings, of_all[which] / experiment.world_size, moved, 0, sum))
        elif ceilings:
            times = sum(work.shapes.backward_ratio if backward else 1.0 for backward in backwards)
            moved = max(sum(part.moved(rank, x) for part in calls for x in backwards) for rank in ranks)
            limit = _limit(ceilings, max(by_rank) * times, moved, entry.received or 0, max)
            entry = replace(entry, memory_bytes=moved, **limit)
        passes[which] = entry
    counted = Metrics(
        passes=passes,
        tokens=work.batch * work.queries,
        flops=of_all,
        flops_forward_by_rank=by_rank,
        kv_bytes_read_by_rank=kv_read,
        matmul_tflops=ceilings["matmul_tflops"] if ceilings and model is not None else None,
        **sparsity(experiment),
    )
    return at(counted, median_ms, experiment)


def _limit(
    ceilings: Mapping[str, float], flops: float, moved: int, received: int, total: Callable[[Iterable[float]], float]
) -> Fields:
    """The least time that this machine's ceilings allow a rank with so many FLOPs, bytes moved in memory and bytes received: the total
    of the three."""
    terms = {
        "compute": flops / ceilings["matmul_tflops"] / 1e9,
        "memory": moved / ceilings["copy_gb_s"] / 1e6,
        "communication": received / ceilings.get("link_gb_s", math.inf) / 1e6,
    }
    return {"limited_by": max(terms, key=terms.__getitem__), "limit_ms": total(terms.values())}


def at(counted: Metrics, median_ms: dict[str, float], experiment: Experiment) -> Metrics:
    """The metrics with other medians (pass to ms). A pass faster than its limit has `sol` null and the reason in
    `no_sol`: a short pass may have higher clocks than a long matrix product, and caches are faster than memory."""
    passes, sharing = {}, float(experiment.sharing)
    if experiment.model is None and not experiment.is_module:  # where the counts are of all the work
        sharing = counted.flops["forward"] * experiment.world_size / max(sum(counted.flops_forward_by_rank), 1)
    for which, ms in median_ms.items():
        entry, tflops = counted.passes[which], counted.flops[which] / ms / sharing / 1e9
        sol, no_sol = entry.limit_ms and entry.limit_ms / ms, None
        if entry.limited_by and sol and sol > EXCEEDED:
            no_sol = f"{sol:.0%} of what the {CEILINGS[entry.limited_by]} allows: that is no ceiling of this pass"
        passes[which] = replace(
            entry,
            tflops_per_device=tflops,
            tokens_per_s=(counted.tokens or 0) / ms * 1e3,
            received_gb_s=entry.received / ms / 1e6 if entry.received is not None else None,
            mfu=tflops / counted.matmul_tflops if counted.matmul_tflops else None,
            sol=None if no_sol else sol,
            no_sol=no_sol,
        )
    return replace(counted, passes=passes)


def compared(baseline: Baseline, ms: dict[str, float], world: int, counted: Metrics) -> Baseline:
    """The baseline, if it has times, with the speedup of a run on `world` ranks over it, by pass. Efficiency is speedup over
    ranks; against dense attention it is speedup over the ratio of FLOPs."""
    speedup = {which: baseline.passes[which] / ms[which] for which in ms if baseline.passes}
    ideal: dict[str, float] = dict.fromkeys(ms, world)
    if baseline.kind == "dense":
        ideal = {which: max(counted.dense_flops[which], 1) / max(counted.flops[which], 1) for which in ms}
    return replace(baseline, speedup=speedup, efficiency={which: x / ideal[which] for which, x in speedup.items()})


def exceeds(counted: Metrics) -> bool:
    """Whether a pass was faster than its limit, by more than the error of a measurement."""
    return any(entry.no_sol for entry in counted.passes.values())
