"""Every variant by its name: a layout, a schedule and the exchange that brings keys to queries. Pure Python, so that the
command line can list and check variants without torch."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from attention import layouts, schedules
from attention.layouts import CuSeqlens, Layout
from attention.masks import Mask
from attention.schedules import Problem, StepsOf

Exchange = Literal["ring", "gather"]


@dataclass(frozen=True)
class Variant:
    """`layout` is how a rank's q, k and v come in and its out goes back; `q_layout`, where given, is how the queries lie
    while they are computed on."""

    name: str
    summary: str
    source: str
    use: str
    layout: Layout
    schedule: StepsOf
    exchange: Exchange
    q_layout: Layout | None = None
    causal_only: bool = False
    windows: bool = True
    packs: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)

    def problem(self, cu_seqlens: CuSeqlens, world: int, mask: Mask) -> Problem:
        """Raises ValueError when the variant cannot do this mask or these lengths in this world."""
        if self.causal_only and not mask.causal:
            if mask.right != 0:
                raise ValueError(
                    f"causal=false: {self.name} balances the causal mask and is defined for causal=true only; "
                    "without causality ring and ring_allgather are balanced as they are"
                )
            raise ValueError(
                f"window=({mask.left}, {mask.right}): {self.name} has no sliding window; ring and ring_allgather do"
            )
        if mask.windowed and not self.windows:
            raise ValueError(f"window=({mask.left}, {mask.right}): {self.name} has no sliding window")
        if len(cu_seqlens) > 2 and not self.packs:
            raise ValueError(f"cu_seqlens of {len(cu_seqlens) - 1} sequences: {self.name} takes single sequences only")
        q_layout = self.q_layout if self.q_layout and mask.causal else self.layout
        for layout in sorted({self.layout, q_layout}, key=lambda layout: -layout.chunks):  # the strictest speaks first
            layout.check(cu_seqlens, world)
        return Problem(cu_seqlens, world, mask, self.layout, q_layout)


VARIANTS: dict[str, Variant] = {}


def _register(variant: Variant) -> None:
    VARIANTS[variant.name] = variant


_register(
    Variant(
        "dense",
        "the whole attention on every rank, nothing sharded",
        "FlashAttention (Dao et al., 2022) or what the kernel is",
        "the reference point: what one device does with the same kernel",
        layouts.REPLICATED,
        schedules.local,
        "ring",
    )
)
_register(
    Variant(
        "ring",
        "contiguous shards; keys and values go round, partial results are merged",
        "Ring Attention with Blockwise Transformers (Liu et al., 2023)",
        "non-causal or windowed attention; causal it is imbalanced and the plain reference",
        layouts.CONTIGUOUS,
        schedules.ring,
        "ring",
    )
)
_register(
    Variant(
        "zigzag",
        "ring over chunks r and 2W-1-r of 2W, so that every rank has the same causal work",
        "zigzag ring attention (ring-flash-attention, Zhu, 2024; Llama 3 context parallelism, 2024)",
        "causal training with little memory: two KV shards at a time",
        layouts.ZIGZAG,
        schedules.zigzag,
        "ring",
        causal_only=True,
        windows=False,
    )
)
_register(
    Variant(
        "ring_allgather",
        "contiguous shards whose second query halves are swapped to balance; all keys gathered, no merges",
        "nnScaler's ring attention (Lin et al., 2024); all-gather context parallelism (Llama 3, 2024)",
        "contiguous data with a causal mask; memory for the whole KV of the heads in flight",
        layouts.CONTIGUOUS,
        schedules.gather,
        "gather",
        q_layout=layouts.PAIRED,
        options={"heads_k_stride": None},
    )
)


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint for a name that is not known: the nearest ones, else all."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    return f"did you mean {' or '.join(close)}?" if close else f"known are {', '.join(known)}"


def variant(name: str) -> Variant:
    """Raises ValueError for an unknown name, with the nearest ones."""
    if name not in VARIANTS:
        raise ValueError(f"attention={name!r} is not a variant; {nearest(name, VARIANTS)}")
    return VARIANTS[name]


def check_stride(stride: int | None, kv_heads: int) -> int:
    """The KV heads that a gather brings at a time, all for None. Raises ValueError when they don't divide."""
    if stride is None:
        return kv_heads
    if not isinstance(stride, int) or isinstance(stride, bool) or stride < 1 or kv_heads % stride:
        divisors = [n for n in range(1, kv_heads + 1) if kv_heads % n == 0]
        raise ValueError(f"heads_k_stride={stride}: must divide kv_heads={kv_heads}; it may be {divisors}")
    return stride


def check_heads(heads: int, kv_heads: int) -> None:
    """Raises ValueError unless every KV head serves the same number of query heads."""
    if heads < 1 or kv_heads < 1 or heads % kv_heads:
        divisors = [h for h in range(1, heads + 1) if heads % h == 0]
        raise ValueError(
            f"heads={heads}, kv_heads={kv_heads}: heads must be a multiple of kv_heads; kv_heads may be {divisors}"
        )
