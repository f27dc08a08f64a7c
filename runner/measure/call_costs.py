"""FLOPs and bytes by rank of the attention calls that make up a run: one, those of a model's layers, or a decode's parts, where
batch elements have different numbers of keys or share a prefix."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

from attention import masks
from attention.geometry import counts, decodes
from attention.geometry.counts import Shapes
from attention.geometry.schedules import Problem, steps
from attention.geometry.steps import Block
from attention.masks.band import FULL
from attention.variants.base import Variant
from runner.config.experiment import Experiment
from runner.costs import dry_run
from runner.peers import variant


@dataclass(frozen=True)
class Part:
    """`times` equal calls. ends: the keys of each batch element, where a decode's have different numbers of them."""

    variant: Variant[Any]
    problem: Problem
    shapes: Shapes
    options: dict[str, Any]
    times: int = 1
    ends: tuple[int, ...] = ()

    def _blocks(self, rank: int) -> list[Block]:
        """What a rank computes of each batch element, where they have `ends`."""
        owners = [step.owner for step in steps(self.problem, rank)]
        blocks = [decodes.block(self.problem, owner, end) for owner in owners for end in self.ends]
        return [block for block in blocks if block is not None]

    def flops(self) -> list[int]:
        """Of each rank's forward."""
        if not self.ends:
            return [self.times * n for n in counts.rank_flops(self.problem, self.shapes)]
        one, ranks = replace(self.shapes, batch=1), range(self.problem.ranks)
        return [counts.forward_flops(one, sum(block.pairs for block in self._blocks(rank))) for rank in ranks]

    def received(self, rank: int, pulls: bool) -> list[Counter[str]]:
        """Bytes that a rank receives in a forward and, if there is one, in a backward, by what moves. pulls: as in `dry_run`."""
        about = self.variant, self.problem, self.shapes, self.options
        packed, both = len(self.problem.cu_seqlens) > 2, not self.variant.decode
        passes = dry_run(*about, rank=rank, pulls=pulls, packed=packed, backward=both)
        return [Counter({key: self.times * size for key, size in each.received.items()}) for each in passes]

    def moved(self, rank: int, backward: bool) -> int:
        """The fewest bytes of device memory that a rank's kernels move."""
        s = self.shapes
        if not self.ends:
            return self.times * counts.kernel_bytes(self.problem, s, rank, backward)
        rows = sum((b.q[1] - b.q[0]) * s.heads + (b.k[1] - b.k[0]) * s.kv_heads for b in self._blocks(rank))
        return rows * (s.head_dim + s.v_head_dim) * s.itemsize


def parts(experiment: Experiment) -> list[Part]:
    """The calls that make up the run's."""
    call, options, world = experiment.workload, experiment.call_options, experiment.world_size
    chosen = variant(experiment.variant)
    if experiment.model is not None:
        config = experiment.model.config(call)
        layers = Counter(config.kind(i).mask for i in range(config.layers))
        if config.encoder_layers:
            layers[masks.full()] += config.encoder_layers + config.layers  # the encoder and the cross attention
        problems = ((chosen.problem(call.cu_seqlens, world, mask, options), n) for mask, n in layers.items())
        return [Part(chosen, problem, call.shapes, options, n) for problem, n in problems]
    whole = Part(chosen, experiment.problem, call.shapes, options)
    if call.kv_lengths is not None:  # a ring brings the keys that some element sees, of all elements
        some = [n for n in call.kv_lengths if n]
        whole = replace(whole, problem=replace(whole.problem, ends=(min(some), max(some))), ends=call.kv_lengths)
    if not call.prefix:
        return [whole]
    shared = chosen.problem((0, call.prefix), world, FULL, options, call.batch * call.queries)
    return [whole, Part(chosen, shared, replace(call.shapes, batch=1), options)]
