"""A Trainer of transformers, and an Accelerator, whose ranks share rows: what they do to rows, losses and gradients counts each row
once. Imports neither.

To both, every rank is a data-parallel one: it gets rows of its own, and DDP or FSDP takes the mean of all ranks' gradients."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map

from attention.api import ContextParallel

# Arguments of a Trainer that compute from one rank's tokens, or from rows that another rank has, and what to do instead
REFUSED = {
    "label_smoothing_factor": "the Trainer smooths over one rank's labels; set it to 0",
    "use_liger_kernel": "its loss shifts the labels of one rank; set it to False",
    "eval_use_gather_object": "it counts the rows of each rank; set it to False",
}


def prepared(cp: Any, trainer: Any) -> Any:
    """The Trainer or Accelerator itself, as one whose ranks share the rows of `cp`'s group. Raises ValueError for arguments that
    break this, for another model and for a group whose ranks are not neighbours."""
    ranks = dist.get_process_group_ranks(cp.fn.group) if dist.is_initialized() else [0]
    if ranks != [*range(first := ranks[0] - ranks[0] % len(ranks), first + len(ranks))]:
        raise ValueError(
            f"group has the ranks {ranks}: those that share rows must be neighbours; make the group the last dimension of a "
            'mesh, such as init_device_mesh(device, (data, context), mesh_dim_names=("data", "context"))'
        )
    if accelerator := getattr(trainer, "accelerator", None):
        check_trainer(cp, trainer)
        _mix(accelerator, SharedGather, fn=cp.fn)
        return _mix(trainer, SharedTrainer, cp=cp)
    return _mix(trainer, SharedLoaders, fn=cp.fn)


def check_trainer(cp: Any, trainer: Any) -> None:
    """Raises ValueError for what a Trainer would compute from a part of a batch."""
    for name, why in REFUSED.items():
        if value := getattr(trainer.args, name, None):
            raise ValueError(f"{name}={value}: {why}")
    if trainer.compute_loss_func is not None:
        raise ValueError("compute_loss_func: it would get one rank's logits; leave it out, the model has a loss")
    if trainer.model_init is not None or all(module is not cp.model for module in trainer.model.modules()):
        raise ValueError(
            "the Trainer's model is not this one; give Trainer the model of context_parallel, and no model_init"
        )
    config = getattr(trainer.accelerator, "parallelism_config", None)
    if config is not None and config.non_data_parallel_size > 1:
        raise ValueError(
            f"parallelism_config has {config.non_data_parallel_size} ranks that share rows by themselves; leave tp_size, cp_size "
            "and sp_size at 1"
        )


def _mix(x: Any, mixin: type, **attributes: Any) -> Any:
    """x with the methods of the mixin before those of its class."""
    if not isinstance(x, mixin):
        x.__class__ = type(type(x).__name__, (mixin, type(x)), {})
    vars(x).update(attributes)
    return x


class SharedLoaders:
    """A mixin of an Accelerator: to the data loaders that it prepares, the ranks of `fn`'s group are one process."""

    fn: ContextParallel
    ranks = 1  # of one process

    @property
    def num_processes(self) -> int:
        return super().num_processes // self.ranks  # type: ignore[misc]

    @property
    def process_index(self) -> int:
        return super().process_index // self.ranks  # type: ignore[misc]

    def prepare_data_loader(self, *args: Any, **kwargs: Any) -> Any:
        self.dataloader_config.dispatch_batches = False  # type: ignore[attr-defined]  # rank 0 would send each rank other rows
        self.ranks = self.fn.world
        try:
            return super().prepare_data_loader(*args, **kwargs)  # type: ignore[misc]
        finally:
            self.ranks = 1

    def _prepare_device_mesh(self) -> None:
        """None: a mesh would say how many processes have rows of their own."""


class SharedGather(SharedLoaders):
    """A mixin of a Trainer's Accelerator, of which it asks counts and metrics: it gathers from one rank of each group."""

    def gather(self, x: Any) -> Any:
        def once(x: Tensor) -> Tensor:
            return x.unflatten(0, (-1, self.fn.world, len(x) // self.num_processes))[:, 0].flatten(0, 1)

        gathered = super().gather(x)  # type: ignore[misc]
        return gathered if self.fn.world == 1 else tree_map(once, gathered)


class SharedTrainer:
    """A mixin of a Trainer. A rank's loss is such that the mean over all ranks is the loss of one rank."""

    cp: Any
    args: Any

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """As the Trainer's, of this rank's part of the inputs."""
        batch = self.cp.shard(**inputs, num_items_in_batch=num_items_in_batch)
        counted = None if num_items_in_batch is None else batch.get("num_items_in_batch")
        loss, outputs = super().compute_loss(model, batch, True, counted)  # type: ignore[misc]
        if counted is None or not self.args.average_tokens_across_devices:  # else it has multiplied by all ranks
            loss = loss * self.cp.fn.world
        return (loss, outputs) if return_outputs else loss

    def prediction_step(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """As the Trainer's: the loss and the logits of whole rows, on every rank."""
        if inputs.get("labels") is None:  # the Trainer calls the model itself
            inputs = self.cp.shard(**self._prepare_inputs(inputs))  # type: ignore[attr-defined]
        loss, logits, labels = super().prediction_step(model, inputs, *args, **kwargs)  # type: ignore[misc]
        if loss is not None and self.cp.fn.world > 1:
            dist.all_reduce(loss, group=self.cp.fn.group)
            loss /= self.cp.fn.world
        return loss, None if logits is None else tree_map(self.cp.unshard, logits), labels

    def get_total_train_batch_size(self, args: Any) -> int:
        return super().get_total_train_batch_size(args) // self.cp.fn.world  # type: ignore[misc]
