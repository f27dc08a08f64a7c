"""PyTorch's context_parallel (experimental): scaled_dot_product_attention on sequence shards, a ring inside.

Its users open the context around a training step, so here it is opened at the first call and stays open: opening is not
timed. While it is open PyTorch replaces F.scaled_dot_product_attention for everybody; here the replacement is kept aside
and F is put back. Its DTensor handlers do stay, so that attention on DTensors of other origin is not for such a process."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.experimental import _attention as peer
from torch.nn.attention import SDPBackend, sdpa_kernel

from attention.executors.plan import Plan

BACKENDS = {
    "sdpa_cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa_flash": SDPBackend.FLASH_ATTENTION,
}
_open = ExitStack()
_attention: dict[Any, Callable[..., Tensor]] = {}  # of the one open context, by group and device type


def _opened(group: dist.ProcessGroup, device: torch.device) -> Callable[..., Tensor]:
    if (group, device.type) not in _attention:
        _open.close()
        _attention.clear()
        mesh = DeviceMesh.from_group(group, device.type)
        # without a buffer to shard it does not open
        buffer = torch.zeros(1, 2 * mesh.size(), device=device)
        plain = F.scaled_dot_product_attention
        _open.enter_context(
            peer.context_parallel(mesh, buffers=[buffer], buffer_seq_dims=[1], no_restore_buffers={buffer})
        )
        assert F.scaled_dot_product_attention is not plain, "context_parallel no longer replaces it"
        _attention[group, device.type] = F.scaled_dot_product_attention
        F.scaled_dot_product_attention = plain
    return _attention[group, device.type]


def _choose(causal: bool, rotate: str) -> None:
    """Its options are global: they are set before every forward and every backward."""
    peer._cp_options.enable_load_balance = causal  # head-tail, for a causal mask only
    peer.set_rotate_method(rotate)


def attend(q: Tensor, k: Tensor, v: Tensor, plan: Plan, group: dist.ProcessGroup | None) -> Tensor:
    """GQA by enable_gqa: KV heads travel unrepeated."""
    causal, rotate = plan.problem.mask.causal, plan.options.rotate
    attention = _opened(group or dist.distributed_c10d._get_default_group(), q.device)
    _choose(causal, rotate)
    with sdpa_kernel(BACKENDS[plan.kernel.name]):
        out = attention(
            *(x.transpose(1, 2) for x in (q, k, v)),
            is_causal=causal,
            scale=plan.scale,
            enable_gqa=plan.heads != plan.kv_heads,
        )
    if out.requires_grad:
        out.register_hook(lambda _: _choose(causal, rotate))
    return out.transpose(1, 2)
