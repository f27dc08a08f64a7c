"""Every call, made of calls that do one dense rectangle only (full, causal and square, or with a small explicit mask).

Packed batches go sequence by sequence. A rectangular causal mask is split into a full and a square part. Windows go in
chunks of queries. Parts over the same queries are merged by their LSEs. The backward takes each part's gradients with
the final out and lse, so they add up to the exact gradients of the whole."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from attention.kernels.interface import Call, Into, Kernel, Pair, Triple, batch_of_one, settle
from attention.masks.band import CAUSAL, FULL, Band, Interval, tile
from attention.reduction.grad_sum import Sum
from attention.reduction.lse_merge import Accumulator
from attention.tensors import result_like, take

WINDOW_CHUNK = 512  # queries per part of a window, whose explicit mask is [512, 512 + window]

Part = tuple[Interval, Interval, Band]


class Decomposed(Kernel):
    """A kernel whose every call is made of its own rectangles. A rectangle's mask is full, causal with Sq == Sk, or (unless the
    kernel refuses windows) a band over a small rectangle. Shapes as in a dense `Call`."""

    def rectangle(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Pair:
        raise NotImplementedError

    def rectangle_backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: Call
    ) -> Triple:
        raise NotImplementedError

    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call, into: Pair | None) -> Pair:
        if q.dim() == 3:
            return batch_of_one(self.attend, (q, k, v), call, into)
        if _whole(call, q, k):
            return settle(self.rectangle(q, k, v, call), into)
        pieces = _pieces(call, q, k)
        total = Accumulator(result_like(q, v), [(rows,) for rows, _, _ in pieces], into)
        for rows, keys, mask in pieces:
            total.add(*self.rectangle(take(q, (rows,)), take(k, (keys,)), take(v, (keys,)), call.under(mask)))
        return total.result()

    def gradients(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: Call, into: Into
    ) -> Triple:
        if q.dim() == 3:
            return batch_of_one(self.gradients, (dout, q, k, v, out, lse), call, into)
        if _whole(call, q, k):
            return settle(self.rectangle_backward(dout, q, k, v, out, lse, call), into)
        pieces = _pieces(call, q, k)
        queries = Sum([q], [(rows,) for rows, _, _ in pieces], into and into[:1])
        keys_and_values = Sum([k, v], [(keys,) for _, keys, _ in pieces], into and into[1:])
        for rows, keys, mask in pieces:
            of_queries, of_keys = (partial(take, intervals=(interval,)) for interval in (rows, keys))
            dq, dk, dv = self.rectangle_backward(
                of_queries(dout),
                of_queries(q),
                of_keys(k),
                of_keys(v),
                of_queries(out),
                of_queries(lse, dim=-1),
                call.under(mask),
            )
            queries.add(dq)
            keys_and_values.add(dk, dv)
        return *queries.result(), *keys_and_values.result()  # type: ignore[return-value]


def parts(mask: Band, sq: int, sk: int) -> list[Part]:
    """Disjoint rectangles (queries, keys, mask) that cover the pairs of the mask; each is full, causal and square, or a
    band."""
    if sq == 0 or sk == 0:
        return []
    if mask.full:
        return [((0, sq), (0, sk), FULL)]
    if mask.causal:
        shift = sk - sq
        if shift < 0:  # the first rows see nothing
            return [((-shift, sq), (0, sk), CAUSAL)]
        square: Part = ((0, sq), (shift, sk), CAUSAL)
        return [((0, sq), (0, shift), FULL), square] if shift else [square]
    found = []
    shift = sk - sq
    rows = min(WINDOW_CHUNK, sk)
    for start in range(0, sq, rows):
        stop = min(start + rows, sq)
        piece = tile(mask, (start + shift, stop + shift), (0, sk))
        if piece is not None:
            (a, b), (c, d), band = piece
            # a window, cut to a chunk, may be full or causal
            inner = [((0, b - a), (0, d - c), band)] if band.windowed else parts(band, b - a, d - c)
            at = a - shift
            found += [((at + i, at + j), (c + m, c + n), band) for (i, j), (m, n), band in inner]
    return found


def band_matrix(mask: Band, sq: int, sk: int, device: torch.device) -> Tensor:
    """The mask as a boolean `[sq, sk]`, for small rectangles and tests."""
    i = torch.arange(sq, device=device).unsqueeze(1) + (sk - sq)
    j = torch.arange(sk, device=device).unsqueeze(0)
    keep = torch.ones(sq, sk, dtype=torch.bool, device=device)
    if mask.left >= 0:
        keep &= j >= i - mask.left
    if mask.right >= 0:
        keep &= j <= i + mask.right
    return keep


def _whole(call: Call, q: Tensor, k: Tensor) -> bool:
    """Whether all queries and keys are one part."""
    sq, sk = q.shape[1], k.shape[1]
    return not call.packed and sq > 0 < sk and (call.mask.full or (call.mask.causal and sq == sk))


def _pieces(call: Call, q: Tensor, k: Tensor) -> list[Part]:
    """The parts of a call, sequence by sequence, by their places in the batch."""
    if not call.packed:
        return parts(call.mask, q.shape[1], k.shape[1])
    found = []
    at_q = at_k = 0
    for n_q, n_k in zip(call.q_lengths or (), call.k_lengths or (), strict=True):
        for (a, b), (c, d), mask in parts(call.mask, n_q, n_k):
            found.append(((at_q + a, at_q + b), (at_k + c, at_k + d), mask))
        at_q, at_k = at_q + n_q, at_k + n_k
    return found
