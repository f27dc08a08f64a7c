"""The comparison of multi-head dilated attention with the chain of its definitions around `dilated.reference`."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from attention.kernels import Call
from runner.check import dilated, pieces, whole_model
from runner.check.comparison import FP64_TFLOP, HALF
from runner.check.errors import Compared
from runner.config.experiment import Experiment
from runner.launch.rank import Rank
from runner.measure.module_work import ModuleWork, named

Attend = Callable[[dict[str, Tensor], int], dict[str, Tensor]]  # of a KV head's inputs, from a query head on


def compare(
    me: Rank, experiment: Experiment, work: ModuleWork, outputs: dict[str, Tensor], with_scales: bool
) -> Compared:
    """The comparison (`gate.Compare`) of the module. Every rank compares all that it computed."""
    affordable = FP64_TFLOP[experiment.device] / (10 if experiment.workload.dtype in HALF else 1)
    dtype = torch.float64 if pieces.tflop(experiment) <= affordable else torch.float32
    me.say("check_reference")
    call, dilation = experiment.workload, experiment.dilation
    assert dilation is not None
    scores = pieces.scores_held(experiment, me.device, dtype)

    def exact(inputs: dict[str, Tensor], head: int) -> dict[str, Tensor]:
        return dilated.reference(inputs, head, call, dilation, dtype, scores).values

    def local(inputs: dict[str, Tensor], head: int) -> dict[str, Tensor]:
        return dilated.local(inputs, head, call, dilation, work.plan.kernel.name, Call(call.scale_of_scores))

    there = (chain(work, dtype, exact), chain(work, work.x.dtype, local))
    me.say("check_compare")
    found = whole_model.verdict(experiment, outputs, ("fp64" if dtype == torch.float64 else "fp32", *there))
    everyone = me.gather(found["why"])
    why = "; ".join(dict.fromkeys(filter(None, everyone))) or None
    about = {"passed": why is None, "why": why, "kernel": work.plan.kernel.name, "checked_share": 1.0}
    limits = {name: whole_model.tolerance(experiment, None) for name in outputs}
    scales = {name: torch.ones(x.shape[:-1]) for name, x in outputs.items()} if with_scales else {}
    return Compared(found | about, scales, limits)


def chain(work: ModuleWork, dtype: torch.dtype, attend: Attend) -> dict[str, Tensor]:
    """The outputs of the module in `dtype`, one part after another, with `attend` for its attention."""
    call, module = work.spec, work.module
    before, norm, after = (deepcopy(x).to(dtype) for x in (module.qkv, module.norm, module.out))
    x = work.x.detach().to(dtype).requires_grad_(work.backward)
    qkv = before(x)
    sizes = (call.heads, call.kv_heads, call.kv_heads)
    parts = [y.detach() for y in qkv.unflatten(-1, (-1, call.head_dim)).split(sizes, -2)]
    given = dict(zip("qkv", parts, strict=True))
    inner = _of_heads(given, attend)["out"].to(dtype).flatten(-2).requires_grad_(work.backward)
    out = after(norm(inner))
    if work.dout is None:
        return named({"out": out})
    wanted: dict[str, Any] = {f"dnorm.{n}": p for n, p in norm.named_parameters()} | {
        f"dout.{n}": p for n, p in after.named_parameters()
    }
    dinner, *grads = torch.autograd.grad(out, [inner, *wanted.values()], work.dout.to(dtype))
    found = {"out": out, **dict(zip(wanted, grads, strict=True))}
    own = _of_heads(given | {"dout": dinner.unflatten(-1, (-1, call.head_dim))}, attend)
    dqkv = torch.cat([own[name].to(dtype) for name in ("dq", "dk", "dv")], -2).flatten(-2)
    wanted = {"dx": x} | {f"dqkv.{n}": p for n, p in before.named_parameters()}
    return named(found | dict(zip(wanted, torch.autograd.grad(qkv, [*wanted.values()], dqkv), strict=True)))


def _of_heads(inputs: dict[str, Tensor], attend: Attend) -> dict[str, Tensor]:
    """`attend` of every batch element and KV head of `[B, S, ., D]`."""
    kv_heads = inputs["k"].shape[2]
    group = inputs["q"].shape[2] // kv_heads
    batches = []
    for b in range(len(inputs["q"])):
        heads = []
        for h in range(kv_heads):
            width = {name: 1 if name in ("k", "v") else group for name in inputs}
            mine = {name: x[b, :, h * width[name] : (h + 1) * width[name]].contiguous() for name, x in inputs.items()}
            heads.append(attend(mine, h * group))
        batches.append(
            {x: torch.cat([each[x] for each in heads], 1) for x in ("out", "dq", "dk", "dv") if x in heads[0]}
        )
    return {name: torch.stack([each[name] for each in batches]) for name in batches[0]}
