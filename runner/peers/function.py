"""A call of an external package: checks, the local kernel under it, and its adapter."""

from __future__ import annotations

import copy
import importlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from attention import kernels
from attention.errors import UnsupportedCall
from attention.executors.plan import Plan
from attention.kernels import KERNELS, Kernel, Shape, name_of
from attention.masks.band import Band
from runner.peers.packages import External


def check(package: External[Any], shape: Shape, batch: int, transport: str, want_lse: bool, sinks: bool) -> None:
    """Raises UnsupportedCall where the package cannot do the call on this machine."""
    name, reason = package.name, package.missing(shape.device)
    if reason:
        raise UnsupportedCall(reason)
    if not package.layout.replicated and not dist.is_initialized():
        raise UnsupportedCall(f"{name}: works over a process group; call torch.distributed.init_process_group first")
    if transport not in ("auto", "gloo", "nccl"):
        raise UnsupportedCall(f"transport={transport}: {name} sends by torch.distributed itself; use transport=auto")
    if package.half and shape.dtype not in (torch.bfloat16, torch.float16):
        raise UnsupportedCall(f"dtype={name_of(shape.dtype)}: {name} is for bf16 and fp16 only; use dtype=bf16")
    if want_lse:
        raise UnsupportedCall(f"return_lse=True: {name} gives no LSE here; use return_lse=False")
    if sinks or shape.softcap:
        asked = "sinks" if sinks else "softcap"
        raise UnsupportedCall(f"{asked}: {name} has none here; our own variants take {asked}")
    if shape.v_head_dim != shape.head_dim:
        raise UnsupportedCall(
            f"v_head_dim={shape.v_head_dim}: {name} needs head_dim={shape.head_dim} here; our own variants take any"
        )
    if package.one_sequence and not shape.packed and batch > 1:
        raise UnsupportedCall(f"batch={batch}: {name} takes a packed batch or a batch of 1; use batch=1 or seqlens")


def kernel(package: External[Any], wanted: str, shape: Shape, masks: tuple[Band, ...]) -> Kernel:
    """The local kernel under the package; for `auto` the one that its users have. Raises UnsupportedCall."""
    name, usual = package.name, package.kernels
    if wanted == "auto":
        fitting = (k for k in usual if not any(kernels.refusal(KERNELS[k], shape, mask) for mask in masks))
        wanted = next(fitting, usual[0])
    elif package.own_kernel:
        raise UnsupportedCall(f"kernel={wanted}: {name} brings its own kernel; use kernel=auto")
    elif package.only and wanted not in usual:
        raise UnsupportedCall(
            f"kernel={wanted}: {name} runs PyTorch's own kernels only; use {', '.join(usual)} or auto"
        )
    chosen = kernels.select(wanted, shape, masks)
    if package.own_kernel:
        chosen = copy.copy(chosen)  # the local call to compare with; the package runs its own
        chosen.name = name
    return chosen


def attend(q: Tensor, k: Tensor, v: Tensor, plan: Plan, group: dist.ProcessGroup | None) -> Tensor:
    """This rank's out, like q; its backward is the package's own."""
    assert isinstance(plan.variant, External)
    adapter = importlib.import_module(f"runner.peers.{plan.variant.adapter}")
    return adapter.attend(q, k, v, plan, group)
