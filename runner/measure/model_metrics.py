"""The metrics of a model that differ from those of an attention call."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from runner.config.experiment import ITEMSIZE, Experiment

BACKWARD = 2  # FLOPs of a model's backward over those of its forward, whatever is computed again
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


def passes(
    experiment: Experiment, which: Iterable[str], ceilings: dict[str, float] | None
) -> dict[str, dict[str, Any]]:
    """By pass: the bytes received, which are not known, and the least time that this machine's ceilings allow a rank: its
    share of the matrix products, and AdamW's sweep over memory."""
    assert experiment.model is not None
    parameters = experiment.model.config(experiment.workload).matrices
    found: dict[str, dict[str, Any]] = {}
    counted = flops(experiment)
    for name in which:
        found[name] = {"bytes_received_by_rank": None}
        if ceilings:
            compute = counted[name] / experiment.world_size / ceilings["matmul_tflops"] / 1e9
            moved = ADAMW * parameters * ITEMSIZE[experiment.workload.dtype]
            swept = (
                moved / ceilings["copy_gb_s"] / 1e6 if name in ("optimizer", "total") and experiment.backward else 0.0
            )
            by = "compute" if compute >= swept else "memory"
            found[name] |= {"limit_ms": compute + swept, "limited_by": by}
    return found
