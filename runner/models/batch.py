"""A batch of text on sequence-parallel ranks: whatever belongs to the tokens goes through the attention's own `shard`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from attention.api import ContextParallel
from attention.huggingface.batch import IGNORED, reduce_gradients, shifted
from attention.huggingface.batch import counted as counted_of

__all__ = ["IGNORED", "Batch", "reduce_gradients", "shard"]


@dataclass(frozen=True)
class Batch:
    """This rank's tokens, each `[B, s]`. positions are global. source: the ids that an encoder reads; None for a decoder
    alone. counted: the labels that count on all ranks together."""

    ids: Tensor
    positions: Tensor
    labels: Tensor
    counted: int
    source: Tensor | None = None

    def loss(self, logits: Tensor) -> Tensor:
        """This rank's part of the mean cross entropy, from its logits `[B, s, V]`: the sum over its tokens divided by
        the number of all. The loss and the parameters' gradients are summed over ranks."""
        return summed_loss(logits.flatten(0, 1), self.labels.flatten()) / max(self.counted, 1)


def summed_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """The sum of the cross entropy over tokens, from logits `[n, V]` and labels `[n]`, in at least fp32."""
    upcast = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(upcast, labels, reduction="sum", ignore_index=IGNORED)


def shard(
    attend: ContextParallel,
    ids: Tensor,
    labels: Tensor | None = None,
    source: Tensor | None = None,
    counted: int | None = None,
) -> Batch:
    """This rank's part of a global batch.

    ids: `[B, S]`. labels: the token after each one, `[B, S]`, with `IGNORED` where none counts; by default the ids
    shifted by one, before they are sharded. source: `[B, S]`, the ids that an encoder reads, as many as `ids`.
    counted: the labels that count, over all data-parallel batches; by default of this batch.
    Raises ValueError for shapes that differ, and for a sequence that does not divide."""
    if labels is None:
        labels = shifted(ids)
    for name, x in (("labels", labels), ("source", source)):
        if x is not None and x.shape != ids.shape:
            raise ValueError(
                f"{name} has shape {list(x.shape)}: must be that of ids, {list(ids.shape)}; pad the shorter"
            )
    positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    return Batch(
        attend.shard(ids),
        attend.shard(positions),
        attend.shard(labels),
        int(counted_of(attend, labels, counted)),
        None if source is None else attend.shard(source),
    )
