"""The reference of dilated attention, by its definition: for each head the keys of its pairs of segment length and rate, one pair
after another, under plain softmax attention (`reference.attend`). It shares no code with `attention`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from runner.check.reference import Reference, Rows, Seen, attend
from runner.config.experiment import AttentionCall, Dilation

OF_KEYS = ("dk", "dv", "dk2", "dv2")  # values with a row for each key


@dataclass(frozen=True)
class Selected:
    """The tokens that one head of one pair selects, in order, int64 `[n]` on the CPU. lengths: how many in each segment."""

    places: Tensor
    lengths: tuple[int, ...]

    @staticmethod
    def of(cu_seqlens: Sequence[int], segment: int, rate: int, offset: int) -> Selected:
        segments = [
            torch.arange(min(start + offset, stop), stop, rate)
            for a, b in pairwise(cu_seqlens)
            for start in range(a, b, segment)
            for stop in [min(start + segment, b)]
        ]
        return Selected(torch.cat(segments), tuple(len(places) for places in segments if len(places)))


def seen_by(selected: Sequence[Selected], queries: int, causal: bool) -> Seen:
    """What each query sees of the keys of several pairs, which lie one pair after another."""
    first, end = torch.zeros(2, len(selected), queries, dtype=torch.int64)
    at = 0
    for pair, keys in enumerate(selected):
        lengths = torch.tensor(keys.lengths, dtype=torch.int64)
        stops = at + lengths.cumsum(0)
        first[pair, keys.places] = (stops - lengths).repeat_interleave(lengths)
        own = torch.arange(at + 1, at + 1 + len(keys.places))
        end[pair, keys.places] = own if causal else stops.repeat_interleave(lengths)
        at += len(keys.places)
    return Seen(first, end, at)


def reference(
    inputs: dict[str, Tensor],
    first_head: int,
    spec: AttentionCall,
    dilation: Dilation,
    dtype: torch.dtype,
    scores: int,
    rows: Sequence[Rows] | None = None,
) -> Reference:
    """`reference.attend` of the heads from `first_head` on. inputs: q, dout `[S, G, .]`, k, v `[S, 1, .]` and sinks `[G]`."""
    heads = []
    for g in range(inputs["q"].shape[1]):
        own = {name: inputs[name][:, g : g + 1] for name in ("q", "dout") if name in inputs}
        sinks = inputs["sinks"][g : g + 1] if "sinks" in inputs else None
        head = _Head(inputs | own, spec, dtype, scores, rows or [(0, len(inputs["q"]))])
        pairs = [Selected.of(spec.cu_seqlens, *pair) for pair in dilation.pairs_of(first_head + g, spec.heads)]
        if dilation.weights == "detached":
            heads.append(head.detached(pairs))
        else:
            heads.append(head.attend(pairs, 1 / dilation.divisor, sinks))
    values = {}
    for name in heads[0].values:
        parts = [head.values[name] for head in heads]
        values[name] = torch.stack(parts).sum(0) if name in OF_KEYS else torch.cat(parts, 1)
    return Reference(values, heads[0].least)


@dataclass(frozen=True)
class _Head:
    """One head: q, dout `[S, 1, .]` and its k, v `[S, 1, .]`."""

    inputs: dict[str, Tensor]
    spec: AttentionCall
    dtype: torch.dtype
    scores: int
    rows: Sequence[Rows]

    def attend(self, selected: Sequence[Selected], share: Tensor | float, sinks: Tensor | None = None) -> Reference:
        """One softmax over the keys of all these pairs; its out times the share, a number or one for each row, which is a constant in
        the backward. dk and dv are of all tokens."""
        q, k, v = (self.inputs[name] for name in ("q", "k", "v"))
        dout = None
        if "dout" in self.inputs:
            at = torch.cat([torch.arange(*rows) for rows in self.rows]).to(q.device)
            dout = torch.zeros_like(self.inputs["dout"], dtype=self.dtype)
            dout[at] = self.inputs["dout"][at].to(self.dtype) * share
        places = torch.cat([pair.places for pair in selected]).to(q.device)
        seen = seen_by(selected, len(q), self.spec.causal)
        about = self.spec.scale_of_scores, self.dtype, self.scores, self.rows, self.spec.softcap, sinks
        found = attend(q, k[places], v[places], dout, seen, *about)
        for name in found.values.keys() & set(OF_KEYS):
            x = found.values[name]
            found.values[name] = x.new_zeros(len(q), *x.shape[1:]).index_add_(0, places, x)
        found.values["out"] *= share
        found.values["out2"] *= share**2
        return found

    def detached(self, pairs: Sequence[Selected]) -> Reference:
        """A softmax for each pair, weighted by its sum of exponentials."""
        forward = replace(self, inputs={name: self.inputs[name] for name in ("q", "k", "v")})
        lses = torch.stack([forward.attend([pair], 1.0).values["lse"] for pair in pairs])
        total = torch.logsumexp(lses, 0)
        shares = (lses - total.masked_fill(total == -torch.inf, 0)).exp()  # [pairs, rows, 1, 1]
        parts = [self.attend([pair], share) for pair, share in zip(pairs, shares, strict=True)]
        sums = {name: torch.stack([part.values[name] for part in parts]).sum(0) for name in parts[0].values}
        return Reference(sums | {"lse": total}, parts[0].least)
