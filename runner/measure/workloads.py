"""The workloads that a run can measure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from attention.variants.registry import variant
from runner.config.experiment import Experiment
from runner.config.variants import ON_ONE_DEVICE
from runner.launch.rank import Rank
from runner.measure.attention_work import AttentionWork, alone
from runner.measure.model_work import ModelWork
from runner.measure.module_work import ModuleWork
from runner.measure.workload import Workload


@dataclass(frozen=True)
class WorkloadKind:
    """create: the workload in a world. single: all of it on one device."""

    create: Callable[[Rank, Experiment], Workload]
    single: Callable[[Rank, Experiment], Workload]


def _single_attention(me: Rank, experiment: Experiment) -> Workload:
    """By the variant that computes the same on one device."""
    kind = experiment.workload.q_len is not None, experiment.dilation is not None
    found = variant(ON_ONE_DEVICE[kind])
    known = found.options.names() if found.mixes else ()
    options = {option: value for option, value in experiment.options.items() if option in known}
    dense = replace(experiment, variant=found.name, options=options, world_size=1)
    return AttentionWork(me, dense, alone(dense))


def _single_model(me: Rank, experiment: Experiment) -> Workload:
    dense = replace(experiment, variant="dense", options={}, world_size=1)
    return ModelWork(me, dense, alone(dense))


def _single_module(me: Rank, experiment: Experiment) -> Workload:
    one = replace(experiment, world_size=1)
    return ModuleWork(me, one, alone(one))


WORKLOADS = {
    "attention": WorkloadKind(AttentionWork, _single_attention),
    "module": WorkloadKind(ModuleWork, _single_module),
    "model": WorkloadKind(ModelWork, _single_model),
}


def kind(experiment: Experiment) -> WorkloadKind:
    """Of a run."""
    if experiment.model is not None:
        return WORKLOADS["model"]
    return WORKLOADS["module" if experiment.is_module else "attention"]
