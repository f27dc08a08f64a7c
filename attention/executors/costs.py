"""What a call costs before it runs, by the executor of its variant: FLOPs, bytes received, memory, and a timeline. Pure Python: what
`catalog cost`, the metrics and `auto` know of an executor is said in its `*_costs` file and nowhere else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from attention.executors.all_to_all_costs import AllToAllCosts
from attention.executors.gather_costs import GatherCosts
from attention.executors.mixture_costs import MixtureCosts
from attention.executors.ring_costs import RingCosts
from attention.executors.timeline import Costs
from attention.executors.tree_costs import TreeCosts
from attention.geometry.counts import Shapes
from attention.geometry.options import Options
from attention.geometry.schedules import Problem

if TYPE_CHECKING:
    from attention.variants.base import Variant


COSTS: dict[str, type[Costs[Any]]] = {
    "ring": RingCosts,
    "gather": GatherCosts,
    "all_to_all": AllToAllCosts,
    "tree": TreeCosts,
    "dilated": MixtureCosts,
}


def of(
    variant: Variant[Any],
    problem: Problem,
    shapes: Shapes,
    options: Options | Mapping[str, Any] | None = None,
    *,
    pulls: bool = False,
    packed: bool = False,
) -> Costs[Any]:
    """The costs of a variant's executor; see `Costs`. Raises KeyError for an external package."""
    return COSTS[variant.executor](problem, shapes, variant.parse(options), pulls, packed)
