"""Transports: how tokens get from rank to rank."""

from __future__ import annotations

import torch
import torch.distributed as dist

from attention.transports.collective import Cuda, Handle, Host, Nothing, Transport
from attention.variants import nearest

__all__ = ["SUMMARIES", "Handle", "Nothing", "Transport", "missing", "names", "select"]

SUMMARIES = {
    "gloo": "torch.distributed over TCP and shared memory, for CPU tensors",
    "nccl": "torch.distributed over NCCL, on a side stream, for CUDA tensors",
}


def names() -> list[str]:
    return ["auto", *SUMMARIES]


def missing(name: str, device: str) -> str | None:
    """Why a transport does not work on this machine's `device` ("cpu" or "cuda"), or None."""
    if name == "gloo":
        if device != "cpu":
            return "carries CPU tensors only"
        return None if dist.is_gloo_available() else "this PyTorch has no gloo"
    if device != "cuda":
        return "needs CUDA GPUs"
    return None if dist.is_nccl_available() else "this PyTorch has no NCCL"


def select(name: str, device: torch.device, group: dist.ProcessGroup | None) -> Transport:
    """The transport of that name over `group`; `auto` is NCCL on CUDA and gloo on a CPU. A world of one needs none.

    Raises ValueError for an unknown name or one that the device can't use."""
    if name != "auto" and name not in SUMMARIES:
        raise ValueError(f"transport={name!r} is not a transport; {nearest(name, names())}")
    if name == "auto":
        name = "nccl" if device.type == "cuda" else "gloo"
    reason = missing(name, device.type)
    if reason:
        works = [other for other in SUMMARIES if missing(other, device.type) is None]
        raise ValueError(f"transport={name}: {reason}; on {device.type} use {' or '.join(works) or 'a world of one'}")
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return Nothing()
    return Cuda(group, device) if device.type == "cuda" else Host(group)
