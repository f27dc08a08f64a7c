"""The sum of the parameters' gradients over sequence-parallel ranks."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn

from attention.profiling import phase


def reduce_gradients(model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Sums the parameters' gradients over the ranks of the attention's group, in place, once per optimizer step. A parameter
    without one counts as 0. Raises ValueError for gradients that contain a sum already, and under FSDP, which reduces them
    itself."""
    _sum(_parameters(model, group), group)


def reduce_used_gradients(model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """As `reduce_gradients`, but a parameter that no rank has used, such as an expert without tokens, stays without a gradient.
    Waits for the device."""
    parameters = _parameters(model, group)
    if parameters and dist.is_initialized() and dist.get_world_size(group) > 1:
        used = torch.tensor([p.grad is not None for p in parameters], dtype=torch.int32, device=parameters[0].device)
        dist.all_reduce(used, dist.ReduceOp.MAX, group=group)
        _sum((p for p, is_used in zip(parameters, used.tolist(), strict=True) if is_used), group)


def _parameters(model: nn.Module, group: dist.ProcessGroup | None) -> list[nn.Parameter]:
    parameters = [p for p in model.parameters() if p.requires_grad]
    from torch.distributed.tensor import DTensor  # half a second of imports, and only where one trains

    if any(isinstance(p, DTensor) for p in parameters):
        raise ValueError(
            "parameters are DTensors: FSDP reduces them, to the mean; leave this out, and multiply the loss by the world size"
        )
    if any((group, p._version) in _sums(p) for p in parameters):
        raise ValueError(
            "gradients hold a sum over the ranks, which would be summed again: reduce them once per optimizer step, after the "
            "backward of all its batches, and then set them to None (zero_grad())"
        )
    return parameters


def _sum(parameters: Iterable[nn.Parameter], group: dist.ProcessGroup | None) -> None:
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return
    with phase("wait_gradients"):
        for p in parameters:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            dist.all_reduce(p.grad, group=group)
            p.grad.sums = _sums(p) | {(group, p._version)}  # type: ignore[attr-defined]


def _sums(p: nn.Parameter) -> set[tuple[dist.ProcessGroup | None, int]]:
    """The sums that p's gradient holds: of which group, and at which version of p, which a step of most optimizers changes. They
    are kept at the gradient, so that a new one, after `zero_grad()`, holds none."""
    return getattr(p.grad, "sums", set())
