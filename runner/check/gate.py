"""The correctness check. A run is timed only if its outputs agree with the workload's reference. After the timing the outputs
are checked again.

Before the checked call, a call with negated inputs runs, so that stale buffers cannot pass the check. The checked outputs
are kept. After the timing, the outputs of the last timed iteration must agree with them. Then one more iteration in the same
mode runs with negated inputs: it must give the negated outputs (for a sink's gradient, the same one). Both comparisons use
the tolerances of the check.

Where each timed iteration has a new packed batch, the first of these is checked, too, in its first call and after the timing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from runner.check import comparison, whole_model
from runner.check.errors import Compared, Error, total, verdict
from runner.config.experiment import Experiment
from runner.launch.rank import Rank
from runner.measure.attention_work import AttentionWork, ModuleWork
from runner.measure.model_work import ModelWork
from runner.measure.timing import iterate
from runner.measure.workload import EVEN, Passes, Workload
from runner.record.fields import Timed

# A workload's outputs on this rank, which the function owns, compared with their reference. Collective.
Compare = Callable[[Rank, Experiment, Any, dict[str, Tensor]], Compared]
COMPARISONS: dict[type, Compare] = {
    AttentionWork: comparison.compare,
    ModuleWork: whole_model.compare_module,
    ModelWork: whole_model.compare,
}


def check(me: Rank, experiment: Experiment, work: Workload) -> Compared:
    """Runs the workload and compares it with its reference, on all ranks. The result has the errors, the tolerances,
    `passed` and, if it failed, `why`."""
    for _ in range(2):
        me.say("check_variant")
        work.release()
        work.negate()
        iterate(work)
    compared = _compared(me, experiment, work)
    if not experiment.timing.new_packs or not compared.correctness.passed:
        return compared
    with work.new_pack(1) as call:
        me.say("check_variant", note="a new packed batch")
        iterate(work)
        new = _compared(me, replace(experiment, workload=call), work)
    why, tensors = new.correctness.why, new.correctness.tensors
    both = verdict([f"a new packed batch: {why}"] if why else [])
    return replace(compared, correctness=replace(compared.correctness, new_pack=tensors, **both), new_pack=new)


def _compared(me: Rank, experiment: Experiment, work: Workload) -> Compared:
    """Compares the outputs of the last iteration with their reference, and keeps them unless memory is limited."""
    outputs, kept = work.outputs(), None
    work.release()
    if experiment.launch.memory_limit_gb is None or experiment.device == "cuda":
        kept = {name: x.to("cpu", copy=True) for name, x in outputs.items()}
    return replace(COMPARISONS[type(work)](me, experiment, work, outputs), outputs=kept)


def check_timed(me: Rank, work: Workload, timed: Passes, checked: Compared) -> Timed:
    """After the timing, compares further outputs with the checked ones: those of the last `timed` iteration, unless it had
    another packed batch, and those of one more iteration with negated inputs, of the new packed batch, too, if one was checked.
    The result has the errors of each, `passed` and, if it failed, `why`."""
    me.say("check_timed")
    if checked.outputs is None:
        return Timed(why="launch.memory_limit_gb leaves no memory on a CPU to keep checked outputs in")
    fields: dict[str, Any] = {}
    why: list[str] = []
    last, new_pack = work.outputs(), checked.new_pack

    def compare(key: str, iteration: str, outputs: dict[str, Tensor], checked: Compared, sign: int) -> None:
        everyone = me.gather(_errors(me, work, outputs, checked, sign))
        errors = {name: total(rank[name] for rank in everyone) for name in outputs}
        fields[key] = {name: error.plain() for name, error in errors.items()}
        faults = (text for name, error in errors.items() for text in error.faults(name, checked.limits[name]))
        why.extend(f"{iteration}: {text}" for text in faults)

    if new_pack is not None:
        fields["last"] = {"why": "not compared: the last timed iteration had another packed batch"}
    elif not all(me.gather(last.keys() == checked.outputs.keys())):
        fields["last"] = {"why": "not compared: the last timed iteration left no outputs"}
    else:
        compare("last", "the last timed iteration", last, checked, 1)
    del last
    me.say("check_timed")
    work.negate()
    iterate(timed if new_pack is None else work)
    compare("negated", "an iteration with negated inputs", work.outputs(), checked, -1)
    work.negate()
    if new_pack is not None:
        with work.new_pack(-1):
            iterate(work)
            compare("new_pack", "a new packed batch with negated inputs", work.outputs(), new_pack, -1)
    work.release()
    return Timed(**verdict(why), **fields)


def _errors(me: Rank, work: Workload, outputs: dict[str, Tensor], checked: Compared, sign: int) -> dict[str, Error]:
    """This rank's errors of outputs against `sign` times the checked ones; for the outputs in `EVEN` sign is 1. The scale of a row is
    its norm and that of all rows of its head, by their root mean square."""
    assert checked.outputs is not None
    errors = {name: Error() for name in outputs}
    for name, x in outputs.items():
        tokens, value = work.rows(name, x), checked.outputs[name]
        # by batch element; a packed batch `[t, H, D]` counts as one
        elements = zip(x, value, strict=True) if x.dim() == 4 else [(x, value)]
        for batch, (mine, value) in enumerate(elements):
            expected = (1 if name in EVEN else sign) * value.to(me.device, torch.float32)
            squares = expected.square().sum(-1)
            scales = (squares + squares.mean(0)).sqrt_()
            errors[name].add(mine, expected, scales, checked.limits[name].absolute, batch, tokens)
    return errors
