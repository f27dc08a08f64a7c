"""Whether the kernel and the transport of a run can do its calls, asked without a world."""

from __future__ import annotations

import torch

from attention import transports
from attention.geometry.schedules import masks
from attention.kernels import Shape, select, select_for_patterns
from attention.kernels.tile_lists import most_at_once
from runner.config.experiment import Experiment
from runner.config.values import UnsupportedHere
from runner.measure.workload import DTYPES


def call_shape(spec: Experiment, tokens: int | None = None) -> Shape:
    """What kernels differ in, of a run's calls. tokens: the queries of a rank; None: many."""
    call = spec.workload
    return Shape(
        spec.device, DTYPES[call.dtype], call.heads, call.kv_heads, call.head_dim, bool(call.seqlens), spec.backward, tokens,
        value_dim=None if call.value_dim == call.head_dim else call.value_dim, softcap=call.softcap is not None,
    )  # fmt: skip


def check(spec: Experiment) -> None:
    """Raises UnsupportedHere, with the reason that a rank would give. Not of whole models, of mixtures, of external packages, nor of what
    the run chooses itself."""
    call, chosen = spec.workload, spec.chosen
    if spec.model is not None or chosen is None or chosen.mixes or spec.is_peer or spec.best_options:
        return
    problem, shape = spec.problem, call_shape(spec)
    try:
        if spec.world_size > 1:
            transports.resolve(spec.transport, torch.device(spec.device))
        if problem.is_cut:
            one_each = most_at_once(problem.mask.rectangles(call.seq_len)) <= 1
            select_for_patterns(spec.kernel, shape, masks(problem), one_each)
        else:
            select(spec.kernel, shape, masks(problem), chosen.decode)
    except ValueError as error:
        raise UnsupportedHere(str(error)) from None
