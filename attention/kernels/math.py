"""`math`: plain softmax attention in fp32 (fp64 for fp64), in chunks of queries, so that no S by S matrix is ever held.
It does every call on every device. The correctness references are this kernel on upcast inputs."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from attention.dtypes import accumulation_dtype
from attention.kernels import decompose
from attention.kernels.interface import Call, Kernel, Pair, Shape, Tensors, Triple
from attention.masks.band import Band, tile

SCORES = 1 << 26  # at most so many scores are held at once: 256 MiB in fp32


class Math(Kernel):
    name = "math"
    summary = "plain softmax in fp32 or fp64, in chunks of queries: the reference"
    align = 1
    features = frozenset({"softcap", "v_head_dim"})
    only_squares = True
    on_cpu = True

    def refuses(self, shape: Shape, mask: Band) -> str | None:
        return None

    def attend(self, tensors: Tensors, call: Call) -> Pair:
        q, k, v = tensors
        q_, k_, v_ = _grouped(q, k), _heads_first(k), _heads_first(v)  # [B, Hk, G, S, D], [B, Hk, S, D]
        out = q_.new_zeros((*q_.shape[:-1], v.shape[-1]))
        lse = torch.full(q_.shape[:-1], -torch.inf, dtype=q_.dtype, device=q.device)
        for rows, keys, s in _scores(q_, k_, call):
            part = s.logsumexp(-1)
            out[..., rows, :] = torch.einsum("bhgqk,bhkd->bhgqd", (s - part.unsqueeze(-1)).exp_(), v_[:, :, keys])
            lse[..., rows] = part
        return out.flatten(1, 2).transpose(1, 2).to(q.dtype), lse.flatten(1, 2)

    def gradients(self, tensors: Tensors, call: Call) -> Triple:
        dout, q, k, v, out, lse = tensors
        q_, k_, v_, dout_ = _grouped(q, k), _heads_first(k), _heads_first(v), _grouped(dout, k)
        delta = (dout_ * _grouped(out, k)).sum(-1)
        lse = lse.to(q_.dtype).unflatten(1, (k.shape[2], -1))
        dq, dk, dv = torch.zeros_like(q_), torch.zeros_like(k_), torch.zeros_like(v_)
        for rows, keys, s in _scores(q_, k_, call):
            slope = None if call.softcap is None else _slope(s, call.softcap)
            p, dout_rows = s.sub_(lse[..., rows].unsqueeze(-1)).exp_(), dout_[..., rows, :]
            dv[:, :, keys] += torch.einsum("bhgqk,bhgqd->bhkd", p, dout_rows)
            dp = torch.einsum("bhgqd,bhkd->bhgqk", dout_rows, v_[:, :, keys])
            ds = dp.sub_(delta[..., rows].unsqueeze(-1)).mul_(p).mul_(call.scale)
            if slope is not None:
                ds.mul_(slope)
            dq[..., rows, :] = torch.einsum("bhgqk,bhkd->bhgqd", ds, k_[:, :, keys])
            dk[:, :, keys] += torch.einsum("bhgqk,bhgqd->bhkd", ds, q_[..., rows, :])
        return (
            dq.flatten(1, 2).transpose(1, 2).to(q.dtype),
            dk.transpose(1, 2).to(k.dtype),
            dv.transpose(1, 2).to(v.dtype),
        )


MATH = Math()


def _heads_first(x: Tensor) -> Tensor:
    """`[B, S, H, D]` as `[B, H, S, D]`, in the accumulation dtype."""
    return x.transpose(1, 2).to(accumulation_dtype(x.dtype))


def _grouped(q: Tensor, k: Tensor) -> Tensor:
    """`[B, S, H, D]` as `[B, Hk, H / Hk, S, D]`, in the accumulation dtype."""
    return _heads_first(q).unflatten(1, (k.shape[2], -1))


def _scores(q: Tensor, k: Tensor, call: Call) -> Iterator[tuple[slice, slice, Tensor]]:
    """(queries, keys, their scores) of each chunk: at least one query, else at most `SCORES` scores."""
    sq, sk = q.shape[-2], k.shape[-2]
    chunk, shift = max(1, SCORES // (q.shape[:-2].numel() * sk)), sk - sq
    for start in range(0, sq, chunk):
        piece = tile(call.mask, (start + shift, min(start + chunk, sq) + shift), (0, sk))
        if piece:
            (a, b), (c, d), band = piece
            rows, keys = slice(a - shift, b - shift), slice(c, d)
            s = torch.einsum("bhgqd,bhkd->bhgqk", q[..., rows, :], k[:, :, keys]).mul_(call.scale)
            if call.softcap is not None:
                s.div_(call.softcap).tanh_().mul_(call.softcap)
            if not band.full:
                s.masked_fill_(~decompose.band_matrix(band, b - a, d - c, q.device), -torch.inf)
            yield rows, keys, s


def _slope(s: Tensor, softcap: float) -> Tensor:
    """The derivative of capped scores by the scores before: `1 - tanh^2`, 0 for a masked pair."""
    return 1 - (s / softcap).clamp_(-1, 1).square_()
