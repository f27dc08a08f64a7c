"""A model's or module's comparison with its reference. Of a model: the loss and every parameter's gradient (without a backward, each token's loss)
on all ranks against those of a world of one. That is the same model on one device with `dense` attention: once by kernel
math in fp64, or fp32 where fp64 would take too long, and once in the run's dtype with its kernel, which gives the error of one
device. Where one device has no memory for the model, models of fewer layers are compared."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attention.kernels import name_of
from runner.check.errors import Compared, Error, Tolerance, total, verdict
from runner.check.pieces import precision, tflop
from runner.config.experiment import Experiment
from runner.launch.rank import Rank, is_out_of_memory
from runner.measure import choosing, memory, timing
from runner.measure.attention_work import ModuleWork
from runner.measure.model_work import GUESSED, ModelWork
from runner.measure.workload import Workload, alone
from runner.measure.workloads import on_one_device
from runner.record.fields import Correctness, LseError, TensorError

LEAST = 1e-4  # the relative error of a gradient that fp32's rounding in all layers explains
RATIO = 1.5  # at most so many times the error of one device, all gradients together
# The same for a single one: where terms nearly cancel, as for the queries of an attention that is nearly uniform, partial results
# lose more than one call does. Four times was seen in bf16.
RATIO_OF_ONE = 10.0

Tensors = dict[str, Tensor]


def compare(me: Rank, experiment: Experiment, work: ModelWork, outputs: Tensors) -> Compared:
    """The comparison (`gate.Compare`) of a model."""
    layers, there = work.config.layers, None
    expected_s = 4 * me.world * choosing.iteration_s(me, experiment)
    while layers:
        me.say("check_reference", expected_s, waiting=me.rank > 0)
        here = _changed(experiment, layers=layers)
        there = references(me, here, work.plan.kernel.name) if me.rank == 0 else None
        if me.agree(there is not None):
            break
        layers //= 2
    if not layers:
        raise MemoryError(f"model={work.about.name}: one device has no memory for a layer; use check.enabled=false")
    mine = outputs
    if layers < work.config.layers:
        fewer = ModelWork(me, here)
        timing.iterate(fewer)
        mine = fewer.outputs()
    if GUESSED in mine:  # what each token has, of all tokens
        of_tokens = mine[GUESSED].view(*work.batches[0].ids.shape, 1, 1)
        mine = {GUESSED: work.fn.unshard(of_tokens).reshape(-1, 1, 1)}
    me.say("check_compare")
    result = me.agree(correctness(experiment, mine, *there) if there else None)
    share = layers / work.config.layers
    return compared(experiment, outputs, replace(result, kernel=work.plan.kernel.name, checked_share=share))


def compare_module(me: Rank, experiment: Experiment, work: ModuleWork, outputs: Tensors) -> Compared:
    """The comparison (`gate.Compare`) of the module, of all that each rank computes, with the module on one device."""
    me.say("check_reference")
    dtype, kernel = precision(experiment, tflop(experiment)), work.plan.kernel.name
    exact, local = (
        _outputs(ModuleWork(me, one, alone(one), own))
        for name, own in (("math", dtype), (kernel, None))
        for one in [replace(on_one_device(experiment), kernel=name)]
    )
    me.say("check_compare")
    mine = correctness(experiment, outputs, dtype, exact, local)
    why = dict.fromkeys(filter(None, me.gather(mine.why)))
    return compared(experiment, outputs, replace(mine, kernel=kernel, **verdict(why)))


def compared(experiment: Experiment, outputs: Tensors, result: Correctness) -> Compared:
    """The comparison of these outputs, whose rows have no scale of their own."""
    return Compared(result, dict.fromkeys(outputs, tolerance(experiment, None)))


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
    """The outputs of the model by itself, which computes the forward of each layer again in its backward."""
    return _outputs(ModelWork(me, _changed(experiment, recompute=True), alone(experiment), dtype))


def _outputs(work: Workload) -> Tensors:
    for which in work.passes[:2]:  # no optimizer
        work.run(which)
    return work.outputs()


def _changed(experiment: Experiment, **changes: Any) -> Experiment:
    assert experiment.model is not None
    return replace(experiment, model=replace(experiment.model, **changes))


def correctness(
    experiment: Experiment, outputs: Tensors, dtype: torch.dtype, exact: Tensors, local: Tensors
) -> Correctness:
    """Of the loss or out, of all gradients together, and of the worst one. Every one counts. exact: the
    reference, computed in `dtype`. local: the outputs of one device."""
    errors = {name: (_error(outputs[name], x), _error(local[name], x)) for name, x in exact.items()}
    why = [text for name, (error, alone) in errors.items() for text in error.faults(name, tolerance(experiment, alone))]
    shown = {name: [name] for name in ("loss", GUESSED, "out") if name in errors}
    if gradients := [name for name in errors if name not in shown]:
        worst = max(gradients, key=lambda name: errors[name][0].rel_l2)
        shown |= {"gradients": gradients, f"gradient of {worst}": [worst]}
    tensors = {}
    for label, names in shown.items():
        error, alone = (total(both) for both in zip(*(errors[name] for name in names), strict=True))
        if label == "gradients":
            why += error.faults("all gradients", tolerance(experiment, alone, RATIO))
        tensors[label] = TensorError(rel_l2=error.rel_l2, max_abs=error.worst, **error.beside(alone))
    lse = LseError(why="results and gradients of a whole model or module are compared")
    least = tolerance(experiment, None).rel_l2
    bars = {"grad_rel_l2": least, "error_ratio": RATIO, "error_ratio_of_one": RATIO_OF_ONE}
    return Correctness(**verdict(why), tensors=tensors, lse=lse, tolerance=bars, reference=name_of(dtype))


def _error(x: Tensor, expected: Tensor) -> Error:
    error = Error()
    error.add(x, expected.to(torch.promote_types(expected.dtype, torch.float32)), x.new_ones(x.shape[:-1]), 0.0)
    return error
