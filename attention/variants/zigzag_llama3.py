"""Zigzag chunks whose keys are gathered as in Llama 3: a kernel call for each of a rank's two query chunks.

With `own_first` a rank starts on its own keys while those of all others come, as in zigzag's first step; then all
queries see the first chunks of earlier ranks, and the second query chunk sees both chunks of later ones. That is two
steps and a merge.

Source: petrpan26/ring-flash-attention, a fork of Zhu's (2025). `own_first` and gathering by owner are ours."""

from __future__ import annotations

from dataclasses import dataclass

from attention.geometry.layouts import CuSeqlens
from attention.geometry.options import GROUPINGS, GatherOptions, one_of
from attention.geometry.schedules import GATHER, GATHER_SHARDS, LOCAL_FIRST, MANY_SEQUENCES, Schedule
from attention.masks.band import Band
from attention.masks.mask import Mask
from attention.variants import zigzag
from attention.variants.base import Variant, register


@dataclass(frozen=True)
class ZigzagLlama3Options(GatherOptions):
    """`own_first`: None for single sequences, which are two merges then."""

    grouping: str = one_of(GROUPINGS, "separate")
    own_first: bool | None = one_of((True, False), None)

    def check(self, heads: int, kv_heads: int, world: int) -> None:
        super().check(heads, kv_heads, world)
        if self.own_first and self.grouping != "separate":
            raise ValueError(
                f"own_first=true: the chunks that are left are not grouped; use grouping=separate, not {self.grouping}"
            )

    def begins_with_own(self, cu_seqlens: CuSeqlens, mask: Band) -> bool:
        if self.own_first is None:
            single = len(cu_seqlens) == 2 and not mask.windowed
            return single and self.heads_k_stride is None and self.grouping == "separate"
        return self.own_first


class _ZigzagLlama3(Variant[ZigzagLlama3Options]):
    def plan(self, options: ZigzagLlama3Options, cu_seqlens: CuSeqlens, world: int, mask: Band) -> Schedule:
        if world > 1 and options.begins_with_own(cu_seqlens, mask):
            return LOCAL_FIRST
        many = len(cu_seqlens) - 1 > MANY_SEQUENCES and not mask.windowed
        return GATHER_SHARDS if many and options.grouping != "fused" else GATHER

    def check_mask(self, options: ZigzagLlama3Options, mask: Band) -> None:
        super().check_mask(options, mask)
        window = f"window=({mask.left}, {mask.right}): {self.name} with"
        if mask.windowed and options.grouping == "fused":
            raise ValueError(
                f"{window} grouping=fused computes on prefixes of the keys; grouping=separate and packed take windows"
            )
        if mask.windowed and options.own_first:
            raise ValueError(f"{window} own_first=true has no sliding window; own_first=null has one")

    def check_cut(self, options: ZigzagLlama3Options, mask: Mask, tokens: int) -> None:
        super().check_cut(options, mask, tokens)
        if options.grouping != "separate" or options.own_first:
            raise ValueError(
                f"{mask.asked()}: {self.name} takes masks with grouping=separate and own_first=null; got "
                f"grouping={options.grouping} own_first={options.own_first}"
            )


register(
    _ZigzagLlama3(
        name="zigzag_llama3",
        summary="zigzag chunks, keys gathered, a call a chunk; a single sequence without a window begins by default with "
        "its own keys: two steps and a merge instead",
        source="petrpan26/ring-flash-attention, a fork of Zhu's (2025): zigzag chunks gathered as in Llama 3",
        use="causal sequences and windows with any number of heads, where memory holds the gathered KV heads",
        executor="gather",
        layout=zigzag.ZIGZAG,
        schedule=GATHER,
        any_mask=True,
        options=ZigzagLlama3Options,
        causal_only=True,
    )
)
