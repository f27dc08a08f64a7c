"""Transports: moving tokens between ranks."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from attention.errors import UnsupportedCall
from attention.gpu.private import backend, default_group
from attention.transports.collective import Collective
from attention.transports.fabric import Mailboxes
from attention.transports.interface import Handle, Message, Messages, Publication, Transport
from attention.transports.queues import CudaQueue, HostQueue
from attention.transports.symmetric import Symmetric, captures_undone, held_bytes, pool_of, release

__all__ = [
    "SUMMARIES", "Handle", "Message", "Messages", "Publication", "Transport", "captures_undone", "held_bytes", "mailboxes", "missing", "names",
    "release", "resolve", "select",
]  # fmt: skip

SUMMARIES = {
    "gloo": "torch.distributed over TCP and shared memory, for CPU tensors",
    "nccl": "torch.distributed over NCCL, on a side stream, for CUDA tensors",
    "symm": "each rank copies what it needs from remote memory: on CUDA from symmetric memory by copy engines, on a "
    "CPU from shared memory; one host",
}


def names() -> list[str]:
    return ["auto", *SUMMARIES]


def missing(name: str, device: str) -> str | None:
    """Why a transport does not work on this machine's `device` ("cpu" or "cuda"), or None."""
    if name == "symm" and device == "cpu":
        return None if hasattr(os, "memfd_create") else "needs Linux (os.memfd_create)"
    if name == "gloo":
        if device != "cpu":
            return "carries CPU tensors only"
        return None if dist.is_gloo_available() else "this PyTorch has no gloo"
    if device != "cuda":
        return "needs CUDA GPUs"
    return None if dist.is_nccl_available() else "this PyTorch has no NCCL"


def resolve(name: str, device: torch.device) -> str:
    """The name of a transport: for `auto` symm on CUDA and gloo on a CPU.

    Raises ValueError for one that does not work on the device."""
    if name == "auto":
        name = "symm" if device.type == "cuda" else "gloo"
    reason = missing(name, device.type)
    if reason:
        works = [other for other in SUMMARIES if missing(other, device.type) is None]
        raise ValueError(f"transport={name}: {reason}; on {device.type} use {' or '.join(works) or 'a world of one'}")
    return name


def select(name: str, device: torch.device, group: dist.ProcessGroup | None) -> Transport:
    """The transport of that name over a group of several ranks. Where the ranks cannot read each other's memory, `symm`
    is replaced by NCCL or gloo, with the reason as `note`. Collective over the group at its first use.

    Raises ValueError for one that does not work on the device or with the group."""
    name = resolve(name, device)
    cuda = device.type == "cuda"
    note = None
    members = group or default_group()
    if name == "symm":
        pool = pool_of(members, device)
        if not isinstance(pool, str):
            return Symmetric(members, pool)
        note = f"symm: {pool}"
    carries = backend(members, device)
    if carries is None or (cuda and carries != "nccl"):
        why = f" ({note})" if note else ""
        raise ValueError(
            f"transport={name}: the process group has {carries or 'no backend'} for {device.type} tensors{why}; make it with "
            "init_process_group('cpu:gloo,cuda:nccl'), or use transport=symm on one host"
        )
    return Collective("nccl" if cuda else "gloo", group, CudaQueue(device) if cuda else HostQueue(), note)


def mailboxes(transport: Transport, pieces: int, device: torch.device) -> Mailboxes:
    """Memory on a GPU for so many pieces of partial results. Raises UnsupportedCall without symmetric memory."""
    assert isinstance(transport, Collective)
    pool = pool_of(transport.group or default_group(), device)
    if isinstance(pool, str):
        raise UnsupportedCall(f"reduce=fused: {pool}; reduce=packed works here")
    return pool.mailboxes_for(pieces)
