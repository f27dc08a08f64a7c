"""A model's comparison with its reference: the loss and every parameter's gradient (without a backward, each token's loss)
on all ranks against those of a world of one. That is the same model on one device with `dense` attention: once by kernel
math in fp64, or fp32 where fp64 would take too long, and once in the run's dtype with its kernel, which gives the error of one
device. Where one device has no memory for the model, models of fewer layers are compared."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from attention.kernels import name_of
from runner.check.errors import Compared, Error, Tolerance, total, verdict
from runner.check.pieces import precision
from runner.config.experiment import Experiment
from runner.launch.rank import Rank, is_out_of_memory
from runner.measure import choosing, memory, timing
from runner.measure.model_work import GUESSED, ModelWork, by_rows
from runner.measure.workload import alone

LEAST = 1e-4  # the relative error of a gradient that fp32's rounding in all layers explains
RATIO = 1.5  # at most so many times the error of one device, all gradients together
# The same for a single one: where terms nearly cancel, as for the queries of an attention that is nearly uniform, partial results
# lose more than one call does. Four times was seen in bf16.
RATIO_OF_ONE = 10.0
CHUNK = 2048  # tokens whose logits are in memory at once

Tensors = dict[str, Tensor]


def compare(me: Rank, experiment: Experiment, work: ModelWork, outputs: Tensors, with_scales: bool) -> Compared:
    """The comparison (`gate.Compare`) of a model."""
    layers, there = work.config.layers, None
    expected_s = 4 * me.world * choosing.iteration_s(me, experiment)
    while layers:
        me.say("check_reference", expected_s, waiting=me.rank > 0)
        assert experiment.model is not None
        here = replace(experiment, model=replace(experiment.model, layers=layers))
        there = references(me, here, work.plan.kernel.name) if me.rank == 0 else None
        if me.agree(there is not None):
            break
        layers //= 2
    if not layers:
        raise MemoryError(f"model={work.about.name}: one device has no memory for a layer; use check.enabled=false")
    compared = outputs
    if layers < work.config.layers:
        fewer = ModelWork(me, here)
        timing.iterate(fewer)
        compared = fewer.outputs()
    if GUESSED in compared:  # what each token has, of all tokens
        mine = compared[GUESSED].view(*work.batches[0].ids.shape, 1, 1)
        compared = {GUESSED: work.fn.unshard(mine).reshape(-1, 1, 1)}
    me.say("check_compare")
    found = me.agree(result(experiment, compared, *there) if there else None)
    about = {"kernel": work.plan.kernel.name, "checked_share": layers / work.config.layers}
    return with_limits(experiment, found | about, outputs, with_scales)


def with_limits(experiment: Experiment, found: dict[str, Any], outputs: Tensors, with_scales: bool) -> Compared:
    """The comparison of these outputs, whose rows have no scale of their own."""
    limits = {name: tolerance(experiment, None) for name in outputs}
    scales = {name: torch.ones(x.shape[:-1]) for name, x in outputs.items()} if with_scales else {}
    return Compared(found, scales, limits)


def tolerance(experiment: Experiment, local: Error | None, ratio: float = RATIO_OF_ONE) -> Tolerance:
    """Of the loss, of a gradient as a whole, and with `RATIO` of all gradients together. local: the error of one device."""
    least = max(experiment.dtype.grad_rel_l2, LEAST)
    return Tolerance(least if local is None else max(least, ratio * local.rel_l2))


def references(me: Rank, experiment: Experiment, kernel: str) -> tuple[torch.dtype, Tensors, Tensors] | None:
    """The dtype of the reference, its outputs, and those of one device in the run's dtype; None without memory for
    them."""
    one = replace(experiment, variant="dense", options={}, world_size=1, replay="none")
    call = experiment.workload
    assert experiment.model is not None
    dtype = precision(experiment, 3 * experiment.model.config(call).flops(call.batch, call.seq_len) / 1e12)
    own = "auto" if experiment.chosen is None or experiment.is_peer else kernel
    try:
        exact = one_device(me, replace(one, kernel="math"), dtype)
        memory.empty_caches(me.device)
        return dtype, exact, one_device(me, replace(one, kernel=own), None)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
    finally:
        memory.empty_caches(me.device)
    return None


def one_device(me: Rank, experiment: Experiment, dtype: torch.dtype | None) -> Tensors:
    """The outputs of the model by itself, layer by layer and with few tokens' logits at once."""
    assert experiment.model is not None
    recomputing = replace(experiment, model=replace(experiment.model, recompute=True))
    work = ModelWork(me, recomputing, alone(experiment), dtype)
    batch, model = work.batches[0], work.model
    with torch.set_grad_enabled(work.backward):
        hidden = model.hidden(batch)
        parts = zip(hidden.split(CHUNK, 1), batch.labels.split(CHUNK, 1), strict=True)
        losses = torch.cat([checkpoint(_losses, model, *part, use_reentrant=False) for part in parts], 1)
    if not work.backward:
        return {GUESSED: work.less_guess(losses)}
    loss = losses.sum() / batch.counted
    loss.backward()
    gradients = {name: by_rows(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach().view(1, 1, 1), **gradients}


def _losses(model: Any, hidden: Tensor, labels: Tensor) -> Tensor:
    logits = model.logits(hidden)
    upcast = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(upcast.flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)


def result(
    experiment: Experiment, outputs: Tensors, dtype: torch.dtype, exact: Tensors, local: Tensors
) -> dict[str, Any]:
    """The fields of the result: of the loss or out, of all gradients together, and of the worst one. Every one counts. exact: the
    reference, computed in `dtype`. local: the outputs of one device."""
    errors, of_local = ({name: _error(x[name], exact[name]) for name in exact} for x in (outputs, local))
    why = [text for name, error in errors.items() for text in error.faults(name, tolerance(experiment, of_local[name]))]
    shown: dict[str, list[str]] = {name: [name] for name in ("loss", GUESSED, "out") if name in errors}
    if gradients := [name for name in errors if name not in shown]:
        together, device = (total(each[name] for name in gradients) for each in (errors, of_local))
        why += together.faults("all gradients", tolerance(experiment, device, RATIO))
        worst = max(gradients, key=lambda name: errors[name].rel_l2)
        shown |= {"gradients": gradients, f"gradient of {worst}": [worst]}
    tensors = {}
    for label, names in shown.items():
        here, device = (total(each[name] for name in names) for each in (errors, of_local))
        ratio = {"local_rel_l2": device.rel_l2, "ratio_to_local": here.ratio_to(device)}
        tensors[label] = {"rel_l2": here.rel_l2, "max_abs": here.worst, **ratio}
    lse = {"checked": None, "why": "results and gradients of a whole model or module are compared"}
    least = tolerance(experiment, None).rel_l2
    bars = {"grad_rel_l2": least, "error_ratio": RATIO, "error_ratio_of_one": RATIO_OF_ONE}
    return verdict(why, tensors=tensors, lse=lse, tolerance=bars, reference=name_of(dtype))


def _error(x: Tensor, expected: Tensor) -> Error:
    error = Error()
    error.add(x, expected.to(torch.promote_types(expected.dtype, torch.float32)), x.new_ones(x.shape[:-1]), 0.0)
    return error
