"""`math`: plain softmax attention in fp32 (fp64 for fp64), in chunks of queries, so that no S by S matrix is ever held.
It does every call on every device. The correctness references are this kernel on upcast inputs."""

from __future__ import annotations

import torch
from torch import Tensor

from attention.dtypes import accumulation_dtype
from attention.kernels import decompose
from attention.kernels.interface import Call, Pair, Shape, Triple
from attention.masks.band import Band, Interval, tile

SCORES = 1 << 26  # at most so many scores are held at once: 256 MiB in fp32


class Math(decompose.Decomposed):
    name = "math"
    summary = "plain softmax in fp32 or fp64, in chunks of queries: the reference"
    align = 1
    features = frozenset({"softcap", "v_head_dim"})

    def __init__(self, scores: int | None = None):
        """scores: the most scores held at once; more of them need fewer launches."""
        self.scores = scores or SCORES

    def missing(self, device: str) -> str | None:
        return None

    def refuses(self, shape: Shape, mask: Band) -> str | None:
        return None

    def rectangle(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Pair:
        q_, k_, v_ = _grouped(q, k), _heads_first(k), _heads_first(v)  # [B, Hk, G, S, D], [B, Hk, S, D]
        out = q_.new_zeros((*q_.shape[:-1], v.shape[-1]))
        lse = torch.full(q_.shape[:-1], -torch.inf, dtype=q_.dtype, device=q.device)
        for (a, b), (c, d), band in _chunks(q_, k_, call.mask, self.scores):
            s = _scores(q_, k_, (a, b), (c, d), call, band)
            part = s.logsumexp(-1)
            out[..., a:b, :] = torch.einsum("bhgqk,bhkd->bhgqd", (s - part.unsqueeze(-1)).exp_(), v_[:, :, c:d])
            lse[..., a:b] = part
        return _ungrouped(out).to(q.dtype), lse.flatten(1, 2)

    def rectangle_backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: Call
    ) -> Triple:
        q_, k_, v_ = _grouped(q, k), _heads_first(k), _heads_first(v)
        dout_, out_ = _grouped(dout, k), _grouped(out, k)
        delta = (dout_ * out_).sum(-1)
        lse_ = lse.to(q_.dtype).unflatten(1, (k.shape[2], -1))
        dq, dk, dv = torch.zeros_like(q_), torch.zeros_like(k_), torch.zeros_like(v_)
        for (a, b), (c, d), band in _chunks(q_, k_, call.mask, self.scores):
            s = _scores(q_, k_, (a, b), (c, d), call, band)
            slope = None if call.softcap is None else _slope(s, call.softcap)
            p = s.sub_(lse_[..., a:b].unsqueeze(-1)).exp_()
            dv[:, :, c:d] += torch.einsum("bhgqk,bhgqd->bhkd", p, dout_[..., a:b, :])
            dp = torch.einsum("bhgqd,bhkd->bhgqk", dout_[..., a:b, :], v_[:, :, c:d])
            ds = dp.sub_(delta[..., a:b].unsqueeze(-1)).mul_(p).mul_(call.scale)
            if slope is not None:
                ds.mul_(slope)
            dq[..., a:b, :] = torch.einsum("bhgqk,bhkd->bhgqd", ds, k_[:, :, c:d])
            dk[:, :, c:d] += torch.einsum("bhgqk,bhgqd->bhkd", ds, q_[..., a:b, :])
        return _ungrouped(dq).to(q.dtype), dk.transpose(1, 2).to(k.dtype), dv.transpose(1, 2).to(v.dtype)


PLAIN = Math()


def _heads_first(x: Tensor) -> Tensor:
    """`[B, S, H, D]` as `[B, H, S, D]`, in the accumulation dtype."""
    return x.transpose(1, 2).to(accumulation_dtype(x.dtype))


def _grouped(q: Tensor, k: Tensor) -> Tensor:
    """`[B, S, H, D]` as `[B, Hk, H / Hk, S, D]`, in the accumulation dtype."""
    return _heads_first(q).unflatten(1, (k.shape[2], -1))


def _ungrouped(x: Tensor) -> Tensor:
    return x.flatten(1, 2).transpose(1, 2)


def _chunks(q: Tensor, k: Tensor, mask: Band, scores: int) -> list[tuple[Interval, Interval, Band]]:
    """(queries, keys, mask) of each chunk; at least one query, else at most `scores` scores."""
    sq, sk = q.shape[-2], k.shape[-2]
    rows = max(1, scores // max(1, q.shape[0] * q.shape[1] * q.shape[2] * sk))
    shift = sk - sq
    found = []
    for start in range(0, sq, rows):
        piece = tile(mask, (start + shift, min(start + rows, sq) + shift), (0, sk))
        if piece is not None:
            (a, b), keys, band = piece
            found.append(((a - shift, b - shift), keys, band))
    return found


def _scores(q: Tensor, k: Tensor, rows: Interval, keys: Interval, call: Call, mask: Band) -> Tensor:
    s = torch.einsum("bhgqd,bhkd->bhgqk", q[..., rows[0] : rows[1], :], k[:, :, keys[0] : keys[1]]).mul_(call.scale)
    if call.softcap is not None:
        s.div_(call.softcap).tanh_().mul_(call.softcap)
    if not mask.full:
        keep = decompose.band_matrix(mask, rows[1] - rows[0], keys[1] - keys[0], q.device)
        s.masked_fill_(~keep, -torch.inf)
    return s


def _slope(s: Tensor, softcap: float) -> Tensor:
    """The derivative of capped scores by the scores before: `1 - tanh^2`, 0 for a masked pair."""
    return 1 - (s / softcap).clamp_(-1, 1).square_()
