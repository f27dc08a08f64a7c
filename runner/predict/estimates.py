"""Predictions: for each world size and length the best options of each variant, or why it can't."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from omegaconf import DictConfig, open_dict

from attention.geometry.counts import backward_flops, forward_flops
from runner.config import resolve
from runner.config.experiment import Experiment
from runner.costs.choice import Estimate, Task
from runner.costs.model import NAMES, choose, task_of, unsuitable, usual_kernel
from runner.predict.topologies import Cluster
from runner.predict.validation import calibrated
from runner.report.modelled import PASSES, Kind, called


@dataclass(frozen=True)
class Row:
    """Times in ms, of the slowest rank. exposed_ms: communication that nothing hides. peak_bytes: of a rank, inputs included. why: a
    variant is impossible; then there are no numbers."""

    world_size: int
    seq_len: int
    variant: str
    options: str = ""
    kernel: str = ""
    transport: str = ""
    ms: float | None = None
    forward_ms: float | None = None
    backward_ms: float | None = None
    exposed_ms: float | None = None
    tflops_per_device: float | None = None
    peak_bytes: int | None = None
    bound: str = ""  # compute, communication or launches
    why: str = ""
    called: str = ""  # dense, window, packed or decode


def experiment(cfg: DictConfig, world: int, seq_len: int | None) -> Experiment:
    """The experiment in a world of any size. Raises InvalidConfig and UnsupportedHere."""
    cfg = cfg.copy()
    with open_dict(cfg):
        cfg.world_size = world
        if seq_len is not None:
            cfg.seq_len = seq_len
    return resolve.experiment(cfg, 1 << 20, 0)


def rows(
    spec: Experiment, cluster: Cluster, asked: Collection[str], by: Mapping[Kind, float], every: bool = False
) -> list[Row]:
    """Sorted by time, the impossible variants last; of each variant the best options, or `every` one. asked: variants; none: all
    that are made for such a call. Compute is calibrated with the factors `by`. Raises ValueError for what the model does not know."""
    task = task_of(spec)
    variants = asked or [name for name in NAMES if not unsuitable(name, task)]
    machine = cluster.machine(spec.world_size, usual_kernel(spec, task, cluster.device), spec.replay)
    where = spec.world_size, spec.workload.seq_len
    try:
        choice = choose(task, machine, variants)
    except ValueError as error:
        return [Row(*where, name, why=str(error)) for name in variants]
    able = [_row(spec, task, _calibrated(estimate, task, cluster, by)) for estimate in choice.estimates]
    able.sort(key=lambda row: row.ms or 0.0)
    if not every:
        able = [next(row for row in able if row.variant == name) for name in dict.fromkeys(x.variant for x in able)]
    why = {label.split()[0]: reason for label, reason in choice.left_out.items()}
    for row in able:
        why.pop(row.variant, None)
    return able + [Row(*where, name, why=reason) for name, reason in why.items()]


def _calibrated(estimate: Estimate, task: Task, cluster: Cluster, by: Mapping[Kind, float]) -> Estimate:
    kinds = [(cluster.gpu or "cpu", estimate.kernel, which, called(task)) for which in PASSES]
    forward, *backward = (calibrated(one, kind, by) for one, kind in zip(estimate.both, kinds, strict=False))
    return replace(estimate, forward=forward, backward=backward[0] if backward else None)


def _row(spec: Experiment, task: Task, estimate: Estimate) -> Row:
    call, shapes, world, both = spec.workload, task.shapes, spec.world_size, estimate.both
    flops = forward_flops(shapes, call.pairs) + (backward_flops(shapes, call.pairs) if task.backward else 0)
    inputs = task.tokens * (shapes.kv_token + (shapes.out_token if task.backward else 0))
    inputs += (task.q_tokens or task.tokens) * shapes.q_token
    exposed = sum(duration.exposed for duration in both)
    bound = "communication" if exposed > sum(duration.compute for duration in both) else "compute"
    if any(duration.cpu > duration.gpu for duration in both):
        bound = "launches"
    options = estimate.candidate.label.split()[1:] + ["replay=graphs"] * estimate.graphs
    return Row(
        world, call.seq_len, estimate.candidate.variant, " ".join(options), estimate.kernel, estimate.transport,
        estimate.ms, estimate.forward.ms, estimate.backward.ms if estimate.backward else None, exposed,
        flops / world / estimate.ms / 1e9, estimate.peak_bytes + inputs, bound, called=called(task),
    )  # fmt: skip
