"""Dilated attention by its definition: boolean masks by head, dense, in the dtype of the inputs, differentiable by autograd. It
shares no code with the library."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor


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
    outs, lses = [], []
    for h in range(heads):
        found = []
        for segment, rate, offset in pairs_of_head(h, heads, segments, rates, mixing):
            scores = q[:, :, h] @ k[:, :, h // group].mT * q.shape[-1] ** -0.5
            scores = softcap * torch.tanh(scores / softcap) if softcap else scores
            scores = scores.masked_fill(~seen(cu_seqlens, segment, rate, offset, causal).to(q.device), -torch.inf)
            lse = torch.logsumexp(scores, -1)
            share = (scores - _finite(lse).unsqueeze(-1)).exp()
            found.append((share @ v[:, :, h // group], lse))
        each = [lse for _, lse in found]
        if sinks is not None:
            each.append(sinks[h].expand_as(each[0]))
        total = torch.logsumexp(torch.stack(each), 0)
        shares = [(lse - _finite(total)).exp() for _, lse in found]
        if weights == "detached":
            shares = [x.detach() for x in shares]
        out = sum(share.unsqueeze(-1) * out for share, (out, _) in zip(shares, found, strict=True))
        outs.append(out / (len(segments) if mixing == "head_groups" else 1))
        lses.append(total)
    return torch.stack(outs, 2), torch.stack(lses, 1).detach()


def _finite(lse: Tensor) -> Tensor:
    return lse.masked_fill(lse == -torch.inf, 0)
