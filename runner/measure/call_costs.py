"""FLOPs and bytes of a run's attention call by rank: of the whole call, or of a decode's parts, where batch elements have different
numbers of keys or share a prefix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from attention.geometry import counts, decodes
from attention.geometry.counts import Shapes
from attention.geometry.intervals import length
from attention.geometry.schedules import Block, Problem, steps
from attention.geometry.transfers import step_routes
from attention.masks.band import FULL
from attention.variants.base import Variant
from runner.config.experiment import Experiment
from runner.costs import dry_run


@dataclass(frozen=True)
class Part:
    """One call on the library's side, all batch elements alike."""

    variant: Variant[Any]
    problem: Problem
    shapes: Shapes
    options: dict[str, Any]
    pulls: bool

    def flops(self) -> list[int]:
        """Of each rank's forward."""
        return counts.rank_flops(self.problem, self.shapes)

    def received(self, rank: int, backward: bool) -> dict[str, int]:
        """Bytes that a rank receives, by what moves."""
        both = not self.variant.decode
        passes = dry_run(
            self.variant, self.problem, self.shapes, self.options, rank=rank, pulls=self.pulls, backward=both
        )
        return passes[backward].received

    def moved(self, rank: int, backward: bool) -> int:
        """The fewest bytes of device memory that a rank's kernels move."""
        return counts.kernel_bytes(self.problem, self.shapes, rank, backward)


@dataclass(frozen=True)
class Elements(Part):
    """A decode whose batch elements have `ends` keys each. A ring brings the keys that some element sees, of all elements."""

    ends: tuple[int, ...]

    def _blocks(self, rank: int) -> list[Block]:
        owners = [step.owner for step in steps(self.problem, rank)]
        blocks = [decodes.block(self.problem, owner, end) for owner in owners for end in self.ends]
        return [block for block in blocks if block is not None]

    def flops(self) -> list[int]:
        one = replace(self.shapes, batch=1)
        pairs = [sum(block.pairs for block in self._blocks(rank)) for rank in range(self.problem.ranks)]
        return [counts.forward_flops(one, n) for n in pairs]

    def received(self, rank: int, backward: bool) -> dict[str, int]:
        if self.variant.executor != "ring":
            return super().received(rank, backward)  # results, whatever the number of keys
        some = [n for n in self.ends if n]
        received = step_routes(replace(self.problem, ends=(min(some), max(some))), rank)
        return {"kv": sum(route.received_tokens for route in received) * self.shapes.kv_token}

    def moved(self, rank: int, backward: bool) -> int:
        s = self.shapes
        rows = sum(length((b.q,)) * s.heads + length((b.k,)) * s.kv_heads for b in self._blocks(rank))
        return rows * (s.head_dim + s.v_head_dim) * s.itemsize


def parts(experiment: Experiment, variant: Variant[Any], problem: Problem, pulls: bool) -> Sequence[Part]:
    """The calls that make up the run's. problem: of the run. pulls: as in `dry_run`."""
    call, options = experiment.workload, experiment.call_options
    about = options, pulls
    whole = Part(variant, problem, call.shapes, *about)
    if call.kv_lengths is not None:
        whole = Elements(variant, problem, call.shapes, *about, call.kv_lengths)
    if not call.prefix:
        return [whole]
    queries = call.batch * call.queries
    shared = variant.problem((0, call.prefix), experiment.world_size, FULL, options, queries)
    return [whole, Part(variant, shared, replace(call.shapes, batch=1), *about)]
