"""The workloads that a run can measure."""

from __future__ import annotations

from dataclasses import replace

from attention.variants.registry import variant
from runner.config.experiment import Experiment
from runner.config.rules.attention import ON_ONE_DEVICE
from runner.launch.rank import Rank
from runner.measure.attention_work import AttentionWork, ModuleWork
from runner.measure.model_work import ModelWork
from runner.measure.workload import Workload, alone


def workload(experiment: Experiment) -> type[AttentionWork] | type[ModelWork]:
    """The workload that a run measures."""
    if experiment.model is not None:
        return ModelWork
    return ModuleWork if experiment.is_module else AttentionWork


def single(me: Rank, experiment: Experiment) -> Workload:
    """All of a run's work on one device."""
    one = on_one_device(experiment)
    return workload(experiment)(me, one, alone(one))


def on_one_device(experiment: Experiment) -> Experiment:
    """The run on one device, by the variant that computes the same there."""
    name = ON_ONE_DEVICE[experiment.workload.q_len is not None, experiment.dilation is not None]
    chosen = variant(experiment.variant if experiment.is_module else name)
    known = chosen.options.names() if chosen.mixes else ()
    options = {option: value for option, value in experiment.options.items() if option in known}
    return replace(experiment, variant=chosen.name, options=options, world_size=1)
