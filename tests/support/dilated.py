"""Dilated attention by its definition: boolean masks by head, dense, in the dtype of the inputs, differentiable by autograd. It
shares no code with the library."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from tests.support.naive import attention


def pairs_of_head(h: int, heads: int, segments: Sequence[int], rates: Sequence[int], mixing: str) -> list[list[int]]:
    """[segment, rate, offset] of each pair that a head computes."""
    n = len(segments)
    if mixing == "longnet":
        return [[segments[i], rates[i], h % rates[i]] for i in range(n)]
    sizes = [heads // n + (i < heads % n) for i in range(n)]
    (i,) = (i for i in range(n) if sum(sizes[:i]) <= h < sum(sizes[: i + 1]))
    return [[segments[i], rates[i], i % rates[i]]]


def seen(cu_seqlens: Sequence[int], segment: int, rate: int, offset: int, causal: bool) -> Tensor:
    """Which keys each query sees, bool `[S, S]`."""
    total = cu_seqlens[-1]
    mask = torch.zeros(total, total, dtype=torch.bool)
    for a, b in pairwise(cu_seqlens):
        for start in range(a, b, segment):
            tokens = torch.tensor([*range(start + offset, min(start + segment, b), rate)], dtype=torch.int64)
            mask[tokens.unsqueeze(1), tokens] = True
    return mask.tril() if causal else mask


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segments: Sequence[int],
    rates: Sequence[int],
    mixing: str,
    weights: str = "joint",
    causal: bool = True,
    cu_seqlens: Sequence[int] | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """(out `[B, S, H, Dv]`, lse `[B, H, S]`) of q `[B, S, H, D]`, k and v `[B, S, Hk, .]`; sinks `[H]`."""
    heads, group = q.shape[2], q.shape[2] // k.shape[2]
    cu_seqlens = cu_seqlens or [0, q.shape[1]]
    outs, totals = [], []
    for h in range(heads):
        head = [x[:, :, i : i + 1] for x, i in ((q, h), (k, h // group), (v, h // group))]
        keeps = [seen(cu_seqlens, *pair, causal) for pair in pairs_of_head(h, heads, segments, rates, mixing)]
        found = [attention(*head, q.shape[-1] ** -0.5, keep.to(q.device), softcap) for keep in keeps]
        lses = [lse for _, lse in found]
        total = torch.logsumexp(torch.stack(lses if sinks is None else [*lses, sinks[h].expand_as(lses[0])]), 0)
        shares = [(lse - total.masked_fill(total == -torch.inf, 0)).exp() for lse in lses]
        if weights == "detached":
            shares = [x.detach() for x in shares]
        out = sum(x.transpose(1, 2).unsqueeze(-1) * out for x, (out, _) in zip(shares, found, strict=True))
        outs.append(out / (len(segments) if mixing == "head_groups" else 1))
        totals.append(total)
    return torch.cat(outs, 2), torch.cat(totals, 1).detach()
