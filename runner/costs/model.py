"""The model of time: of a variant with its options, from its executor's dry run and a machine's measured rates. It is made to order
candidates rather than to predict milliseconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from attention.geometry.counts import Shapes, sampled_places
from attention.geometry.layouts import CuSeqlens
from attention.geometry.schedules import Problem
from attention.masks.band import Band
from attention.variants.registry import VARIANTS
from runner.costs import dry_run, step_peak
from runner.costs.hardware import Machine

if TYPE_CHECKING:
    from runner.costs.dryrun import Event

MERGE_SHARE = 0.7  # of a copy's bandwidth that a merge or sum reaches, with its cost to the kernels around it
COPY_SHARE = 0.85  # of it that the copies around a CUDA graph reach (docs/performance.md)


@dataclass(frozen=True)
class Task:
    """A call over all ranks. `cu_seqlens`: the global ones, (0, S) for a dense batch. `packed`:
    whether the tensors are a packed batch. `q_tokens`: the number of queries of a decode, else None."""

    cu_seqlens: CuSeqlens
    world: int
    mask: Band
    shapes: Shapes
    packed: bool = False
    backward: bool = True
    q_tokens: int | None = None

    @property
    def decode(self) -> bool:
        return self.q_tokens is not None

    @property
    def tokens(self) -> int:
        """Tokens per rank."""
        return self.cu_seqlens[-1] // self.world


@dataclass(frozen=True)
class Candidate:
    variant: str
    options: Any  # of the variant's own class

    @property
    def label(self) -> str:
        defaults = VARIANTS[self.variant].parse().plain()
        return " ".join([self.variant, *(f"{k}={v}" for k, v in self.options.plain().items() if defaults[k] != v)])

    def problem(self, task: Task) -> Problem:
        """Raises ValueError if the variant can't do the task."""
        return VARIANTS[self.variant].problem(task.cu_seqlens, task.world, task.mask, self.options, task.q_tokens)


@dataclass(frozen=True)
class Duration:
    """Milliseconds of a forward or a backward on the slowest rank. `exposed`: communication that nothing hides. `cpu`: CPU launch
    overhead, which overlaps with the GPU's work. `copies`: into and out of the memory of CUDA graphs."""

    compute: float
    exposed: float
    merges: float
    cpu: float
    copies: float = 0.0

    @property
    def gpu(self) -> float:
        return self.compute + self.exposed + self.merges + self.copies

    @property
    def ms(self) -> float:
        """The longer of GPU time and CPU launch overhead. Up to 12% more where the two are close, since then each sometimes waits
        for the other."""
        return float((self.gpu**6 + self.cpu**6) ** (1 / 6))


@dataclass(frozen=True)
class Estimate:
    """A candidate's times over a transport, on the slowest rank, and the most bytes that a rank holds beside its inputs."""

    candidate: Candidate
    transport: str
    passes: tuple[Duration, ...]  # forward, and maybe backward
    peak_bytes: int

    @property
    def ms(self) -> float:
        return sum(x.ms for x in self.passes)


def estimate(candidate: Candidate, task: Task, machine: Machine, transport: str) -> Estimate:
    """Raises ValueError if the variant can't do the task."""
    problem = candidate.problem(task)
    directions = (False, True) if task.backward else (False,)
    copies = [graph_copies(task, problem, backward) * machine.replayed for backward in directions]
    durations, peaks = [], []
    for rank in (place * problem.ulysses for place in sampled_places(problem)):
        passes = dry_run(
            VARIANTS[candidate.variant], problem, task.shapes, candidate.options, rank=rank, pulls=transport == "symm",
            packed=task.packed, backward=task.backward,
        )  # fmt: skip
        clocks = (_Clock(task, machine, transport, rank, backward) for backward in directions)
        durations.append([x.duration(made.events, size) for x, made, size in zip(clocks, passes, copies, strict=True)])
        peaks.append(step_peak(passes))
    slowest = (max(of_ranks, key=lambda x: x.ms) for of_ranks in zip(*durations, strict=True))
    return Estimate(candidate, transport, tuple(slowest), max(peaks) + sum(copies))


def graph_copies(task: Task, problem: Problem, backward: bool) -> int:
    """Bytes copied around a CUDA graph. Forward: q, k, v in, out out; an all-to-all also copies its exchanged tensors
    out, for the backward. Backward: dout, q, k, v, out in, three gradients out."""
    size = task.tokens * (task.shapes.q_token + task.shapes.out_token + task.shapes.kv_token)
    return size * (2 if backward or (task.backward and problem.ulysses > 1) else 1)


@dataclass(frozen=True)
class _Clock:
    """Computes the duration of a pass: its kernel calls at their measured rates, the communication that is exposed, its merges at a
    share of a copy's bandwidth, and the CPU launch overhead. All but `duration` are in seconds."""

    task: Task
    machine: Machine
    transport: str
    rank: int
    backward: bool

    def duration(self, events: Sequence[Event], copied: int) -> Duration:
        """One stream computes, one moves in the order of issue; a wait stops the first. copied: bytes around a CUDA graph."""
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
        copies = machine.copy_seconds(2 * copied) / COPY_SHARE
        return Duration(*(1e3 * part for part in (compute, exposed, merges, self._cpu(events), copies)))

    def _kernel(self, e: Event) -> float:
        """A kernel call. One with few queries takes as long as reading its keys."""
        task, machine, shapes = self.task, self.machine, self.task.shapes
        speeds = machine.unmeasured  # only 16-bit dtypes are measured
        if shapes.itemsize == 2:
            gqa = shapes.heads != shapes.kv_heads
            speeds = machine.speeds(e.mask, shapes.head_dim, gqa, task.packed, task.tokens)
        speed = speeds[self.backward]
        seconds = e.flops / speed.flops * min(e.rectangle, e.pairs + e.edges * speed.edge) / max(1, e.pairs)
        if task.decode:
            seconds = max(seconds, machine.copy_seconds(e.kv_bytes))
        return seconds + machine.overheads.call[self.backward] / 1e6

    def _cpu(self, events: Sequence[Event]) -> float:
        """CPU launch overhead."""
        overheads, launch = self.machine.overheads, self.machine.overheads.eager
        if self.machine.graphed:
            return 0.0
        calls = exchanges = reductions = 0
        for e in events:
            calls += e.times * (e.kind == "kernel")
            pattern = e.transfer.pattern if e.kind == "pull" and e.transfer else "slots"
            reductions += pattern == "reduce"
            if pattern not in ("reduce", "slots"):
                # kernels put what an all-to-all moved in its place, which costs the CPU as much as an exchange
                exchanges += e.times * (2 if e.phase in ("out", "dqkv") else 1)
        if self.task.decode:
            return (overheads.decode + reductions * overheads.reduction + exchanges * launch.exchange) / 1e6
        return (launch.whole[self.backward] + calls * launch.call[self.backward] + exchanges * launch.exchange) / 1e6
