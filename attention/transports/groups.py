"""Facts about a process group for which PyTorch has private names only."""

from __future__ import annotations

import torch
import torch.distributed as dist


def default_group() -> dist.ProcessGroup:
    return dist.distributed_c10d._get_default_group()


def backend(group: dist.ProcessGroup, device: torch.device) -> str:
    """The backend for the group's tensors on that device: "gloo", "nccl" or another."""
    return str(group._get_backend(device).name())


def timeout_s(group: dist.ProcessGroup, device: torch.device) -> float:
    """The group's timeout for operations on that device, as it is now."""
    try:
        return float(group._get_backend(device).options._timeout.total_seconds())
    except (AttributeError, RuntimeError):
        return float(dist.distributed_c10d.default_pg_timeout.total_seconds())
