"""The comparison of multi-head dilated attention with the chain of its definitions around `dilated.reference`."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from runner.check import dilated, local, pieces, whole_model
from runner.check.errors import Compared, verdict
from runner.config.experiment import Experiment
from runner.launch.rank import Rank
from runner.measure.module_work import ModuleWork, named

Attend = Callable[[dict[str, Tensor], int], dict[str, Tensor]]  # of a KV head's inputs, from a query head on


def compare(
    me: Rank, experiment: Experiment, work: ModuleWork, outputs: dict[str, Tensor], with_scales: bool
) -> Compared:
    """The comparison (`gate.Compare`) of the module. Every rank compares all that it computed."""
    dtype = pieces.precision(experiment, pieces.tflop(experiment))
    me.say("check_reference")
    call, dilation, kernel = experiment.workload, experiment.dilation, work.plan.kernel.name
    assert dilation is not None
    scores = pieces.scores_held(experiment, me.device, dtype)

    def exact(inputs: dict[str, Tensor], head: int) -> dict[str, Tensor]:
        return dilated.reference(inputs, head, call, dilation, dtype, scores).values

    def alone(inputs: dict[str, Tensor], head: int) -> dict[str, Tensor]:
        return local.results(experiment, inputs, head, kernel)

    there = chain(work, dtype, exact), chain(work, work.x.dtype, alone)
    me.say("check_compare")
    found = whole_model.result(experiment, outputs, dtype, *there)
    why = dict.fromkeys(filter(None, me.gather(found["why"])))
    found |= verdict(why, kernel=kernel, checked_share=1.0)
    return whole_model.with_limits(experiment, found, outputs, with_scales)


def chain(work: ModuleWork, dtype: torch.dtype, attend: Attend) -> dict[str, Tensor]:
    """The outputs of the module in `dtype`, one part after another, with `attend` for its attention."""
    module = work.module
    parts = nn.ModuleDict({"qkv": module.qkv, "norm": module.norm, "out": module.out})
    parts = deepcopy(parts).to(dtype)
    x = work.x.detach().to(dtype).requires_grad_(work.backward)
    out = parts["out"](parts["norm"](_Attention.apply(parts["qkv"](x), work, attend)))
    if work.dout is None:
        return named({"out": out})
    wanted = {"dx": x} | {f"d{name}": parameter for name, parameter in parts.named_parameters()}
    gradients = torch.autograd.grad(out, [*wanted.values()], work.dout.to(dtype))
    return named({"out": out, **dict(zip(wanted, gradients, strict=True))})


class _Attention(torch.autograd.Function):
    """`attend` of every batch element and KV head: from the projections `[B, S, .]` side by side to out `[B, S, H D]`."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, work: ModuleWork, attend: Attend) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(qkv)
        ctx.work, ctx.attend = work, attend
        return _results(qkv, work, attend, None, ("out",))

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (qkv,) = ctx.saved_tensors
        return _results(qkv, ctx.work, ctx.attend, dout, ("dq", "dk", "dv")), None, None


def _results(qkv: Tensor, work: ModuleWork, attend: Attend, dout: Tensor | None, names: tuple[str, ...]) -> Tensor:
    """These results of all heads, `[B, S, .]` side by side."""
    call = work.spec
    group = call.heads // call.kv_heads
    parts = qkv.unflatten(-1, (-1, call.head_dim)).split((call.heads, call.kv_heads, call.kv_heads), -2)
    inputs = dict(zip("qkv", parts, strict=True))
    if dout is not None:
        inputs["dout"] = dout.unflatten(-1, (-1, call.head_dim))
    batches = []
    for b in range(len(qkv)):
        heads = []
        for h in range(call.kv_heads):
            width = {name: 1 if name in ("k", "v") else group for name in inputs}
            own = {name: x[b, :, h * width[name] : (h + 1) * width[name]].contiguous() for name, x in inputs.items()}
            heads.append(attend(own, h * group))
        batches.append(torch.cat([head[name] for name in names for head in heads], 1))
    return torch.stack(batches).flatten(-2).to(qkv.dtype)
