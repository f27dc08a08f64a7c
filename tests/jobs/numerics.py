"""Jobs that compare a call with another way to make the same call."""

from __future__ import annotations

from typing import Any

import torch

import attention
from attention.masks.band import Band
from attention.variants.registry import VARIANTS
from runner.launch.rank import Rank
from tests.jobs.reference import exact


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
    generator = torch.Generator().manual_seed(0)
    dtype = torch.bfloat16 if me.device.type == "cuda" else torch.float32
    shapes = ((8, 64), (2, 64), (2, 64))
    q, k, v = (
        fn.shard(torch.randn(1, 512 * me.world, *s, generator=generator).to(me.device, dtype)).requires_grad_()
        for s in shapes
    )
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
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, n, h, 32, generator=generator).to(me.device) for n, h in ((2, 4), (most, 2), (most, 2)))
    errors = []
    for n in (*range(1, most + 1), *range(most, 0, -1)):
        local = [q, *(fn.shard(x[:, :n], role="kv") for x in (k, v))]
        out = fn(*local, kv_tokens=n, window=window)
        errors.append(float((out - exact(q, k[:, :n], v[:, :n], Band.of(window=tuple(window)))[0]).abs().max()))
    return {"error": max(me.gather(max(errors))), "kept": len(fn.plans)}


def under_autocast(me: Rank, names: list[str]) -> list[list[Any]]:
    """Whether each variant gives the same bits under autocast."""
    results = []
    for name in names:
        fn = attention.make(name, kernel="math")
        torch.manual_seed(0)
        *qkv, dout = (torch.randn(2, 16, h, 16) for h in (4, 2, 2, 4))
        plain = _called(fn, qkv, dout)
        with torch.autocast("cpu", torch.bfloat16):
            cast = _called(fn, qkv, dout)
        results.append([name, all(me.gather(all(map(torch.equal, plain, cast))))])
    return results


def _called(fn: Any, qkv: list[torch.Tensor], dout: torch.Tensor) -> list[torch.Tensor]:
    """(out, lse, dq, dk, dv) of a causal call, or (out, lse) of a decode."""
    if VARIANTS[fn.variant.name].decode:
        return list(fn(*qkv, return_lse=True))
    qkv = [x.detach().requires_grad_() for x in qkv]
    out, lse = fn(*qkv, causal=True, return_lse=True)
    return [out, lse, *torch.autograd.grad(out, qkv, dout)]


def phase_names(me: Rank, name: str, options: dict[str, Any]) -> list[str]:
    """What a call records; of a decode, without a backward."""
    from attention.profiling import Recorder, recording

    fn = attention.make(name, **options)
    decode = fn.variant.decode
    sizes = ((2 if decode else 16 * me.world, "q"), (16 * me.world, "kv"), (16 * me.world, "kv"))
    q, k, v = (fn.shard(torch.randn(1, n, 4, 16), role=role).requires_grad_(not decode) for n, role in sizes)
    with recording(Recorder(me.device)) as recorder:
        out = fn(q, k, v, **({"kv_tokens": 16 * me.world} if decode else {"causal": True}))
        if not decode:
            out.sum().backward()
    return sorted({span.name for span in recorder.spans})
