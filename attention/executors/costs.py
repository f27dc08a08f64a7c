"""What a call costs before it runs, by the executor of its variant: FLOPs, bytes received, memory, and a timeline. Pure Python: what
`catalog cost`, the metrics and `auto` know of an executor is said in its `*_costs` file and nowhere else."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from attention.executors.all_to_all_costs import AllToAllCosts
from attention.executors.gather_costs import GatherCosts
from attention.executors.ring_costs import RingCosts
from attention.executors.timeline import Timeline
from attention.executors.tree_costs import TreeCosts
from attention.geometry.counts import Shapes
from attention.geometry.options import Options
from attention.geometry.schedules import Problem

if TYPE_CHECKING:
    from attention.variants.base import Variant


class Costs(Protocol):
    """Of one call. A rank is any of the problem's; each method looks at that rank alone."""

    def bytes_received(self, rank: int, backward: bool) -> dict[str, int]:
        """Bytes that a rank receives in a forward, or in a backward alone, by what moves: `kv`, `dkv`, and by exchange `q`, `out`,
        `qkv`, `dout`, `dqkv`, or the tree's reductions."""

    def peak_bytes(self, rank: int, backward: bool) -> int:
        """The most bytes that a rank holds beside its inputs in a forward, or with `backward` in a training step: results, what the
        backward needs, keys in flight and published tensors. Kernels' scratch is not counted. Of a transport that pulls; one that
        sends holds one more copy of gathered keys."""

    def timeline(self, rank: int, backward: bool) -> Timeline:
        """What a rank does in a forward or a backward."""


COSTS: dict[str, Callable[..., Costs]] = {
    "ring": RingCosts,
    "gather": GatherCosts,
    "all_to_all": AllToAllCosts,
    "tree": TreeCosts,
}


def of(
    variant: Variant[Any],
    problem: Problem,
    shapes: Shapes,
    options: Options | Mapping[str, Any] | None = None,
    *,
    pulls: bool = False,
    packed: bool = False,
) -> Costs:
    """The costs of a variant's executor. `pulls`: over a transport that brings each rank only the keys it needs, where others gather
    all for every rank unless there is a window. `packed`: the tensors are a packed batch."""
    return COSTS[variant.executor](problem, shapes, variant.parse(options), pulls, packed)
