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


def exact(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keep: Tensor,
    scale: float,
    dout: Tensor,
    sinks: Tensor | None = None,
    softcap: float | None = None,
) -> tuple[list[Tensor], Tensor]:
    """[out, dq, dk, dv, and with sinks theirs] and lse in fp64 of `[B, S, H, D]` tensors, where `keep` `[S, S]` says what
    attends what."""
    with torch.enable_grad():
        leaves = [x.detach().double().requires_grad_() for x in (q, k, v, sinks) if x is not None]
        ratio = q.shape[2] // k.shape[2]
        k_, v_ = (x.repeat_interleave(ratio, 2) for x in leaves[1:3])
        scores = torch.einsum("bqhd,bkhd->bhqk", leaves[0], k_) * scale
        scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(~keep.to(q.device), -torch.inf)
        lse = scores.logsumexp(-1)
        if sinks is not None:
            lse = torch.logaddexp(lse, leaves[3][:, None].expand_as(lse))
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
    v_head_dim: int | None = None,
    softcap: float | None = None,
    sinks: bool = False,
) -> list[dict[str, Any]]:
    """For each mask the relative L2 errors of out, dq, dk and dv against fp64, the largest error of lse, and the bytes
    that each rank received in the forward; or the ValueError's text. masks: see `built`. how: causal and
    window beside the mask."""
    lead = (tokens,) if packs else (batch, tokens)
    generator = torch.Generator().manual_seed(seed)
    value_dim = v_head_dim or head_dim
    dims = ((heads[0], head_dim), (heads[1], head_dim), (heads[1], value_dim), (heads[0], value_dim))
    shapes = [(*lead, *each) for each in dims]
    logits = torch.randn(heads[0], generator=generator).to(me.device) if sinks else None
    *whole, dout = (torch.randn(shape, generator=generator).to(me.device, DTYPES[dtype]) for shape in shapes)
    found: list[dict[str, Any]] = []
    for mask in map(built, masks):
        made_for = {"mask": mask, "tokens": tokens} if "mask" in variant(name).options.from_call else {}
        fn = attention.make(name, kernel=kernel, transport=transport, **options, **made_for)
        shards = [fn.shard(x, packs).requires_grad_() for x in whole]
        mine = [] if logits is None else [logits.detach().requires_grad_()]
        given = {"mask": mask, "softcap": softcap, "sinks": mine[0] if mine else None} | (how or {})
        try:
            plan = fn.plan(*shards, cu_seqlens=packs, **given)
        except ValueError as error:
            found.append({"refused": str(error)})
            continue
        plan.transport.bytes_received.clear()
        out, lse = fn(*shards, cu_seqlens=packs, **given, return_lse=True)
        received = me.gather(dict(plan.transport.bytes_received))
        gradients = torch.autograd.grad(out, [*shards, *mine], fn.shard(dout, packs))
        ours, ours_lse = _whole(me, fn, out, lse, gradients, packs)
        if me.rank:  # has the same
            continue
        batched = [x[None] if packs else x for x in (*whole, dout)]
        right, right_lse = exact(
            *batched[:3], plan.problem.mask.dense(tokens), head_dim**-0.5, batched[3], logits, softcap
        )
        found.append({
            "errors": [rel(a, b) if b.any() else float(a.abs().max()) for a, b in zip(ours, right, strict=True)],
            "lse": _lse_error(ours_lse, right_lse[0] if packs else right_lse),
            "received": received,
            "kernel": plan.kernel.name,
        })  # fmt: skip
    return found


def _whole(
    me: Rank, fn: Any, out: Tensor, lse: Tensor, gradients: tuple[Tensor, ...], packs: list[int] | None
) -> tuple[list[Tensor], Tensor]:
    """[out, dq, dk, dv, and with sinks theirs] of all ranks, a packed batch as a batch of one, and the LSE."""
    dsinks = [torch.tensor(me.gather(x.tolist()), device=me.device).sum(0) for x in gradients[3:]]
    if fn.layout.replicated or fn.variant.decode:  # every rank has the whole
        dsinks = [x / me.world for x in dsinks]
    ours = [fn.unshard(x, packs) for x in (out, *gradients[:3])]
    ours_lse = fn.unshard(lse.transpose(-1, -2).unsqueeze(-1).contiguous(), packs).squeeze(-1).transpose(-1, -2)
    return [*(x[None] if packs else x for x in ours), *dsinks], ours_lse


def _lse_error(ours: Tensor, right: Tensor) -> float:
    """The largest error, infinite where not the same queries have no keys."""
    differs = (ours.double() - right).nan_to_num(0, 0, 0)  # -inf where both are
    return float(differs.abs().max()) if torch.equal(ours.isinf(), right.isinf()) else torch.inf
