"""Attention sinks: a learned logit per head that enters only the softmax's denominator. Applied once, after all merging:
`lse' = logaddexp(lse, s)`, `out' = out * exp(lse - lse')`. The backward of attention takes out' and lse' as the final out and
lse, and is otherwise unchanged; `ds = -sum_i exp(s - lse'_i) (dout_i . out'_i)` over this rank's queries. A sink of -inf means
no sink: a query that sees no key has lse' = -inf, and adds 0.

Source: Efficient Streaming Language Models with Attention Sinks (Xiao et al., 2023); a learned logit as in gpt-oss (OpenAI,
2025)."""

from __future__ import annotations

import torch
from torch import Tensor

from attention.dtypes import accumulation_dtype

SAVED = 5  # tensors that an executor saves for its backward, sinks not counted: q, k, v, out, lse


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """(out', lse'), in place. out: `[B, S, H, D]` or `[T, H, D]`; lse: `[B, H, S]` or `[H, T]`; sinks: `[H]`, or None for none.
    For a query that sees no key, out' is 0 and lse' is its sink."""
    if sinks is None or not out.numel():
        return out, lse
    if out.is_cuda:
        from attention.ops.merge import apply_sinks

        apply_sinks(out, lse, sinks)
        return out, lse
    total = torch.logaddexp(lse, sinks.to(lse.dtype).unsqueeze(-1))
    share = (lse - total.masked_fill(total == -torch.inf, 0)).exp()
    out.copy_(out * share.transpose(-1, -2).unsqueeze(-1))
    lse.copy_(total)
    return out, lse


def saved_with(sinks: Tensor | None, *saved: Tensor) -> tuple[Tensor, ...]:
    """What a backward needs, with the sinks at the end if there are any."""
    return saved if sinks is None else (*saved, sinks)


def sinks_gradients(dout: Tensor, saved: tuple[Tensor, ...]) -> list[Tensor]:
    """The gradient of the sinks `[H]` from the queries of `saved`, in their dtype; empty without sinks."""
    if len(saved) == SAVED:
        return []
    out, lse, sinks = saved[3:]
    if not out.numel():
        return [torch.zeros_like(sinks)]
    if out.is_cuda and out.dtype != torch.float64:
        from attention.ops.merge import sinks_gradient

        return [sinks_gradient(dout, out, lse, sinks)]
    dtype = accumulation_dtype(out.dtype)
    share = (sinks.to(lse.dtype).unsqueeze(-1) - lse).exp().masked_fill(lse == -torch.inf, 0)
    gradient = -(share * (dout.to(dtype) * out.to(dtype)).sum(-1).transpose(-1, -2)).sum(-1)
    return [(gradient.sum(0) if gradient.dim() == 2 else gradient).to(sinks.dtype)]
