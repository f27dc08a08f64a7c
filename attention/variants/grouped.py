"""What zigzag_llama3 computes on one rank, for 1 to 8 query chunks that attend nested prefixes of the keys: for
benchmarks of the groupings on one GPU.

Source: zigzag_llama3 (petrpan26/ring-flash-attention, 2025)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from attention.geometry.layouts import REPLICATED, CuSeqlens, Layout, Shard, chunk
from attention.geometry.options import GROUPINGS, GatherOptions, one_of
from attention.geometry.schedules import GATHER
from attention.masks.band import Band
from attention.variants.base import Variant, register


@lru_cache
def chunked(n: int) -> Layout:
    """Everything on every rank, in n chunks."""

    def split(length: int, world: int) -> tuple[Shard, ...]:
        return tuple(tuple(chunk(length, n, i) for i in range(n)) for _ in range(world))

    return Layout(f"replicated in {n} chunks", n, split, replicated=True)


@dataclass(frozen=True)
class GroupedOptions(GatherOptions):
    n_groups: int = 2
    grouping: str = one_of(GROUPINGS, "separate")


class _Grouped(Variant[GroupedOptions]):
    def q_layout(self, options: GroupedOptions, cu_seqlens: CuSeqlens, world: int, mask: Band) -> Layout:
        n = options.n_groups
        if not isinstance(n, int) or not 1 <= n <= 8:
            raise ValueError(f"n_groups={n}: must be 1 to 8")
        if world > 1:
            raise ValueError(
                f"world_size={world}: {self.name} is one rank's share of a gathered attention; use world_size=1"
            )
        lengths = [b - a for a, b in pairwise(cu_seqlens)]
        if any(length % n for length in lengths):
            near = max(n, round(lengths[0] / n) * n)
            raise ValueError(f"seq_len={lengths[0]}: must be a multiple of n_groups={n}; {near} would work")
        return chunked(n)


register(
    _Grouped(
        name="grouped",
        summary="causal attention on one rank, its queries in n_groups chunks that attend nested prefixes of the keys",
        source="a rank's computation in zigzag_llama3 (petrpan26/ring-flash-attention, 2025), for 1 to 8 chunks",
        use="comparing the groupings on one GPU",
        executor="gather",
        layout=REPLICATED,
        schedule=GATHER,
        options=GroupedOptions,
        causal_only=True,
        windows=False,
    )
)
