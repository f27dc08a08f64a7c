"""The correctness check. A run is timed only if its outputs agree with the workload's reference. After the timing the outputs
are checked again.

Before the checked call, a call with negated inputs runs, so that stale buffers cannot pass the check. The checked outputs
are kept. After the timing, the outputs of the last timed iteration must agree with them. Then one more iteration in the same
mode runs with negated inputs: it must give the negated outputs (for a sink's gradient, the same one). Both comparisons use
the tolerances of the check.

Where each timed iteration has a new packed batch, the first of these is checked, too, in its first call and after the timing."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from runner.check import comparison, module, whole_model
from runner.check.errors import Compared, Error, Tolerance, total, verdict
from runner.config.experiment import Experiment
from runner.launch.rank import Rank
from runner.measure.attention_work import AttentionWork
from runner.measure.model_work import ModelWork
from runner.measure.module_work import ModuleWork
from runner.measure.timing import iterate
from runner.measure.workload import EVEN, Passes, Workload

# A workload's outputs on this rank, which the function owns, compared with their reference. The flag: whether error scales are
# wanted. Collective.
Compare = Callable[[Rank, Experiment, Any, dict[str, Tensor], bool], Compared]
COMPARISONS: dict[type, Compare] = {
    AttentionWork: comparison.compare,
    ModuleWork: module.compare,
    ModelWork: whole_model.compare,
}


@dataclass(frozen=True)
class Kept:
    """This rank's checked outputs (as `Workload.outputs`), the scales of their rows, both in CPU memory, and their
    tolerances; those of the new packed batch, if one was checked."""

    outputs: dict[str, Tensor]
    scales: dict[str, Tensor]
    limits: dict[str, Tolerance]
    new_pack: Kept | None = None


@dataclass(frozen=True)
class Checked:
    """found: the fields of the result. kept: the outputs to compare timed outputs with; None if memory is limited."""

    found: dict[str, Any]
    kept: Kept | None


def check(me: Rank, experiment: Experiment, work: Workload) -> Checked:
    """Runs the workload and compares it with its reference, on all ranks. The result has the errors, the tolerances,
    `passed` and, if it failed, `why`."""
    for _ in range(2):
        me.say("check_variant")
        work.release()
        work.negate()
        iterate(work)
    checked = _compared(me, experiment, work)
    if not experiment.timing.new_packs or not checked.found["passed"]:
        return checked
    with work.new_pack(1) as call:
        me.say("check_variant", note="a new packed batch")
        iterate(work)
        new = _compared(me, replace(experiment, workload=call), work)
    why = [f"a new packed batch: {new.found['why']}"] if new.found["why"] else []
    found = checked.found | verdict(why, new_pack=new.found["tensors"])
    return Checked(found, checked.kept and replace(checked.kept, new_pack=new.kept))


def _compared(me: Rank, experiment: Experiment, work: Workload) -> Checked:
    """Compares the outputs of the last iteration with their reference."""
    keep = experiment.launch.memory_limit_gb is None or experiment.device == "cuda"
    outputs = work.outputs()
    work.release()
    copies = _on_host(outputs) if keep else {}
    compared = COMPARISONS[type(work)](me, experiment, work, outputs, keep)
    kept = Kept(copies, _on_host(compared.scales), compared.limits) if keep else None
    return Checked(compared.found, kept)


def check_timed(me: Rank, experiment: Experiment, work: Workload, timed: Passes, kept: Kept | None) -> dict[str, Any]:
    """After the timing, compares further outputs with the checked ones: those of the last `timed` iteration, unless it had
    another packed batch, and those of one more iteration with negated inputs, of the new packed batch, too, if one was checked.
    The result has the errors of each, `passed` and, if it failed, `why`."""
    me.say("check_timed")
    if kept is None:
        return {"passed": None, "why": "launch.memory_limit_gb leaves no memory on a CPU to keep checked outputs in"}
    found: dict[str, Any] = {}
    why: list[str] = []

    def compare(key: str, iteration: str, outputs: dict[str, Tensor], kept: Kept, sign: int) -> None:
        errors = _errors(me, work, outputs, kept, sign)
        found[key] = {name: error.plain() for name, error in errors.items()}
        faults = [text for name, error in errors.items() for text in error.faults(name, kept.limits[name])]
        why.extend(f"{iteration}: {text}" for text in faults)

    last = work.outputs()
    if kept.new_pack is not None:
        found["last"] = {"why": "not compared: the last timed iteration had another packed batch"}
    elif not all(me.gather(last.keys() == kept.outputs.keys())):
        found["last"] = {"why": "not compared: the last timed iteration left no outputs"}
    else:
        compare("last", "the last timed iteration", last, kept, 1)
    del last
    me.say("check_timed")
    work.negate()
    iterate(timed if kept.new_pack is None else work)
    compare("negated", "an iteration with negated inputs", work.outputs(), kept, -1)
    work.negate()
    if kept.new_pack is not None:
        with work.new_pack(-1):
            iterate(work)
            compare("new_pack", "a new packed batch with negated inputs", work.outputs(), kept.new_pack, -1)
    work.release()
    return verdict(why, **found)


def _errors(me: Rank, work: Workload, outputs: dict[str, Tensor], kept: Kept, sign: int) -> dict[str, Error]:
    """The errors of the outputs against `sign` times the kept outputs, over all ranks; for the outputs in `EVEN` sign is 1."""
    errors = {name: Error() for name in outputs}
    for name, x in outputs.items():
        tokens, atol = work.rows(name), kept.limits[name].absolute
        for batch, (mine, value, scale) in enumerate(_by_batch(x, kept.outputs[name], kept.scales[name])):
            expected = (1 if name in EVEN else sign) * value.to(me.device, torch.float32)
            errors[name].add(mine, expected, scale.to(me.device), atol, batch, tokens)
    everyone = me.gather(errors)
    return {name: total(rank[name] for rank in everyone) for name in errors}


def _by_batch(*tensors: Tensor) -> Iterable[tuple[Tensor, ...]]:
    """Each batch element of `[B, s, H, D]` and `[B, s, H]`; a packed `[t, H, D]` counts as one."""
    return [tensors] if tensors[0].dim() == 3 else zip(*tensors, strict=True)


def _on_host(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies in CPU memory, even of CPU tensors."""
    return {name: x.to("cpu", copy=True) for name, x in tensors.items()}
