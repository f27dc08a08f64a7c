"""The option `check` of `attention.make`: whether the tensors of a call can be shards."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from attention.tensors import TOKENS


def check_shards(tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None) -> None:
    """Raises ValueError, on every rank, where two ranks give an equal tensor, as they do with one that was not sharded.
    Collective.

    A tensor whose tokens are all equal on a rank, such as padding or zeros, may be equal elsewhere."""
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, {name: _digest(x.detach()) for name, x in tensors.items()}, group=group)
    for name in tensors:
        first: dict[str, int] = {}
        for rank, digests in enumerate(everyone):
            other = rank if digests[name] is None else first.setdefault(digests[name], rank)
            if other != rank:
                raise ValueError(
                    f"{name} is equal on ranks {other} and {rank}: each rank must give its own shard; give fn.shard({name})"
                )


def _digest(x: Tensor) -> str | None:
    """Equal for equal tensors; None where all tokens are equal, or where there are none."""
    if not x.numel() or bool((x == x.narrow(TOKENS, 0, 1)).all()):
        return None
    values = x.cpu().contiguous().view(torch.uint8).numpy().tobytes()
    return hashlib.blake2b(values, digest_size=8).hexdigest() + str(list(x.shape))
