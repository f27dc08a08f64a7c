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
from runner.peers.flash_functions import (
    instead_of_flash_attn,
    lengths,
    let_gloo_send_to_itself,
    serve,
    serve_backward,
)
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
    found = _package().llama3_flash_attn_prepare_cu_seqlens(cu, causal, rank, world)
    for x in found[:2]:
        lengths(x)
    return found


def attend(q: Tensor, k: Tensor, v: Tensor, plan: Plan, group: dist.ProcessGroup | None) -> Tensor:
    """This rank's out, like q. q `[B, s, H, D]`; for llama3 `[t, H, D]`, or a batch of 1, which is one sequence."""
    package = _package()
    serve(plan.kernel)
    common = {
        "softmax_scale": plan.scale,
        "causal": plan.problem.band.causal,
        "deterministic": plan.deterministic,
        "group": group,
    }
    assert isinstance(plan.variant, Package) and plan.variant.function
    function = getattr(package, plan.variant.function)
    if not plan.variant.one_sequence:
        return serve_backward(function(q, k, v, **common), plan.kernel)
    problem = plan.problem
    cu_q, cu_k, max_q, max_k, needed = _slices(
        problem.cu_seqlens, problem.band.causal, plan.rank, problem.world, q.device
    )
    out = function(
        *(x if plan.packed else x.squeeze(0) for x in (q, k, v)),
        cu_q,
        cu_k,
        max_q,
        max_k,
        heads_k_stride=plan.options.heads_k_stride or plan.kv_heads,
        local_k_slice=needed,
        **common,
    )
    return serve_backward(out if plan.packed else out.unsqueeze(0), plan.kernel)
