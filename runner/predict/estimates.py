"""Predictions: for each world size and length the best options of each variant, or why it can't."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from omegaconf import DictConfig, open_dict

from attention.geometry.counts import backward_flops, forward_flops
from attention.geometry.options import GROUPINGS, divisors
from attention.masks.band import Band
from attention.variants.registry import VARIANTS
from runner.config import resolve
from runner.config.experiment import Experiment
from runner.config.values import Refusal
from runner.costs.hardware import Machine
from runner.costs.model import Candidate, Estimate, Task, estimate
from runner.predict.topologies import Cluster
from runner.predict.validation import calibrated
from runner.report.modelled import PASSES, Kind, called

NAMES = tuple(name for name, v in VARIANTS.items() if not v.alias_of)
LEFT_OUT = {
    "balanced": "balanced is made for one mask, which is not known before the shards",
    "grouped": "grouped is one rank's share, for measurement",
}


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
    that are made for such a call. Compute is calibrated with the factors `by`. Raises Refusal for what the model does not know."""
    task = task_of(spec)
    variants = asked or [name for name in NAMES if not unsuitable(name, task)]
    machine = cluster.machine(spec.world_size, usual_kernel(spec, task, cluster.device), spec.replay)
    estimates, reasons = choose(task, machine, variants)
    able = sorted((_row(spec, task, machine, estimate, by) for estimate in estimates), key=lambda row: row.ms or 0.0)
    best = {row.variant: row for row in reversed(able)}
    impossible = [
        Row(spec.world_size, spec.workload.seq_len, name, why=why) for name, why in reasons.items() if name not in best
    ]
    return [row for row in able if every or row is best[row.variant]] + impossible


def task_of(spec: Experiment) -> Task:
    """The call of a run. Raises Refusal for what the model does not know."""
    call = spec.workload
    if not isinstance(call.mask, Band) or spec.model is not None:
        what = f"model={spec.model.name}" if spec.model else f"mask={call.mask.describe()}"
        raise Refusal(f"{what}: predicted are full, causal and windows, of attention alone; leave it out")
    for key in ("softcap", "sinks"):
        if getattr(call, key):
            raise Refusal(f"{key}={getattr(call, key)}: its cost is not modelled; leave it out")
    if spec.device != "cpu" and call.shapes.itemsize != 2:
        raise Refusal(f"dtype={call.dtype}: the rates are of dtypes of 16 bits; leave it out")
    packed = call.seqlens is not None
    return Task(call.cu_seqlens, spec.world_size, call.mask, call.shapes, packed, spec.backward, call.q_len)


def usual_kernel(spec: Experiment, task: Task, device: str) -> str:
    """The kernel that a run asks for; for auto the one that it takes first."""
    if spec.kernel != "auto":
        return spec.kernel
    return "sdpa_flash" if device == "cpu" else "decode" if task.decode else "flash4"


def choose(task: Task, machine: Machine, variants: Collection[str] = NAMES) -> tuple[list[Estimate], dict[str, str]]:
    """(estimates of these variants with all options that may be the fastest, why some options or all of them can't be, by variant)."""
    estimates: list[Estimate] = []
    reasons: dict[str, str] = {}
    for name in variants:
        if reason := unsuitable(name, task):
            reasons[name] = reason
            continue
        for options in _settings(name, task):
            try:
                estimates += _estimates(Candidate(name, options), task, machine)
            except ValueError as error:
                reasons[name] = str(error)
    return estimates, reasons


def unsuitable(name: str, task: Task) -> str | None:
    """Why the variant is left out, whatever its options, or None."""
    return LEFT_OUT.get(name) or VARIANTS[name].unsuitable(task.world, task.decode)


def _settings(name: str, task: Task) -> Iterator[Any]:
    """The variant's options with each combination of the values that may differ in time."""
    options, kv_heads = VARIANTS[name].options, task.shapes.kv_heads
    tried: dict[str, dict[str, Sequence[Any]]] = {
        "ulysses": {"head_parts": [None, *divisors(max(1, kv_heads // task.world))]},
        # groups of one are zigzag or ring, and one group is ulysses
        "usp": {"ulysses_size": divisors(task.world)[1:-1], "ring": ("zigzag", "contiguous")},
        "tree": {"reduce": ("packed", "two", "three", "fused")},
    }
    gathered = {"heads_k_stride": [None, *divisors(kv_heads)[:-1]], "grouping": GROUPINGS}
    values = {option: x for option, x in tried.get(name, gathered).items() if option in options.names()}
    for chosen in product(*values.values()):
        yield options(**dict(zip(values, chosen, strict=True)))


def _estimates(candidate: Candidate, task: Task, machine: Machine) -> list[Estimate]:
    """One for each transport. Raises ValueError if the variant can't do the task's mask, lengths or heads, or this machine can't run it."""
    options = candidate.options
    candidate.problem(task)
    options.check(task.shapes.heads, task.shapes.kv_heads, task.world)
    if getattr(options, "grouping", None) == "fused" and not machine.measured("triton"):
        raise ValueError("no rate of our Triton kernel was measured here")
    if machine.graphed and options.uncapturable is not None:
        raise ValueError(options.uncapturable)
    if getattr(options, "reduce", None) == "fused" and not (machine.device == "cuda" and "symm" in machine.transports):
        raise ValueError("needs CUDA GPUs with symmetric memory")
    transports = machine.transports if task.world > 1 else machine.transports[:1]  # one rank moves nothing
    estimates = [estimate(candidate, task, machine, transport) for transport in transports]
    peak = min(x.peak_bytes for x in estimates)
    if peak > machine.memory:
        raise ValueError(f"holds {peak / 2**30:.3g} GiB beside the inputs, of {machine.memory / 2**30:.3g} allowed")
    return [x for x in estimates if x.peak_bytes <= machine.memory]


def _row(spec: Experiment, task: Task, machine: Machine, estimate: Estimate, by: Mapping[Kind, float]) -> Row:
    call, shapes, world, kind = spec.workload, task.shapes, spec.world_size, called(task)
    passes = [
        calibrated(x, (machine.gpu or "cpu", machine.kernel, which, kind), by)
        for x, which in zip(estimate.passes, PASSES, strict=False)
    ]
    flops = forward_flops(shapes, call.pairs) + (backward_flops(shapes, call.pairs) if task.backward else 0)
    inputs = task.tokens * (shapes.kv_token + (shapes.out_token if task.backward else 0))
    inputs += (task.q_tokens or task.tokens) * shapes.q_token
    ms, exposed = sum(x.ms for x in passes), sum(x.exposed for x in passes)
    bound = "communication" if exposed > sum(x.compute for x in passes) else "compute"
    if any(x.cpu > x.gpu for x in passes):
        bound = "launches"
    options = estimate.candidate.label.split()[1:] + ["replay=graphs"] * machine.replayed
    return Row(
        world, call.seq_len, estimate.candidate.variant, " ".join(options), machine.kernel, estimate.transport, ms,
        passes[0].ms, passes[1].ms if task.backward else None, exposed, flops / world / ms / 1e9,
        estimate.peak_bytes + inputs, bound, called=kind,
    )  # fmt: skip
