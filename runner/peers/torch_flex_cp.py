"""PyTorch's context parallelism for FlexAttention (experimental): keys and values gathered, a block mask for this rank's queries."""

from __future__ import annotations

from functools import cache, lru_cache
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention.flex_attention import flex_attention

from attention.errors import UnsupportedCall
from attention.executors.plan import Plan
from attention.gpu.private import Private, default_group
from runner.peers.torch_cp import torch_cp

# block masks of sharded queries, and the gathering of keys and values with its gradient
flex_cp: Private[[], Any] = Private(
    "torch.distributed.tensor.experimental._context_parallel._attention",
    None,
    "use another variant than torch_flex_cp",
    lambda module: (module._create_cp_block_mask, module.flex_cp_allgather) and (lambda: module),
)

BLOCK = 128  # tokens of its block masks


@cache
def _compiled() -> Any:
    return torch.compile(flex_attention)


@lru_cache(maxsize=64)
def _mask(mesh: DeviceMesh, tokens: int, causal: bool) -> Any:
    """The block mask of this rank's queries, whose keys lie as the ranks' shards one after another."""
    if tokens % (BLOCK * mesh.size()):
        raise UnsupportedCall(
            f"seq_len={tokens}: torch_flex_cp needs a multiple of {BLOCK} tokens for each of {mesh.size()} ranks"
        )
    torch_cp()._cp_options.enable_load_balance = causal
    make = flex_cp()._create_cp_block_mask
    size = {"BLOCK_SIZE": (BLOCK, BLOCK)} if "BLOCK_SIZE" in signature(make).parameters else {}  # from PyTorch 2.15 on
    return make(lambda b, h, q, k: k <= q if causal else k >= 0, 1, 1, tokens, tokens, device_mesh=mesh, **size)


@cache
def _mesh(group: dist.ProcessGroup, device: str) -> DeviceMesh:
    return DeviceMesh.from_group(group, device)


def attend(q: Tensor, k: Tensor, v: Tensor, plan: Plan, group: dist.ProcessGroup | None) -> Tensor:
    """This rank's out, like q `[B, s, H, D]`. Raises UnsupportedCall for tokens that its blocks do not divide."""
    group = group or default_group()
    mask = _mask(_mesh(group, q.device.type), plan.problem.cu_seqlens[-1], plan.problem.band.causal)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    k, v = flex_cp().flex_cp_allgather(k.contiguous(), v.contiguous(), 2, group.group_name)
    function = _compiled() if q.is_cuda else flex_attention  # on a CPU forward only
    out = function(q, k, v, block_mask=mask, scale=plan.scale, enable_gqa=plan.heads != plan.kv_heads)
    return out.transpose(1, 2)
