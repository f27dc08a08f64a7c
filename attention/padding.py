"""What a call adds to its tensors so that they divide, and takes away from its results: heads, and tokens that hold anything."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from attention.geometry.options import HeadCount
from attention.masks.band import Intervals
from attention.tensors import TOKENS, token_indices


class Padding(NamedTuple):
    """tokens: where this rank has padding, which holds anything. heads: of the tensors, and those that are `computed`."""

    tokens: Intervals
    heads: HeadCount
    computed: HeadCount

    def add(
        self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """The tensors with zeros for padding. Differentiable."""
        if self.tokens:  # NaN there would reach other tokens: a kernel multiplies what a mask excludes by 0
            at = token_indices(self.tokens, q.device)
            q, k, v = (x.index_fill(TOKENS, at, 0) for x in (q, k, v))
        if self.heads == self.computed:
            return q, k, v, sinks
        more_kv, more = (most - n for most, n in zip(self.computed, self.heads, strict=True))
        q = F.pad(q.unflatten(-2, self.heads), (0, 0, 0, more, 0, more_kv)).flatten(-3, -2)
        k, v = (F.pad(x, (0, 0, 0, more_kv)) for x in (k, v))
        if sinks is not None:
            sinks = F.pad(sinks.unflatten(0, self.heads), (0, more, 0, more_kv)).flatten()
        return q, k, v, sinks

    def cut(self, out: Tensor, lse: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """(out, lse) of the real heads, cleared at tokens of padding: a band does not exclude their queries."""
        if self.heads != self.computed:
            out, lse = self._heads(out), None if lse is None else self._heads(lse)
        if self.tokens:
            at = token_indices(self.tokens, out.device)
            out, lse = out.index_fill(TOKENS, at, 0), None if lse is None else lse.index_fill(-1, at, -torch.inf)
        return out, lse

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-2, self.computed)[..., : self.heads.kv, : self.heads.ratio, :].flatten(-3, -2)
