"""The correctness check of runs of dilated attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from runner.launch.rank import Rank


def checked(me: Rank, experiment: dict[str, Any], wrong: list[dict[str, Any]]) -> list[list[Any]]:
    """Whether the correctness check passes, and the largest ratio to the errors of a local call: of the experiment, and of
    functions with these other options in its place."""
    from runner.check import gate
    from runner.config.experiment import Experiment
    from runner.measure.attention_work import AttentionWork
    from runner.measure.workload import build

    spec = Experiment.from_plain(experiment)
    outcomes = []
    for options in ({}, *wrong):
        work = AttentionWork(me, spec, build(replace(spec, options=spec.options | options)))
        found = gate.check(me, spec, work).correctness
        outcomes.append([found.passed, max(x.ratio_to_local or 0.0 for x in found.tensors.values())])
    return outcomes


def checked_module(me: Rank, experiment: dict[str, Any]) -> list[str | None]:
    """Why the check of a module's run fails: as it is, after the timing, and with a wrong gradient."""
    from runner.check import gate
    from runner.config.experiment import Experiment
    from runner.measure.attention_work import ModuleWork

    spec = Experiment.from_plain(experiment)
    work = ModuleWork(me, spec)
    checked = gate.check(me, spec, work)
    for which in work.passes:
        work.run(which)
    found = [checked.correctness.why, gate.check_timed(me, work, work, checked).why]
    call = work.call

    def gradient_too_large() -> torch.Tensor:
        return call() + 0.02 * (work.x - work.x.detach())  # adds 0.02 dout to dx

    work.call = gradient_too_large
    found.append(gate.check(me, spec, work).correctness.why)
    return found
