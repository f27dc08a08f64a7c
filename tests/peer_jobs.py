"""Jobs of the peers' tests."""

from __future__ import annotations

from typing import Any

import torch

import attention
from attention.masks import Mask
from runner.rank import Rank
from tests.jobs import DTYPES, _by_kernel, _call, rel


def compare(
    me: Rank,
    name: str,
    options: dict[str, Any],
    cases: list[dict[str, Any]],
    dtype: str = "fp32",
    kernel: str = "auto",
) -> list[dict[str, Any]]:
    """For each case, the relative L2 errors of out, dq, dk, dv against fp64 (fp32 on a GPU), those of one local call of
    the same kernel, and the kernel. All forwards come before the first backward, as in a model of several layers."""
    fn = attention.make(name, kernel=kernel, **options)
    exactly = torch.float32 if me.device.type == "cuda" else torch.float64
    forwards, found = [], []
    for number, case in enumerate(cases):
        packs = case.get("packs")
        lead = (case["tokens"],) if packs else (case.get("batch", 2), case["tokens"])
        generator = torch.Generator().manual_seed(number)
        heads = (case["heads"], case["kv_heads"], case["kv_heads"], case["heads"])
        whole = [
            torch.randn(*lead, h, case["head_dim"], generator=generator).to(me.device, DTYPES[dtype]) for h in heads
        ]
        shards = [fn.shard(x, packs).requires_grad_() for x in whole[:3]]
        how = {"causal": case["causal"], "cu_seqlens": packs}
        forwards.append((case, whole, shards, fn(*shards, **how), fn.plan(*shards, **how)))
    for case, whole, shards, out, plan in forwards:
        packs = case.get("packs")
        gradients = torch.autograd.grad(out, shards, fn.shard(whole[3], packs))
        call = _call(Mask.of(case["causal"]), packs, case["head_dim"], me.device)
        exact = _by_kernel("math", call, *(x.to(exactly) for x in whole))
        alone = _by_kernel(case.get("local", plan.kernel.name), call, *whole)
        ours = [fn.unshard(x, packs) for x in (out, *gradients)]
        found.append({
            "case": case,
            "errors": [rel(a, b) for a, b in zip(ours, exact, strict=True)],
            "local": [rel(a, b) for a, b in zip(alone, exact, strict=True)],
            "kernel": plan.kernel.name,
        })  # fmt: skip
    return found
