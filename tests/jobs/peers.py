"""Jobs for the adapters of peers."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch

from runner.launch.rank import Rank
from runner.peers import function
from tests.jobs.reference import drawn, rel
from tests.support.cases import Case, whole, wrong


def judged(
    me: Rank, name: str, options: dict[str, Any], cases: list[dict[str, Any]], kernel: str = "auto"
) -> list[tuple[str, str | None]]:
    """For each case the kernel, and what is wrong with out or a gradient. All forwards run before the first backward, as in a
    model of several layers."""
    fn, forwards = function.make(name, kernel=kernel, **options), []
    for case in (Case(name, me.world, **each) for each in cases):
        *qkv, dout = (fn.shard(x.to(me.device), case.cu_seqlens) for x in whole(case).values())
        shards, how = [x.requires_grad_() for x in qkv], {"causal": case.causal, "cu_seqlens": case.cu_seqlens}
        forwards.append((case, shards, dout, fn(*shards, **how), fn.plan(*shards, **how).kernel.name))
    found = []
    for case, shards, dout, out, runs in forwards:
        results = [fn.unshard(x, case.cu_seqlens) for x in (out, *torch.autograd.grad(out, shards, dout))]
        found.append((runs, wrong(case, dict(zip(("out", "dq", "dk", "dv"), results, strict=True)))))
    return found


def kernels_seen(me: Rank, name: str) -> list[list[str]]:
    """The kernels of two forwards, then those of the second function's backward and of the first's."""
    seen: list[str] = []

    def watched(kernel: Any, what: str) -> Any:
        def call(*arguments: Any, **others: Any) -> Any:
            seen.append(kernel.name)
            return getattr(kernel, what)(*arguments, **others)

        return call

    (x,) = drawn(me, (1, 8 * me.world, 4, 16), dtype=torch.bfloat16)
    found, outs = [], []
    for kernel in ("sdpa_flash", "math"):
        fn = function.make(name, kernel=kernel)
        shards = [fn.shard(x).requires_grad_() for _ in range(3)]
        plan = fn.plan(*shards, causal=True)
        spy = copy.copy(plan.kernel)
        spy.forward, spy.backward = watched(plan.kernel, "forward"), watched(plan.kernel, "backward")
        fn.plans.update({key: replace(plan, kernel=spy) for key in fn.plans})
        outs.append(fn(*shards, causal=True))
        found.append(sorted(set(seen)))
        seen.clear()
    for out in reversed(outs):
        out.float().sum().backward()
        found.append(sorted(set(seen)))
        seen.clear()
    return found


def flex_forward(me: Rank, causal: bool) -> float:
    """The relative error of the forward of PyTorch's FlexAttention over the ranks, which needs no GPU, from ours."""
    from attention.api import make
    from runner.peers import torch_flex_cp

    torch.manual_seed(0)
    fn = make("zigzag" if causal else "ring", kernel="math")
    q, k, v = (fn.shard(torch.randn(2, 256 * me.world, n, 32)) for n in (4, 2, 2))
    out = torch_flex_cp.attend(q, k, v, fn.plan(q, k, v, causal=causal, scale=0.3), None)
    return rel(out, fn(q, k, v, causal=causal, scale=0.3))
