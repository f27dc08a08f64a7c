"""PyTorch's context_parallel (experimental): scaled_dot_product_attention on sequence shards, with a ring inside.

Its users open the context around a training step. Here it is opened at the first call and stays open, so opening is not
timed. While open, PyTorch replaces F.scaled_dot_product_attention for the whole process; we keep the replacement and
restore F. Its DTensor handlers stay, so such a process should not run attention on other DTensors."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention import SDPBackend, sdpa_kernel

from attention.executors.plan import Plan
from attention.gpu.private import Private, default_group

# PyTorch's own ring attention
torch_cp: Private[[], Any] = Private(
    "torch.distributed.tensor.experimental._attention",
    None,
    "use another variant than torch_cp",
    lambda module: (module.context_parallel, module._cp_options, module.set_rotate_method) and (lambda: module),
)
BACKENDS = {"sdpa_cudnn": SDPBackend.CUDNN_ATTENTION, "sdpa_flash": SDPBackend.FLASH_ATTENTION}
_open = ExitStack()
_attention: dict[Any, Callable[..., Tensor]] = {}  # by group and device type; of the open context only


def _opened(group: dist.ProcessGroup, device: torch.device) -> Callable[..., Tensor]:
    if (group, device.type) not in _attention:
        _open.close()
        _attention.clear()
        mesh = DeviceMesh.from_group(group, device.type)
        # without a buffer to shard it does not open
        buffer = torch.zeros(1, 2 * mesh.size(), device=device)
        plain = F.scaled_dot_product_attention
        _open.enter_context(
            torch_cp().context_parallel(mesh, buffers=[buffer], buffer_seq_dims=[1], no_restore_buffers={buffer})
        )
        assert F.scaled_dot_product_attention is not plain, "context_parallel no longer replaces it"
        _attention[group, device.type] = F.scaled_dot_product_attention
        F.scaled_dot_product_attention = plain
    return _attention[group, device.type]


def _choose(causal: bool, rotate: str) -> None:
    """Sets the options, which are of the process, before every forward and every backward."""
    options = torch_cp()._cp_options
    if not isinstance(getattr(options, "enable_load_balance", None), bool):
        raise RuntimeError("_attention._cp_options has no enable_load_balance: use another variant than torch_cp")
    options.enable_load_balance = causal  # whether it expects zigzag shards
    torch_cp().set_rotate_method(rotate)


def attend(q: Tensor, k: Tensor, v: Tensor, plan: Plan, group: dist.ProcessGroup | None) -> Tensor:
    """This rank's out, like q `[B, s, H, D]`. With enable_gqa the KV heads travel unrepeated."""
    causal, rotate = plan.problem.band.causal, plan.options.rotate
    attention = _opened(group or default_group(), q.device)
    _choose(causal, rotate)
    with sdpa_kernel(BACKENDS[plan.kernel.name]):
        options = {"is_causal": causal, "scale": plan.scale, "enable_gqa": plan.heads != plan.kv_heads}
        out = attention(*(x.transpose(1, 2) for x in (q, k, v)), **options)
    if out.requires_grad:
        out.register_hook(lambda _: _choose(causal, rotate))
    return out.transpose(1, 2)
