"""The package flash-attn-4 (`flash_attn.cute`): its import, how its kernels take tensors, and what they evaluate for each score:
of a tile that is seen in part, and of a softcap."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from torch import Tensor

from attention.gpu.private import FLASH4, FLASH4_VERSION
from attention.kernels.packages import imported
from attention.tensors import dense_like


@cache
def package() -> tuple[Any, str | None]:
    """The functions of `flash_attn.cute.interface`, or None and the reason. cutlass-dsl keeps its packages in a subfolder, which
    a .pth file adds to the path. Python reads .pth files only in site-packages; elsewhere the subfolder is added here."""
    dsl = None if importlib.util.find_spec("cutlass") else importlib.util.find_spec("nvidia_cutlass_dsl")
    for root in (dsl and dsl.submodule_search_locations) or []:
        packages = Path(root) / "dsl_packages"
        if packages.is_dir() and str(packages) not in sys.path:
            sys.path.append(str(packages))
    return imported("flash_attn.cute.interface", FLASH4, f"pip install flash-attn-4=={FLASH4_VERSION}")


def writable(x: Tensor, align: int = 16) -> bool:
    """Whether the kernel can write to `x`: its last dim is contiguous, no stride is 0, and every row is aligned to
    `align` bytes."""
    if x.stride(-1) != 1 or 0 in x.stride() or x.data_ptr() % align:
        return False
    return all(stride * x.element_size() % align == 0 for stride in x.stride()[:-1])


def as_taken(lse: Tensor) -> Tensor:
    """The LSE as the backward's kernels need it: contiguous, or every row aligned to 16 bytes."""
    dense = lse.is_contiguous() and lse.data_ptr() % 16 == 0
    return lse if dense or writable(lse) else dense_like(lse).copy_(lse)


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
