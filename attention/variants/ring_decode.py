"""Ring decode: few queries, equal on every rank, against sharded keys. Every rank's keys travel round the ring, and
each rank computes everything.

Source: Ring Attention (Liu et al., 2023), as Tree Attention compares with it (Shyam et al., 2024)."""

from __future__ import annotations

from collections.abc import Iterator

from attention.geometry.layouts import DECODE, REPLICATED, CuSeqlens, Layout, sizes_of
from attention.geometry.options import Options, RingOptions
from attention.geometry.schedules import Block, Problem, RingSchedule
from attention.masks.band import FULL, Band, Intervals
from attention.variants.base import Variant, register


class Decode(Variant[Options]):
    """A variant whose queries are on every rank."""

    def q_layout(self, options: Options, cu_seqlens: CuSeqlens, world: int, mask: Band) -> Layout:
        return REPLICATED


def blocks(problem: Problem, rank: int, owner: int) -> Iterator[Block]:
    """All queries against the keys of `owner`."""
    n = sizes_of(problem.layout, problem.cu_seqlens, problem.world)[owner]
    if n:
        yield Block((0, problem.q_tokens or 0), (0, n), FULL)


def keys(problem: Problem, rank: int, owner: int) -> Intervals:
    n = sizes_of(problem.layout, problem.cu_seqlens, problem.world)[owner]
    return ((0, n),) if n else ()


class RingDecode(RingSchedule):
    def most_keys(self, problem: Problem) -> tuple[int, ...]:
        sizes = sizes_of(problem.layout, problem.cu_seqlens, problem.world)
        return (0, *[max(sizes)] * (problem.world - 1))


register(
    Decode(
        name="ring_decode",
        summary="decode: every rank's keys travel round the ring, and each rank computes everything",
        source="Ring Attention (Liu et al., 2023), the comparison in Tree Attention (Shyam et al., 2024)",
        use="a comparison with tree, which was faster on 2 and 4 GPUs",
        executor="ring",
        layout=DECODE,
        schedule=RingDecode(blocks, keys),
        options=RingOptions,
        windows=False,
        decode=True,
    )
)
