"""The model of time: of every candidate, from its executor's dry run and a machine's measured rates. It is made to order
candidates rather than to predict milliseconds."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

from attention.geometry.counts import sampled_places
from attention.geometry.options import GROUPINGS, check_heads, divisors
from attention.geometry.schedules import Problem
from attention.masks.band import Band
from attention.variants.registry import VARIANTS
from runner.costs import dry_run, step_peak
from runner.costs.choice import Candidate, Duration, Estimate, Estimates, Task
from runner.costs.hardware import Machine
from runner.costs.rates import Speed

if TYPE_CHECKING:
    from runner.config.experiment import Experiment
    from runner.costs.dryrun import Event

NAMES = tuple(name for name, v in VARIANTS.items() if not v.alias_of)
LEFT_OUT = {
    "balanced": "balanced is made for one mask, which is not known before the shards",
    "grouped": "grouped is one rank's share, for measurement",
}
MERGE_SHARE = 0.7  # of a copy's bandwidth that a merge or sum reaches, with its cost to the kernels around it
COPY_SHARE = 0.85  # of it that the copies around a CUDA graph reach (docs/performance.md)


def task_of(spec: Experiment) -> Task:
    """The call of a run. Raises ValueError for what the model does not know."""
    call = spec.workload
    if not isinstance(call.mask, Band) or spec.model is not None:
        what = f"model={spec.model.name}" if spec.model else f"mask={call.mask.describe()}"
        raise ValueError(f"{what}: predicted are full, causal and windows, of attention alone; leave it out")
    packed = call.seqlens is not None
    return Task(call.cu_seqlens, spec.world_size, call.mask, call.shapes, packed, spec.backward, call.q_len)


def usual_kernel(spec: Experiment, task: Task, device: str) -> str:
    """The kernel that a run asks for; for auto the one that it takes first."""
    if spec.kernel != "auto":
        return spec.kernel
    return "sdpa_flash" if device == "cpu" else "decode" if task.decode else "flash4"


def choose(task: Task, machine: Machine, variants: Collection[str] = NAMES) -> Estimates:
    """The estimates of the candidates, which are of these variants. Raises ValueError, with every variant's reason, if none can do
    the task."""
    able, left_out = candidates(task, variants)
    estimates = []
    for candidate in able:
        try:
            estimates += _estimates(candidate, task, machine)
        except ValueError as error:
            left_out[candidate.label] = str(error)
    if not estimates:
        suitable = {name for name in VARIANTS if not unsuitable(name, task)}
        reasons = dict.fromkeys(why for label, why in left_out.items() if label.split()[0] in suitable)
        raise ValueError(f"no variant can do this: {'; '.join(reasons)}")
    return Estimates(tuple(sorted(estimates, key=lambda e: e.ms)), left_out)


def candidates(task: Task, variants: Collection[str] = NAMES) -> tuple[list[Candidate], dict[str, str]]:
    """(the candidates that can do the task's mask, lengths and heads in this world, why the others can't, by label).
    Raises ValueError for heads that do not go together."""
    check_heads(task.shapes.heads, task.shapes.kv_heads)
    able: list[Candidate] = []
    left_out: dict[str, str] = {}
    for name in variants:
        if reason := unsuitable(name, task):
            left_out[name] = reason
            continue
        for options in _settings(name, task):
            candidate = Candidate(name, options)
            try:
                candidate.problem(task)
                options.check(task.shapes.heads, task.shapes.kv_heads, task.world)
                able.append(candidate)
            except ValueError as error:
                left_out[candidate.label] = str(error)
    return able, left_out


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
    """One for each transport. Raises ValueError if this machine can't run the candidate."""
    options = candidate.options
    if getattr(options, "grouping", None) == "fused" and not machine.measured("triton"):
        raise ValueError("no rate of our Triton kernel was measured here")
    if machine.graphed and options.uncapturable is not None:
        raise ValueError(options.uncapturable)
    if getattr(options, "reduce", None) == "fused" and not (machine.device == "cuda" and machine.symmetric):
        raise ValueError("needs CUDA GPUs with symmetric memory")
    transports = machine.transports if task.world > 1 else machine.transports[:1]  # one rank moves nothing
    estimates = [estimate(candidate, task, machine, transport) for transport in transports]
    fitting = [each for each in estimates if each.peak_bytes <= machine.memory]
    if not fitting:
        peak = min(each.peak_bytes for each in estimates)
        raise ValueError(f"holds {peak / 2**30:.3g} GiB beside the inputs, of {machine.memory / 2**30:.3g} allowed")
    return fitting


def graph_copies(task: Task, problem: Problem, backward: bool) -> int:
    """Bytes copied around a CUDA graph. Forward: q, k, v in, out out; an all-to-all also copies its exchanged tensors
    out, for the backward. Backward: dout, q, k, v, out in, three gradients out."""
    each = task.tokens * (task.shapes.q_token + task.shapes.out_token + task.shapes.kv_token)
    return 2 * each if backward else each * (1 + (task.backward and problem.ulysses > 1))


def estimate(candidate: Candidate, task: Task, machine: Machine, transport: str) -> Estimate:
    """The time of the slowest rank, and the memory of the fullest."""
    problem = candidate.problem(task)
    runs = {
        rank: dry_run(
            VARIANTS[candidate.variant], problem, task.shapes, candidate.options, rank=rank, pulls=transport == "symm",
            packed=task.packed, backward=task.backward,
        )
        for rank in (place * problem.ulysses for place in sampled_places(problem))
    }  # fmt: skip

    def slowest(backward: bool) -> Duration:
        clocks = ((_Clock(task, machine, problem, transport, backward, rank), passes) for rank, passes in runs.items())
        return max((clock.duration(passes[backward].events) for clock, passes in clocks), key=lambda each: each.ms)

    peak = max(map(step_peak, runs.values()))
    if machine.replayed:
        peak += sum(graph_copies(task, problem, which) for which in {False, task.backward})
    backward = slowest(True) if task.backward else None
    return Estimate(candidate, transport, machine.kernel, slowest(False), backward, machine.replayed, peak)


@dataclass(frozen=True)
class _Clock:
    """Computes the duration of a pass: its kernel calls at their measured rates, the communication that is exposed, its merges at a
    share of a copy's bandwidth, and the CPU launch overhead. All but `duration` are in seconds."""

    task: Task
    machine: Machine
    problem: Problem
    transport: str
    backward: bool
    rank: int

    def duration(self, events: Sequence[Event]) -> Duration:
        """One stream computes, one moves in the order of issue; a wait stops the first."""
        machine = self.machine
        now = moving = compute = exposed = merges = 0.0
        ends: dict[int, float] = {}
        for e in events:
            if e.kind == "pull" and e.transfer:
                moving = max(moving, now) + machine.moving(self.transport, e.transfer, self.rank, self.task.world)
                ends[id(e.transfer)] = moving
                continue
            if e.kind == "wait":
                seconds = max(0.0, ends[id(e.transfer)] - now)
                exposed += e.times * seconds
            elif e.kind == "kernel":
                seconds = self._kernel(e)
                compute += e.times * seconds
            else:
                seconds = machine.copy_seconds(e.bytes)
                if e.phase == "comp_merge":
                    seconds = seconds / MERGE_SHARE + machine.overheads.merge / 1e6
                merges += e.times * seconds
            now += seconds
        copied = 2 * graph_copies(self.task, self.problem, self.backward) if machine.replayed else 0
        copies = machine.copy_seconds(copied) / COPY_SHARE
        return Duration(*(1e3 * part for part in (compute, exposed, merges, self._cpu(events), copies)))

    def _kernel(self, e: Event) -> float:
        """A kernel call. One with few queries takes as long as reading its keys."""
        speed = self._speed(e.mask)
        seconds = e.flops / speed.flops * min(e.rectangle, e.pairs + e.edges * speed.edge) / max(1, e.pairs)
        if self.task.decode:
            seconds = max(seconds, self.machine.copy_seconds(e.kv_bytes))
        return seconds + self.machine.overheads.call[self.backward] / 1e6

    def _speed(self, mask: Band) -> Speed:
        task, shapes = self.task, self.task.shapes
        if shapes.itemsize != 2:  # only 16-bit dtypes are measured
            return self.machine.unmeasured[self.backward]
        gqa = shapes.heads != shapes.kv_heads
        found = self.machine.speeds(mask, shapes.head_dim, gqa, task.packed, task.tokens)
        return found[self.backward]

    def _cpu(self, events: Sequence[Event]) -> float:
        """CPU launch overhead."""
        each = self.machine.overheads
        if self.machine.graphed:
            return 0.0
        launch, pulls = each.eager, [e for e in events if e.kind == "pull" and e.transfer]
        reductions = sum(e.transfer.pattern == "reduce" for e in pulls if e.transfer)
        exchanged = [e for e in pulls if e.transfer and e.transfer.pattern not in ("reduce", "slots")]
        # kernels put what an all-to-all moved in its place, which costs the CPU as much as an exchange
        exchanges = sum(e.times * (2 if e.phase in ("out", "dqkv") else 1) for e in exchanged)
        if self.task.decode:
            return (each.decode + reductions * each.reduction + exchanges * launch.exchange) / 1e6
        calls = sum(e.times for e in events if e.kind == "kernel")
        return (launch.whole[self.backward] + calls * launch.call[self.backward] + exchanges * launch.exchange) / 1e6
