"""Jobs that compare a call with another way to make the same call."""

from __future__ import annotations

from typing import Any

import torch

import attention
from attention.masks.band import Band
from runner.launch.rank import Rank
from tests.jobs.reference import drawn, exact


def round_trip(me: Rank, names: list[str], tokens: int) -> list[bool]:
    """For each variant, whether unshard(shard(x)) == x for token ids, and whether its gradient is right. That it holds for tensors of
    heads, packed ones too, is part of each judged call."""
    results = []
    for name in names:
        fn = attention.make(name)
        ids = torch.arange(2 * tokens, device=me.device).view(2, tokens)
        x = ids[..., None, None].expand(2, tokens, 3, 4).float()
        local = fn.shard(x).requires_grad_()
        (gradient,) = torch.autograd.grad(fn.unshard(local), local, x)
        results.append(torch.equal(gradient, local) and torch.equal(fn.unshard(fn.shard(ids)), ids))
    return results


def bitwise(me: Rank, name: str, kernel: str, transport: str) -> bool:
    """Whether out and gradients have the same bits in five calls with deterministic=True."""
    fn = attention.make(name, kernel=kernel, transport=transport, deterministic=True)
    whole = drawn(me, *((1, 512 * me.world, heads, 64) for heads in (8, 2, 2)), dtype=torch.bfloat16)
    q, k, v = (fn.shard(x).requires_grad_() for x in whole)
    first: list[torch.Tensor] = []
    same = True
    for _ in range(5):
        out = fn(q, k, v, causal=True)
        results = [out, *torch.autograd.grad(out.square().sum(), (q, k, v))]
        first = first or results
        same &= all(torch.equal(a, b) for a, b in zip(results, first, strict=True))
    return all(me.gather(same))


def growing(
    me: Rank, name: str, options: dict[str, Any], transport: str, most: int, window: tuple[int, int]
) -> dict[str, Any]:
    """A decode whose keys grow one by one and shrink again: the largest error of out, and how many plans are kept."""
    fn = attention.make(name, transport=transport, **options)
    q, k, v = drawn(me, (2, 2, 4, 32), *[(2, most, 2, 32)] * 2)
    errors = []
    for n in (*range(1, most + 1), *range(most, 0, -1)):
        local = [q, *(fn.shard(x[:, :n], role="kv") for x in (k, v))]
        out = fn(*local, kv_tokens=n, window=window)
        errors.append(float((out - exact(q, k[:, :n], v[:, :n], Band.of(window=tuple(window)))).abs().max()))
    return {"error": max(me.gather(max(errors))), "kept": len(fn.plans)}
