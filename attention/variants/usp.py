"""USP: Ulysses within groups of `ulysses_size` ranks, a zigzag or contiguous ring across the groups.

Source: USP: A Unified Sequence Parallelism Approach for Long Context Generative AI (Fang and Zhao, 2024)."""

from __future__ import annotations

from dataclasses import dataclass

from attention.geometry.layouts import CONTIGUOUS, Layout
from attention.geometry.options import HeadParts, one_of, ulysses_group
from attention.geometry.schedules import RING
from attention.masks.band import Band
from attention.masks.mask import Mask
from attention.variants import zigzag
from attention.variants.base import Variant, register, takers


@dataclass(frozen=True)
class UspOptions(HeadParts):
    """`ulysses_size`: None for as near to the world's square root as it goes."""

    ulysses_size: int | None = None
    ring: str = one_of(("zigzag", "contiguous"), "zigzag")

    def sharing(self, world: int) -> int:
        return ulysses_group(self.ulysses_size, world)


class _Usp(Variant[UspOptions]):
    def outer(self, options: UspOptions) -> Layout:
        return CONTIGUOUS if options.ring == "contiguous" else self.layout

    def check_mask(self, options: UspOptions, mask: Band) -> None:
        if options.ring == "zigzag" and mask.right != 0:
            raise self.not_causal("causal=false", "usp with ring=contiguous")

    def check_cut(self, options: UspOptions, mask: Mask, tokens: int) -> None:
        if options.ring == "zigzag" and not mask.is_causal(tokens):
            raise self.not_causal(mask.asked(), f"usp with ring=contiguous, {takers(mask, tokens)}")


register(
    _Usp(
        name="usp",
        summary="Ulysses within groups of ulysses_size ranks, a ring across the groups",
        source="USP: A Unified Sequence Parallelism Approach for Long Context Generative AI (Fang and Zhao, 2024)",
        use="more ranks than heads to divide among them: heads are divided within a group, a ring does the rest",
        executor="all_to_all",
        layout=zigzag.ZIGZAG,
        schedule=RING,
        any_mask=True,
        options=UspOptions,
    )
)
