"""Batch elements with different numbers of keys by a kernel that takes one number for all: a call for each element, or for
neighbours of equal length."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attention.masks.band import tile
from attention.tensors import empty_lse, empty_tokens, result_like, tokens

if TYPE_CHECKING:
    from attention.kernels.interface import Call


def by_element(
    forward: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, call: Call, into: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, Tensor]:
    """(out, lse) by a `forward` of calls without lengths. `call.lengths` are on the CPU."""
    assert call.lengths is not None
    out, lse = into or (empty_tokens(result_like(q, v), tokens(q)), empty_lse(q))
    out.zero_()
    lse.fill_(-torch.inf)
    lengths, first, total = call.lengths
    n, stop = q.shape[1], 0
    for length, equal in groupby(lengths.tolist()):
        start, stop = stop, stop + len(list(equal))
        end = min(max(length, 0), total)
        piece = tile(call.mask, (end - n, end), (first, min(first + k.shape[1], end)))
        if piece is not None:
            (a, b), (c, d), band = piece
            rows, keys = slice(a - end + n, b - end + n), slice(c - first, d - first)
            x, y, z, written, written_lse = (x[start:stop] for x in (q, k, v, out, lse))
            results = written[:, rows], written_lse[..., rows]
            forward(x[:, rows], y[:, keys], z[:, keys], call.under(band), results)
    return out, lse
