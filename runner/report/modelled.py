"""What the model of time says of recorded runs, beside what was measured."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate

from attention.geometry import counts
from attention.geometry.counts import Shapes
from attention.masks.band import Band
from attention.variants.registry import VARIANTS
from runner.config.rules.attention import ONE_RANK
from runner.costs.hardware import Machine, ceilings
from runner.costs.model import Candidate, Duration, Task, estimate
from runner.report.runs import Run

PASSES = ("forward", "backward")
ODD_OPTIONS = (ValueError, TypeError, ArithmeticError)  # raised for those of an earlier version


def known(run: Run) -> bool:
    """Whether the model describes the run: one of our variants under a band, on plain attention."""
    if not (run.ok and run.attention in VARIANTS) or run.result.asked.model:
        return False
    return run.attention not in ONE_RANK and run.result.asked.named_mask is None and run.features is None


def task(run: Run) -> Task:
    work = run.result.asked
    assert work.batch and work.heads and work.head_dim and work.seq_len and run.world_size and work.window
    shapes = Shapes(work.batch, work.heads, work.kv_heads or work.heads, work.head_dim, 4 if run.dtype == "fp32" else 2)
    lengths = None if isinstance(work.seqlens, str) else work.seqlens
    cu_seqlens = [0, work.seq_len] if not lengths else list(accumulate(lengths, initial=0))
    backward = run.mode == "forward_backward"
    mask = Band.of(bool(work.causal), work.window)
    return Task(tuple(cu_seqlens), run.world_size, mask, shapes, bool(lengths), backward, work.q_len)


def machine(run: Run) -> Machine:
    """That the run had; on a CPU with the ceilings that it measured. Launch replays of earlier versions count as launched from
    Python."""
    kernel, transport = run.kernel or "", run.transport or "symm"
    replayed = run.replay == "graphs"
    cpu = run.result.asked.device == "cpu"
    measured = run.result.ceilings
    return Machine(
        "" if cpu else run.gpu or "",
        kernel,
        (transport,),
        device="cpu" if cpu else "cuda",
        ceilings=ceilings(measured, "cpu") if cpu and measured else None,
        graphed=replayed or run.timing == "cudagraph",
        replayed=replayed,
    )


Kind = tuple[str, str, str, str]  # device, kernel, pass, and what is called: dense, window, packed or decode


@dataclass(frozen=True)
class Point:
    """One pass of a run, and what the model says of it without calibration."""

    run: Run
    which: str
    model: Duration
    measured: float  # ms

    @property
    def kind(self) -> Kind:
        made = task(self.run)
        return self.run.gpu or "cpu", self.run.kernel or "", self.which, called(made)

    @property
    def launch_bound(self) -> bool:
        return self.model.cpu > self.model.gpu / 2


def called(made: Task) -> str:
    if made.decode:
        return "decode"
    return "packed" if made.packed else "window" if made.mask.windowed else "dense"


def points(runs: Iterable[Run]) -> list[Point]:
    """Of the runs that the model describes."""
    modelled = []
    for run in filter(known, runs):
        name = run.attention or ""
        try:
            candidate, asked = Candidate(name, VARIANTS[name].parse(run.options)), task(run)
            candidate.options.check(asked.shapes.heads, asked.shapes.kv_heads, asked.world)
            made = estimate(candidate, asked, machine(run), run.transport or "symm")
        except ODD_OPTIONS:
            continue
        for which, model in zip(PASSES, made.passes, strict=False):
            ms = run.ms(which)
            if ms:
                modelled.append(Point(run, which, model, ms))
    return modelled


def calibrated(run: Run) -> bool:
    """Whether the model describes the run and has the rates of its GPU, and need not assume them."""
    return bool(known(run) and run.gpu and machine(run).measured(run.kernel or ""))


def kernel_bytes(run: Run, which: str) -> int | None:
    """The fewest bytes of device memory that the kernels of a rank move in a pass, of the rank with most: as recorded or,
    of results from before that was, by the schedule of one of our variants under a band."""
    metrics = run.result.metrics
    if metrics is None or which not in metrics.passes:
        return None
    if (recorded := metrics.passes[which].memory_bytes) is not None or not known(run):
        return recorded
    made = task(run)
    try:
        problem = VARIANTS[run.attention or ""].problem(
            made.cu_seqlens, made.world, made.mask, run.options, made.q_tokens
        )
    except ODD_OPTIONS:
        return None
    return max(
        sum(
            counts.kernel_bytes(problem, made.shapes, rank, direction == "backward")
            for direction in PASSES
            if which in (direction, "total")
        )
        for rank in range(problem.ranks)
    )
