"""Predictions: for each world size and length the best options of each variant, or why it can't."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from omegaconf import DictConfig, open_dict

from attention.geometry.counts import backward_flops, forward_flops
from attention.masks.band import Band
from runner.config import resolve
from runner.config.experiment import Experiment
from runner.costs.choice import Duration, Estimate, Estimates, Task
from runner.costs.hardware import Machine
from runner.costs.model import NAMES, choose, task_of, unsuitable
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

    def plain(self) -> dict[str, Any]:
        return asdict(self)


def spec_of(cfg: DictConfig, world: int, seq_len: int | None) -> Experiment:
    """The experiment in a world of any size. Raises InvalidConfig and UnsupportedHere."""
    cfg = cfg.copy()
    with open_dict(cfg):
        cfg.world_size = world
        if seq_len is not None:
            cfg.seq_len = seq_len
    return resolve.experiment(cfg, 1 << 20, 0)


def task(spec: Experiment) -> Task:
    """Raises ValueError for what the model does not know."""
    call = spec.workload
    if not isinstance(call.mask, Band) or spec.model is not None:
        what = f"model={spec.model.name}" if spec.model else f"mask={call.mask.describe()}"
        raise ValueError(f"{what}: predicted are full, causal and windows, of attention alone; leave it out")
    return task_of(
        call.cu_seqlens, spec.world_size, call.shapes, call.causal, call.window, call.seqlens is not None, spec.backward,
        call.q_len, call.softcap,
    )  # fmt: skip


def kernel_of(cluster: Cluster, made: Task, asked: str) -> str:
    """The kernel asked for; for auto the one that it takes first."""
    if asked != "auto":
        return asked
    return "sdpa_flash" if cluster.device == "cpu" else "decode" if made.decode else "flash4"


def rows(
    spec: Experiment, cluster: Cluster, asked: Collection[str], by: Mapping[Kind, float], every: bool = False
) -> list[Row]:
    """Sorted by time, the impossible variants last; of each variant the best options, or `every` one. asked: variants; none: all
    that are made for such a call. Raises ValueError for what the model does not know."""
    made = task(spec)
    variants = asked or [name for name in NAMES if not unsuitable(name, made)]
    kernel = kernel_of(cluster, made, spec.kernel)
    machine = cluster.machine(spec.world_size, lambda masks: kernel, spec.replay)
    where = spec.world_size, spec.workload.seq_len
    try:
        choice = _choice(made, machine, cluster, variants, by)
    except ValueError as error:
        return [Row(*where, name, why=str(error)) for name in variants]
    found = [_row(spec, made, estimate) for estimate in choice.estimates]
    if not every:
        found = list({row.variant: row for row in reversed(found)}.values())[::-1]
    found.sort(key=lambda row: row.ms or 0.0)
    able = {row.variant for row in found}
    why = {label.split()[0]: reason for label, reason in choice.left_out.items() if label.split()[0] not in able}
    return found + [Row(*where, name, why=reason) for name, reason in why.items()]


def _choice(
    made: Task, machine: Machine, cluster: Cluster, variants: Collection[str], by: Mapping[Kind, float]
) -> Estimates:
    """The model's, with calibrated compute, the fastest first."""
    found = choose(made, machine, variants)
    device = cluster.gpu or "cpu"

    def corrected(estimate: Estimate) -> Estimate:
        def one(which: str, duration: Duration | None) -> Duration | None:
            return duration and calibrated(duration, (device, estimate.kernel, which, called(made)), by)

        forward, backward = one(PASSES[0], estimate.forward), one(PASSES[1], estimate.backward)
        assert forward is not None
        return replace(estimate, forward=forward, backward=backward)

    estimates = sorted(map(corrected, found.estimates), key=lambda each: each.ms)
    return replace(found, estimates=tuple(estimates))


def _row(spec: Experiment, made: Task, estimate: Estimate) -> Row:
    call, shapes, world = spec.workload, made.shapes, spec.world_size
    both = estimate.both
    flops = forward_flops(shapes, call.pairs) + (backward_flops(shapes, call.pairs) if made.backward else 0)
    inputs = made.tokens * (shapes.kv_token + (shapes.out_token if made.backward else 0))
    inputs += (made.q_tokens or made.tokens) * shapes.q_token
    exposed = sum(each.exposed for each in both)
    compute = sum(each.compute for each in both)
    bound = "communication" if exposed > compute else "compute"
    if any(each.cpu > each.gpu for each in both):
        bound = "launches"
    return Row(
        world, call.seq_len, estimate.candidate.variant, _options(estimate), estimate.kernel, estimate.transport,
        estimate.ms, estimate.forward.ms, estimate.backward.ms if estimate.backward else None, exposed,
        flops / world / estimate.ms / 1e9, estimate.peak_bytes + inputs, bound, called=called(made),
    )  # fmt: skip


def _options(estimate: Estimate) -> str:
    label = estimate.candidate.label.removeprefix(estimate.candidate.variant).strip()
    return f"{label} replay=graphs".strip() if estimate.graphs else label
