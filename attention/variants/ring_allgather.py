"""Ring attention by an all-gather, as nnScaler has it: contiguous shards, all keys gathered, no merges. For a causal
mask the second half of a rank's queries is swapped with that of rank W-1-r while they are computed on, which balances
the work.

Source: nnScaler's ring attention (nnScaler: Lin et al., 2024)."""

from __future__ import annotations

from attention.geometry.layouts import CONTIGUOUS, Chunks, CuSeqlens, Layout
from attention.geometry.options import GatherOptions
from attention.geometry.schedules import GATHER
from attention.masks.band import Band
from attention.variants.base import Variant, register

# rank r: chunks 2r and 2W-1-2r of 2W, which cost the same on every rank under a causal mask
PAIRED = Layout("paired", 2, Chunks(lambda rank, world: (2 * rank, 2 * world - 1 - 2 * rank)))


class _RingAllGather(Variant[GatherOptions]):
    def q_layout(self, options: GatherOptions, cu_seqlens: CuSeqlens, world: int, mask: Band) -> Layout:
        return PAIRED if mask.causal else self.layout


register(
    _RingAllGather(
        name="ring_allgather",
        summary="contiguous shards whose second query halves are swapped to balance; all keys gathered, no merges",
        source="nnScaler's ring attention (nnScaler: Lin et al., 2024), which gathers as Llama 3 does (Llama Team, 2024)",
        use="causal masks and windows over contiguous tokens, where memory holds the gathered KV heads",
        executor="gather",
        layout=CONTIGUOUS,
        schedule=GATHER,
        any_mask=True,
        options=GatherOptions,
    )
)
