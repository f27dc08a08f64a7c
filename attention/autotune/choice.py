"""`auto`'s task, its candidates with their estimated times, and its choice. Pure Python."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from attention.geometry.counts import Shapes
from attention.geometry.layouts import CuSeqlens
from attention.geometry.schedules import Problem
from attention.masks.band import Band
from attention.masks.mask import Mask
from attention.variants.registry import VARIANTS

AUTO = "auto"
OPTIONS: dict[str, Any] = {"memory_gb": None, "trials": None}  # of attention=auto itself
SUMMARY = "the fastest variant, options and transport for this call, by this machine's measured rates"


@dataclass(frozen=True)
class Task:
    """The call that `auto` chooses for, over all ranks. `cu_seqlens`: the global ones, (0, S) for a dense batch. `packed`:
    whether the tensors are a packed batch. `q_tokens`: the number of queries of a decode, else None."""

    cu_seqlens: CuSeqlens
    world: int
    mask: Band
    shapes: Shapes
    packed: bool = False
    backward: bool = True
    q_tokens: int | None = None
    other_mask: Mask | None = None  # beside `mask`; for trials of one variant's options, since `auto` takes bands alone
    softcap: float | None = None

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
        defaults = self.options.defaults()
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
    def launch_bound(self) -> bool:
        """Whether the GPU may wait for launches."""
        return any(each.cpu > each.gpu / 2 for each in self.both)

    @property
    def label(self) -> str:
        return f"{self.candidate.label}, {self.transport}{', graphs' if self.graphs else ''}"


@dataclass(frozen=True)
class Choice:
    """`estimates`: the fastest first. `left_out`: the label of each candidate that was left out, with the reason. `basis`: the
    rates and links that the estimates use. `replayable`: whether replay=graphs would remove the CPU launch overhead. `tried`:
    measured ms by label, the fastest first."""

    estimates: tuple[Estimate, ...]
    left_out: Mapping[str, str]
    basis: str
    replayable: bool = False
    tried: Mapping[str, float] = field(default_factory=dict)

    @property
    def best(self) -> Estimate:
        """The candidate that was the fastest in the trials; without trials, the fastest by estimate."""
        first = next(iter(self.tried), None)
        return next((e for e in self.estimates if e.label == first), self.estimates[0])

    @property
    def why(self) -> str:
        """One line for the user: the best candidate's estimate by parts, then the times of all trials. Without trials,
        the estimate of the next best variant, and the best estimate that differs in whether CUDA graphs are used."""
        best = self.best

        def total(part: str) -> str:
            return _ms(sum(getattr(each, part) for each in best.both))

        text = (
            f"{best.label}: {_ms(best.ms)} ms estimated: compute {total('compute')}, exposed communication "
            f"{total('exposed')}, merges {total('merges')}"
        )
        if any(each.cpu > each.gpu for each in best.both):
            text += ", bound by CPU launch overhead" + (", which replay=graphs would remove" if self.replayable else "")
        if best.forward.copies:
            text += f", copies for graphs {total('copies')}"
        if self.tried:
            return f"{text}; tried: {'; '.join(f'{label} {_ms(ms)} ms' for label, ms in self.tried.items())}"
        other = next((e for e in self.estimates if e.candidate.variant != best.candidate.variant), None)
        otherwise = next((e for e in self.estimates if e.graphs != best.graphs), None)
        for way, e in ("next", other), ("launched one by one" if best.graphs else "replayed", otherwise):
            text += f"; {way} {e.label}: {_ms(e.ms)} ms" if e else ""
        return text

    def plain(self) -> dict[str, Any]:
        """As a result records it."""
        best = self.best
        return {
            "variant": best.candidate.variant,
            "options": best.candidate.options.plain(),
            "graphs": best.graphs,
            "why": self.why,
            "basis": self.basis,
            "estimates_ms": {e.label: round(e.ms, 6) for e in self.estimates},
            "tried_ms": dict(self.tried) or None,
            "left_out": dict(self.left_out),
        }


def check_trials(trials: Any) -> None:
    """Raises ValueError unless `trials` is None or an integer of at least 2."""
    if trials is not None and (isinstance(trials, bool) or not isinstance(trials, int) or trials < 2):
        raise ValueError(
            f"trials={trials!r}: must be the number of variants to time, a whole number of at least 2, or null for no trials"
        )


def _ms(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"
