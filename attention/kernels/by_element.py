"""Batch elements with different numbers of keys by a kernel that takes one number for all: a call for each element, or for
neighbours of equal length."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from attention.errors import UnsupportedCall
from attention.kernels.interface import Call, Kernel, Pair, Triple, Wrapped
from attention.masks.band import tile
from attention.tensors import empty_lse, empty_tokens, result_like, take, tokens


class ByElement(Wrapped):
    """A kernel for calls with `Call.lengths`, which are on the CPU, and for those without. Forward only."""

    def __init__(self, kernel: Kernel):
        super().__init__(kernel, "kv_lengths")
        self.note = ", ".join([*filter(None, [kernel.note]), "a call for each length"])

    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call, into: Pair | None) -> Pair:
        if call.lengths is None:
            return self.kernel.forward(q, k, v, call, into)
        out, lse = into or (empty_tokens(result_like(q, v), tokens(q)), empty_lse(q))
        out.zero_()
        lse.fill_(-torch.inf)
        lengths, first, total = call.lengths
        n, stop = q.shape[1], first + k.shape[1]
        plain, at = replace(call, lengths=None), 0
        for end, same in groupby(lengths.tolist()):
            start, at = at, at + len(list(same))
            end = min(max(end, 0), total)
            found = tile(call.mask, (end - n, end), (first, min(stop, end)))
            if found is None:
                continue
            (a, b), (c, d), band = found
            rows, keys = ((a - end + n, b - end + n),), ((c - first, d - first),)
            here = [x[start:at] for x in (q, k, v, out, lse)]
            self.kernel.forward(
                take(here[0], rows), take(here[1], keys), take(here[2], keys), plain.under(band),
                into=(take(here[3], rows), take(here[4], rows, -1)),
            )  # fmt: skip
        return out, lse

    def backward(self, *_: Any, **__: Any) -> Triple:
        raise UnsupportedCall("kv_lengths: forward only; for gradients give a packed batch, cu_seqlens")
