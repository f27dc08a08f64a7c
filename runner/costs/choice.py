"""A call, the variants and options that may do it, and their estimated times. Pure Python."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from attention.geometry.counts import Shapes
from attention.geometry.layouts import CuSeqlens
from attention.geometry.schedules import Problem
from attention.masks.band import Band
from attention.variants.registry import VARIANTS


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
    candidate: Candidate
    transport: str
    kernel: str
    forward: Duration
    backward: Duration | None
    graphs: bool = False  # whether forward and backward are replayed from CUDA graphs
    peak_bytes: int = 0  # that a rank holds beside its inputs

    @property
    def both(self) -> list[Duration]:
        return [self.forward, self.backward] if self.backward else [self.forward]

    @property
    def ms(self) -> float:
        return sum(each.ms for each in self.both)

    @property
    def label(self) -> str:
        return f"{self.candidate.label}, {self.transport}{', graphs' if self.graphs else ''}"


@dataclass(frozen=True)
class Estimates:
    """`estimates`: the fastest first. `left_out`: the label of each candidate that was left out, with the reason."""

    estimates: tuple[Estimate, ...]
    left_out: Mapping[str, str]

    @property
    def best(self) -> Estimate:
        return self.estimates[0]
