"""ring-flash-attn (Zhu, 2024): its ring, zigzag, stripe and llama3 functions."""

from __future__ import annotations

from functools import cache, lru_cache
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from attention.executors.plan import Plan
from attention.geometry.layouts import CuSeqlens
from attention.gpu.uploads import uploaded
from runner.peers.flash_functions import instead_of_flash_attn, lengths, let_gloo_send_to_itself, served
from runner.peers.packages import Package


@cache
def _package() -> ModuleType:
    # its Hugging Face adapter does not import with transformers 5, and is not needed
    adapter = {"substitute_hf_flash_attn": None, "update_ring_flash_attn_params": None}
    with instead_of_flash_attn({"ring_flash_attn.adapters": adapter}):
        import ring_flash_attn
    let_gloo_send_to_itself(ring_flash_attn.utils.RingComm)
    return ring_flash_attn


@lru_cache(maxsize=64)
def _slices(cu_seqlens: CuSeqlens, causal: bool, rank: int, world: int, device: torch.device) -> tuple[Any, ...]:
    """(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, needed slice of the keys). Cached: its users compute
    them once per batch, before the layers."""
    cu = uploaded(np.array(cu_seqlens, np.int32), device)
    slices = _package().llama3_flash_attn_prepare_cu_seqlens(cu, causal, rank, world)
    for lengths_of in slices[:2]:
        lengths(lengths_of)
    return slices


def attend(q: Tensor, k: Tensor, v: Tensor, plan: Plan, group: dist.ProcessGroup | None) -> Tensor:
    """This rank's out, like q. q `[B, s, H, D]`; for llama3 `[t, H, D]`, or a batch of 1, which is one sequence."""
    problem, variant = plan.problem, plan.variant
    assert isinstance(variant, Package) and variant.function
    options: dict[str, Any] = {
        "softmax_scale": plan.scale,
        "causal": problem.band.causal,
        "deterministic": plan.deterministic,
        "group": group,
    }
    tensors = [q, k, v]
    if variant.one_sequence:
        *slices, options["local_k_slice"] = _slices(
            problem.cu_seqlens, problem.band.causal, plan.rank, problem.world, q.device
        )
        options["heads_k_stride"] = plan.options.heads_k_stride or plan.kv_heads
        tensors = [*(x if plan.packed else x.squeeze(0) for x in tensors), *slices]
    out = served(plan.kernel, getattr(_package(), variant.function), *tensors, **options)
    return out.view_as(q)
