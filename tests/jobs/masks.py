"""Jobs that compare calls under any mask with fp64, by the mask's boolean matrix."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import attention
from attention.variants.registry import variant
from runner.launch.rank import Rank
from tests.jobs.reference import DTYPES, rel
from tests.support.masks import built


def exact(q: Tensor, k: Tensor, v: Tensor, keep: Tensor, scale: float, dout: Tensor) -> tuple[list[Tensor], Tensor]:
    """[out, dq, dk, dv] and lse in fp64 of `[B, S, H, D]` tensors, where `keep` `[S, S]` says what attends what."""
    with torch.enable_grad():
        leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
        ratio = q.shape[2] // k.shape[2]
        k_, v_ = (x.repeat_interleave(ratio, 2) for x in leaves[1:])
        scores = torch.einsum("bqhd,bkhd->bhqk", leaves[0], k_) * scale
        scores = scores.masked_fill(~keep.to(q.device), -torch.inf)
        lse = scores.logsumexp(-1)
        # a query without keys: exp(-inf - 0) = 0
        shares = (scores - lse.masked_fill(lse == -torch.inf, 0).unsqueeze(-1)).exp()
        out = torch.einsum("bhqk,bkhd->bqhd", shares, v_)
        gradients = torch.autograd.grad(out, leaves, dout.double())
    return [out.detach(), *gradients], lse.detach()


def compare(
    me: Rank,
    name: str,
    options: dict[str, Any],
    masks: list[Any],
    tokens: int,
    batch: int = 2,
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 16,
    packs: list[int] | None = None,
    dtype: str = "fp32",
    kernel: str = "auto",
    transport: str = "auto",
    how: dict[str, Any] | None = None,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """For each mask the relative L2 errors of out, dq, dk and dv against fp64, the largest error of lse, and the bytes
    that each rank received in the forward; or the ValueError's text. masks: see `built`. how: causal and
    window beside the mask."""
    lead = (tokens,) if packs else (batch, tokens)
    generator = torch.Generator().manual_seed(seed)
    shapes = [(*lead, n, head_dim) for n in (heads[0], heads[1], heads[1], heads[0])]
    *whole, dout = (torch.randn(shape, generator=generator).to(me.device, DTYPES[dtype]) for shape in shapes)
    found: list[dict[str, Any]] = []
    for mask in map(built, masks):
        made_for = {"mask": mask, "tokens": tokens} if "mask" in variant(name).options.from_call() else {}
        fn = attention.make(name, kernel=kernel, transport=transport, **options, **made_for)
        shards = [fn.shard(x, packs).requires_grad_() for x in whole]
        given = {"cu_seqlens": packs, "mask": mask, **(how or {})}
        try:
            plan = fn.plan(*shards, **given)
        except ValueError as error:
            found.append({"refused": str(error)})
            continue
        plan.transport.bytes_received.clear()
        out, lse = fn(*shards, **given, return_lse=True)
        received = me.gather(dict(plan.transport.bytes_received))
        gradients = torch.autograd.grad(out, shards, fn.shard(dout, packs))
        ours = [fn.unshard(x, packs) for x in (out, *gradients)]
        ours_lse = fn.unshard(lse.transpose(-1, -2).unsqueeze(-1).contiguous(), packs).squeeze(-1).transpose(-1, -2)
        if me.rank:  # has the same
            continue
        batched = [x[None] if packs else x for x in (*whole, dout)]
        right, right_lse = exact(*batched[:3], plan.problem.mask.dense(tokens), head_dim**-0.5, batched[3])
        pairs = zip([x[None] if packs else x for x in ours], right, strict=True)
        differs = (ours_lse.double() - (right_lse[0] if packs else right_lse)).nan_to_num(
            0, 0, 0
        )  # -inf where both are
        same = torch.equal(ours_lse.isinf(), (right_lse[0] if packs else right_lse).isinf())
        found.append({
            "errors": [rel(a, b) if b.any() else float(a.abs().max()) for a, b in pairs],
            "lse": float(differs.abs().max()) if same else torch.inf,
            "received": received,
            "kernel": plan.kernel.name,
        })  # fmt: skip
    return found
