"""Transformer Engine's DotProductAttention over a context-parallel group, causal or full, on zigzag shards."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from attention.executors.plan import Plan
from attention.gpu.private import default_group


@lru_cache(maxsize=16)
def _module(
    heads: int, kv_heads: int, head_dim: int, causal: bool, scale: float, comm: str, group: dist.ProcessGroup
) -> Any:
    from transformer_engine.pytorch import DotProductAttention

    module = DotProductAttention(
        heads,
        head_dim,
        num_gqa_groups=kv_heads,
        attention_dropout=0.0,
        qkv_format="bshd",
        attn_mask_type="causal" if causal else "no_mask",
        softmax_scale=scale,
    ).cuda()
    if dist.get_world_size(group) > 1:
        module.set_context_parallel_group(group, dist.get_process_group_ranks(group), torch.cuda.Stream(), comm)
    return module


def attend(q: Tensor, k: Tensor, v: Tensor, plan: Plan, group: dist.ProcessGroup | None) -> Tensor:
    """This rank's out, like q `[B, s, H, D]`."""
    module = _module(
        plan.heads,
        plan.kv_heads,
        q.shape[-1],
        plan.problem.band.causal,
        plan.scale,
        plan.options.cp_comm_type,
        group or default_group(),
    )
    return module(q, k, v).unflatten(-1, (plan.heads, q.shape[-1]))
