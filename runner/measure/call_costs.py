"""FLOPs and bytes by rank of the attention calls that make up a run: one, those of a model's layers, or a decode's parts, where
batch elements have different numbers of keys or share a prefix."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

from attention import masks
from attention.geometry import counts, decodes
from attention.geometry.counts import Shapes
from attention.geometry.intervals import length
from attention.geometry.schedules import Block, Problem, steps
from attention.geometry.transfers import step_routes
from attention.masks.band import FULL
from attention.variants.base import Variant
from runner.config.experiment import Experiment
from runner.costs import dry_run
from runner.peers import variant


@dataclass(frozen=True)
class Part:
    """`times` equal calls, all batch elements alike."""

    variant: Variant[Any]
    problem: Problem
    shapes: Shapes
    options: dict[str, Any]
    pulls: bool
    times: int = 1

    def flops(self) -> list[int]:
        """Of each rank's forward."""
        return [self.times * n for n in counts.rank_flops(self.problem, self.shapes)]

    def received(self, rank: int, backward: bool) -> Counter[str]:
        """Bytes that a rank receives, by what moves."""
        both = not self.variant.decode
        passes = dry_run(
            self.variant, self.problem, self.shapes, self.options, rank=rank, pulls=self.pulls, backward=both
        )
        return Counter({key: self.times * size for key, size in passes[backward].received.items()})

    def moved(self, rank: int, backward: bool) -> int:
        """The fewest bytes of device memory that a rank's kernels move."""
        return self.times * counts.kernel_bytes(self.problem, self.shapes, rank, backward)


@dataclass(frozen=True)
class Elements(Part):
    """A decode whose batch elements have `ends` keys each. A ring brings the keys that some element sees, of all elements."""

    ends: tuple[int, ...] = ()

    def _blocks(self, rank: int) -> list[Block]:
        owners = [step.owner for step in steps(self.problem, rank)]
        blocks = [decodes.block(self.problem, owner, end) for owner in owners for end in self.ends]
        return [block for block in blocks if block is not None]

    def flops(self) -> list[int]:
        one, ranks = replace(self.shapes, batch=1), range(self.problem.ranks)
        return [counts.forward_flops(one, sum(block.pairs for block in self._blocks(rank))) for rank in ranks]

    def received(self, rank: int, backward: bool) -> Counter[str]:
        if self.variant.executor != "ring":
            return super().received(rank, backward)  # results, whatever the number of keys
        some = [n for n in self.ends if n]
        routes = step_routes(replace(self.problem, ends=(min(some), max(some))), rank)
        return Counter(kv=sum(route.received_tokens for route in routes) * self.shapes.kv_token)

    def moved(self, rank: int, backward: bool) -> int:
        s = self.shapes
        rows = sum(length((b.q,)) * s.heads + length((b.k,)) * s.kv_heads for b in self._blocks(rank))
        return rows * (s.head_dim + s.v_head_dim) * s.itemsize


def parts(experiment: Experiment, pulls: bool) -> list[Part]:
    """The calls that make up the run's. pulls: as in `dry_run`."""
    call, options, world = experiment.workload, experiment.call_options, experiment.world_size
    chosen, about = variant(experiment.variant), (options, pulls)
    if experiment.model is not None:
        config = experiment.model.config(call)
        layers = Counter(config.kind(i).mask for i in range(config.layers))
        if config.encoder_layers:
            layers[masks.full()] += config.encoder_layers + config.layers  # the encoder and the cross attention
        problems = ((chosen.problem(call.cu_seqlens, world, mask, options), n) for mask, n in layers.items())
        return [Part(chosen, problem, call.shapes, *about, n) for problem, n in problems]
    problem = chosen.problem(call.cu_seqlens, world, call.mask, options, call.q_len)
    whole = Part(chosen, problem, call.shapes, *about)
    if call.kv_lengths is not None:
        whole = Elements(chosen, problem, call.shapes, *about, ends=call.kv_lengths)
    if not call.prefix:
        return [whole]
    shared = chosen.problem((0, call.prefix), world, FULL, options, call.batch * call.queries)
    return [whole, Part(chosen, shared, replace(call.shapes, batch=1), *about)]
