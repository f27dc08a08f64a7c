"""The metrics of a model that differ from those of an attention call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from attention import masks
from runner.config.experiment import ITEMSIZE, Experiment
from runner.costs import dry_run
from runner.peers import variant

BACKWARD = 2  # FLOPs of a model's backward over those of its forward, whatever is computed again
FULL = masks.full()
ADAMW = 7  # parameter, gradient and two states are read, all but the gradient written


def flops(experiment: Experiment) -> dict[str, int]:
    """`Config.flops` of the forward, twice that for the backward. The optimizer step, which is bound by memory, counts
    none."""
    assert experiment.model is not None
    call = experiment.workload
    forward = experiment.model.config(call).flops(call.batch, call.seq_len)
    if not experiment.backward:
        return {"forward": forward}
    return {
        "forward": forward,
        "backward": BACKWARD * forward,
        "optimizer": 0,
        "total": (1 + BACKWARD) * forward,
    }


def received(experiment: Experiment, pulls: bool) -> dict[str, list[dict[str, int]]] | None:
    """By pass and rank, the bytes that its attention receives: the sum over the layers, by each one's mask. A backward with
    recompute receives those of the forward again. The sum of gradients is not in it. None for an external package, whose
    exchange does not follow a schedule. pulls: as in `dry_run`."""
    assert experiment.model is not None
    call, chosen, options = experiment.workload, variant(experiment.variant), experiment.call_options
    if experiment.is_peer:
        return None
    config = experiment.model.config(call)
    layers = Counter(config.kind(i).mask for i in range(config.layers))
    if config.encoder_layers:
        layers[FULL] += config.encoder_layers + config.layers  # the encoder and the cross attention
    sums = {which: [Counter[str]() for _ in range(experiment.world_size)] for which in (False, True)}
    for mask, times in layers.items():
        problem = chosen.problem(call.cu_seqlens, experiment.world_size, mask, options)
        for rank in range(experiment.world_size):
            passes = dry_run(chosen, problem, call.shapes, options, rank=rank, pulls=pulls, backward=True)
            for is_backward, by_rank in sums.items():
                by_rank[rank].update({key: times * n for key, n in passes[is_backward].received.items()})
    forward, backward = sums[False], sums[True]
    if experiment.model.recompute:
        backward = [a + b for a, b in zip(forward, backward, strict=True)]
    parts = {"forward": forward, "backward": backward, "optimizer": [Counter[str]() for _ in forward]}
    parts["total"] = [a + b for a, b in zip(forward, backward, strict=True)] if experiment.backward else forward
    return {which: [dict(found) for found in by_rank] for which, by_rank in parts.items()}


def passes(
    experiment: Experiment, which: Iterable[str], ceilings: dict[str, float] | None, pulls: bool = False
) -> dict[str, dict[str, Any]]:
    """By pass: the bytes received, and the least time that this machine's ceilings allow a rank: its share of the matrix
    products, and AdamW's sweep over memory. pulls: as in `dry_run`."""
    assert experiment.model is not None
    parameters = experiment.model.config(experiment.workload).matrices
    found: dict[str, dict[str, Any]] = {}
    counted, by_pass = flops(experiment), received(experiment, pulls)
    for name in which:
        found[name] = {"bytes_received_by_rank": by_pass[name] if by_pass else None}
        if ceilings:
            compute = counted[name] / experiment.world_size / ceilings["matmul_tflops"] / 1e9
            moved = ADAMW * parameters * ITEMSIZE[experiment.workload.dtype]
            swept = (
                moved / ceilings["copy_gb_s"] / 1e6 if name in ("optimizer", "total") and experiment.backward else 0.0
            )
            by = "compute" if compute >= swept else "memory"
            found[name] |= {"limit_ms": compute + swept, "limited_by": by}
    return found
