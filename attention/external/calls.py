"""A call of a peer: the kernel that serves it, and its adapter."""

from __future__ import annotations

import copy
import importlib

import torch
import torch.distributed as dist
from torch import Tensor

from attention import kernels
from attention.executors.plan import Plan
from attention.external import PEERS, missing
from attention.kernels import KERNELS, Kernel, Shape, UnsupportedCall, name_of
from attention.masks.band import Mask


def check(name: str, shape: Shape, batch: int, transport: str, want_lse: bool) -> None:
    """Raises UnsupportedCall for what the peer can't do here."""
    reason = missing(name, shape.device)
    if reason:
        raise UnsupportedCall(reason)
    if not dist.is_initialized():
        raise UnsupportedCall(f"{name}: works over a process group; call torch.distributed.init_process_group first")
    if transport not in ("auto", "gloo", "nccl"):
        raise UnsupportedCall(f"transport={transport}: {name} sends by torch.distributed itself; use transport=auto")
    if PEERS[name].half and shape.dtype not in (torch.bfloat16, torch.float16):
        raise UnsupportedCall(f"dtype={name_of(shape.dtype)}: {name} is for bf16 and fp16 only; use dtype=bf16")
    if want_lse:
        raise UnsupportedCall(f"return_lse=True: {name} gives no LSE here; use return_lse=False")
    if name == "rfa_llama3" and not shape.packed and batch > 1:
        raise UnsupportedCall(f"batch={batch}: {name} takes a pack or a batch of 1; use batch=1 or seqlens")


def kernel(name: str, wanted: str, shape: Shape, masks: tuple[Mask, ...]) -> Kernel:
    """The local kernel that serves the peer: of `auto` the one that its users have. Raises UnsupportedCall."""
    peer = PEERS[name]
    if wanted == "auto":
        fitting = (k for k in peer.kernels if not any(kernels.refusal(KERNELS[k], shape, mask) for mask in masks))
        chosen = kernels.select(next(fitting, peer.kernels[0]), shape, masks)
    elif name == "transformer_engine":
        raise UnsupportedCall(f"kernel={wanted}: {name} takes its own kernel; use kernel=auto")
    elif peer.only and wanted not in peer.kernels:
        raise UnsupportedCall(f"kernel={wanted}: {name} runs PyTorch's own only; use {', '.join(peer.kernels)} or auto")
    else:
        chosen = kernels.select(wanted, shape, masks)
    if name == "transformer_engine":
        chosen = copy.copy(chosen)  # what a local call is compared with; what ran is its own
        chosen.name = name
    return chosen


def attend(q: Tensor, k: Tensor, v: Tensor, plan: Plan, group: dist.ProcessGroup | None) -> Tensor:
    """This rank's out, differentiable by the peer's own backward."""
    adapter = importlib.import_module(f"attention.external.{PEERS[plan.variant.name].adapter}")
    return adapter.attend(q, k, v, plan, group)


def served(name: str, kernel_name: str) -> str:
    """What computed and what moved the data, for the result's reader."""
    source = PEERS[name].variant.source
    if name in ("torch_cp", "transformer_engine"):
        return f"{source}, {'its own kernel' if name != 'torch_cp' else kernel_name} and its own exchange"
    return f"{source}: its exchange and merging; the flash_attn functions it calls are served by kernel {kernel_name}"
