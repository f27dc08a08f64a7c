"""What models of text share: their logits, the loss of a training step in chunks of tokens, and FSDP2."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from attention import profiling
from runner.models import config
from runner.models.batch import Batch, summed_loss


class LanguageModel(nn.Module):
    """blocks: the layers, whose parameters are gathered one after the other where they are sharded. offload: what a training step
    keeps of them for the backward waits in the host's memory."""

    config: config.Config
    blocks: Iterable[nn.Module]
    offload = False

    def forward(self, batch: Batch) -> Tensor:
        """Logits `[B, s, V]` of this rank's tokens."""
        return self.logits(self.hidden(batch))

    def hidden(self, batch: Batch) -> Tensor:
        """What `logits` takes, `[B, s, C]`."""
        raise NotImplementedError

    def logits(self, hidden: Tensor) -> Tensor:
        raise NotImplementedError

    def loss(self, batch: Batch) -> Tensor:
        """`batch.loss` of the logits. Above `MOST_LOGITS` they are computed in chunks of tokens, and again in the backward, so that
        a rank never holds those of all its tokens."""

        def part(hidden: Tensor, labels: Tensor) -> Tensor:
            return profiling.layer("comp_loss", summed_loss, self.logits(hidden), labels)

        with save_on_cpu(pin_memory=batch.ids.is_cuda) if self.offload else nullcontext():
            hidden, labels = self.hidden(batch).flatten(0, 1), batch.labels.flatten()
        tokens = config.MOST_LOGITS // self.config.vocabulary
        if len(labels) <= tokens:
            total = part(hidden, labels)
        else:
            chunks = zip(hidden.split(tokens), labels.split(tokens), strict=True)
            parts = [checkpoint(part, *chunk, use_reentrant=False) for chunk in chunks]
            total = torch.stack(parts).sum()
        return total / max(batch.counted, 1)

    def shard_parameters(self, device: torch.device) -> None:
        """Shards parameters, their gradients and an optimizer's states over all ranks by FSDP2: each layer's, then the others.
        A backward sums the gradients over the ranks."""
        from torch.distributed.device_mesh import init_device_mesh  # half a second of imports
        from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        for module in (*self.blocks, self):
            sharded = fully_shard(module, mesh=mesh)
            sharded.set_gradient_divide_factor(1.0)
            sharded.set_force_sum_reduction_for_comms(True)  # gloo divides in no other way
        register_fsdp_forward_method(self, "loss")
