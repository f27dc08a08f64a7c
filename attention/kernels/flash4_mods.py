"""What FlashAttention-4's kernels evaluate for each score: of a tile that is seen in part, and of a softcap."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any


@cache
def mask_mod(intervals: int, copies: bool) -> Callable[..., Any]:
    """Whether a query sees a key, from the query's intervals of keys.

    intervals: how many; aux_tensors[0] is int32 `[queries, 2 * intervals]`, start and stop of each.
    copies: some tiles of keys are copies of others, behind the last; aux_tensors[1] is int32 `[tiles of keys]`, how many
    keys each tile lies behind the one that it is a copy of."""
    import cutlass
    from cutlass import cute
    from flash_attn.cute.utils import scalar_to_ssa

    @cute.jit
    def visible(batch, head, q_idx, kv_idx, seqlen_info, aux_tensors):  # type: ignore[no-untyped-def]
        table = aux_tensors[0]
        key = kv_idx
        if cutlass.const_expr(copies):
            key = kv_idx - scalar_to_ssa(aux_tensors[1][kv_idx[0] // 128], cutlass.Int32)
        row = q_idx[0]
        seen = (key >= scalar_to_ssa(table[row, 0], cutlass.Int32)) & (
            key < scalar_to_ssa(table[row, 1], cutlass.Int32)
        )
        for i in cutlass.range_constexpr(1, intervals):
            seen = seen | (
                (key >= scalar_to_ssa(table[row, 2 * i], cutlass.Int32))
                & (key < scalar_to_ssa(table[row, 2 * i + 1], cutlass.Int32))
            )
        return seen

    return visible


@cache
def band_mod() -> Callable[..., Any]:
    """Whether `lo <= k - q <= hi`, with lo and hi in aux_scalars: without a load."""
    from cutlass import cute

    @cute.jit
    def visible(batch, head, q_idx, kv_idx, seqlen_info, aux_tensors, aux_scalars):  # type: ignore[no-untyped-def]
        distance = kv_idx - q_idx
        return (distance >= aux_scalars[0]) & (distance <= aux_scalars[1])

    return visible


def scalars(band: tuple[int, int]) -> tuple[Any, Any]:
    """A band as aux_scalars: arguments of a launch, as Python's integers would be compiled in."""
    import cutlass

    return cutlass.Int32(band[0]), cutlass.Int32(band[1])


@lru_cache
def softcap_mods(softcap: float) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The capped score, and the gradient of a score from that of the capped one: the package's own. Made once, as the package
    reads a new function's source at each call."""
    from flash_attn.cute.utils import create_softcap_scoremod, create_softcap_scoremod_bwd

    return create_softcap_scoremod(softcap), create_softcap_scoremod_bwd(softcap)
