"""yunchang's LongContextAttention (Fang and Zhao, 2024), with its zigzag ring."""

from __future__ import annotations

from functools import cache
from types import ModuleType

import torch.distributed as dist
from torch import Tensor, nn

from attention.errors import UnsupportedCall
from attention.executors.plan import Plan
from runner.peers.flash_functions import instead_of_flash_attn, let_gloo_send_to_itself, served


@cache
def _package() -> ModuleType:
    with instead_of_flash_attn():
        import yunchang
    let_gloo_send_to_itself(yunchang.ring.utils.RingComm)
    return yunchang


@cache
def _module(ulysses: int, world: int) -> nn.Module:
    """The package's module for such groups. Creates process groups, so all ranks must call it together."""
    package = _package()
    package.set_seq_parallel_pg(ulysses, world // ulysses, dist.get_rank(), world, use_ulysses_low=True)
    return package.LongContextAttention(ring_impl_type="zigzag", attn_type=package.kernels.AttnType.FA)


def attend(q: Tensor, k: Tensor, v: Tensor, plan: Plan, group: dist.ProcessGroup | None) -> Tensor:
    """This rank's out, like q `[B, s, H, D]`. Raises UnsupportedCall for a group of fewer than all ranks."""
    if group is not None and dist.get_world_size(group) != dist.get_world_size():
        raise UnsupportedCall("group: yunchang builds its groups from all ranks; use the default group")
    module = _module(plan.problem.ulysses, plan.problem.ranks)
    options = {"softmax_scale": plan.scale, "causal": True, "deterministic": plan.deterministic}
    return served(plan.kernel, module, q, k, v, **options)
