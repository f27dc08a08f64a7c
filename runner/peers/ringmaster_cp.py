"""axolotl-ringmaster: its ring and zigzag ring that send KV from rank to rank, its Ulysses, and both together."""

from __future__ import annotations

from functools import cache
from types import ModuleType, SimpleNamespace
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import attention
from attention.errors import UnsupportedCall
from attention.executors.plan import Plan
from runner.peers.flash_functions import FUNCTIONS, served, serving
from runner.peers.packages import Package

OURS = "runner_peers"  # our kernels among the attentions that the package wraps


def _forward(q: Tensor, k: Tensor, v: Tensor, dropout: float, scale: float, causal: bool, *_: Any) -> Any:
    forward: Any = FUNCTIONS["_flash_attn_forward"]
    return forward(q, k, v, softmax_scale=scale, causal=causal)


def _of_model(module: Any, q: Tensor, k: Tensor, v: Tensor, *_: Any, **options: Any) -> tuple[Tensor, None]:
    """As a model's own attention: `[b, H, s, D]` of one rank's heads to `[b, s, H, D]`."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return _of_block(q, k, v, causal=options["is_causal"], scaling=options["scaling"])


def _of_block(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scaling: float, **_: Any) -> tuple[Tensor, None]:
    fn = attention.make("dense", kernel=serving().name, agreement=False)
    return fn(q, k, v, causal=causal, scale=scaling), None


@cache
def _package() -> ModuleType:
    """The package, whose calls of flash-attn and of a model's own attention reach our kernels."""
    import ringmaster
    from ringmaster.ring import kernels, p2p_attn, zigzag
    from transformers import AttentionInterface

    p2p_attn._flash_ops = zigzag._flash_ops = lambda *_: (_forward, FUNCTIONS["_flash_attn_backward"])
    AttentionInterface.register(OURS, _of_model)
    kernels.PROVIDERS[OURS] = _of_block
    return ringmaster


@cache
def _mesh(device: str, ring: int, ulysses: int) -> DeviceMesh:
    """Creates process groups, so all ranks must call it together."""
    return init_device_mesh(device, (ring, ulysses), mesh_dim_names=("ring", "ulysses"))


def attend(q: Tensor, k: Tensor, v: Tensor, plan: Plan, group: dist.ProcessGroup | None) -> Tensor:
    """This rank's out, like q `[B, s, H, D]`. Raises UnsupportedCall for a group of fewer than all ranks."""
    if group is not None and dist.get_world_size(group) != dist.get_world_size():
        raise UnsupportedCall("group: ringmaster builds its groups from all ranks; use the default group")
    package, variant = _package(), plan.variant
    assert isinstance(variant, Package)
    qkv = [x.transpose(1, 2) for x in (q, k, v)]
    if variant.function == "zigzag_ring_attention":
        from ringmaster.ring.zigzag import zigzag_ring_attention

        return served(plan.kernel, zigzag_ring_attention, *qkv, group=group or dist.group.WORLD, scaling=plan.scale)
    mesh = _mesh(q.device.type, plan.problem.world, plan.problem.ulysses)
    config = package.RingmasterConfig(size=mesh.size(), ring_size=mesh.size(0), ulysses_size=mesh.size(1))
    groups = {"ring_group": mesh["ring"].get_group(), "ulysses_group": mesh["ulysses"].get_group()}
    package.set_runtime(package.CPRuntime(config=config, cp_group=dist.group.WORLD, **groups))
    from ringmaster.strategies.ulysses import make_ulysses_attention
    from ringmaster.strategies.usp import make_usp_attention

    if mesh.size(0) == 1:
        function = make_ulysses_attention(OURS)
    else:
        function = make_usp_attention(OURS, "flash_attention_2", package.RotateMethod.ALLTOALL)
    options = {"attention_mask": None, "scaling": plan.scale, "is_causal": plan.problem.band.causal}
    return served(plan.kernel, lambda *x: function(SimpleNamespace(), *x, **options)[0], *qkv)
