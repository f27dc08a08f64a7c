"""The reference of dilated attention, by its definition: for each head the keys of its pairs of segment length and rate, one pair
after another, under plain softmax attention (`reference.attend`). It shares no code with `attention`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from runner.check.reference import Reference, Seen, attend, smallest
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


def seen_by(pairs: Sequence[Selected], queries: int, causal: bool) -> Seen:
    """What each query sees of the keys of several pairs, which lie one pair after another."""
    first, end = torch.zeros(2, len(pairs), queries, dtype=torch.int64)
    at = 0
    for number, pair in enumerate(pairs):
        lengths = torch.tensor(pair.lengths, dtype=torch.int64)
        stops = at + lengths.cumsum(0)
        first[number, pair.places] = (stops - lengths).repeat_interleave(lengths)
        own = torch.arange(at + 1, at + 1 + len(pair.places))
        end[number, pair.places] = own if causal else stops.repeat_interleave(lengths)
        at += len(pair.places)
    return Seen(first, end, at)


def reference(
    inputs: dict[str, Tensor], first_head: int, spec: AttentionCall, dilation: Dilation, dtype: torch.dtype, scores: int
) -> Reference:
    """`reference.attend` of the heads from `first_head` on. inputs: q, dout `[S, G, .]`, k, v `[S, 1, .]` and sinks `[G]`."""
    q, k, v = (inputs[name] for name in ("q", "k", "v"))

    def softmax(g: slice, pairs: Sequence[Selected], dout: Tensor | None = None) -> dict[str, Tensor]:
        """The values of one softmax of a head over the keys of all these pairs."""
        places = torch.cat([pair.places for pair in pairs]).to(q.device)
        seen, sinks = seen_by(pairs, len(q), spec.causal), inputs["sinks"][g] if "sinks" in inputs else None
        about = seen, spec.scale_of_scores, dtype, scores, None, spec.softcap, sinks
        values = attend(q[:, g], k[places], v[places], dout, *about).values
        for name in values.keys() & set(OF_KEYS):
            values[name] = values[name].new_zeros(len(k), *values[name].shape[1:]).index_add_(0, places, values[name])
        return values

    heads = []
    for head in range(q.shape[1]):
        g = slice(head, head + 1)
        pairs = [Selected.of(spec.cu_seqlens, *pair) for pair in dilation.pairs_of(first_head + head, spec.heads)]
        # detached: a softmax for each pair, weighted by its sum of exponentials, a constant in the backward
        groups = [[pair] for pair in pairs] if dilation.weights == "detached" else [pairs]
        lses = torch.stack([softmax(g, group)["lse"] for group in groups])
        total = lses.logsumexp(0)
        shares = (lses - total.masked_fill(total == -torch.inf, 0)).exp() / dilation.divisor  # [groups, S, 1, 1]
        parts = []
        for group, share in zip(groups, shares, strict=True):
            values = softmax(g, group, inputs["dout"][:, g].to(dtype) * share if "dout" in inputs else None)
            parts.append(values | {"out": values["out"] * share, "out2": values["out2"] * share**2})
        heads.append({name: torch.stack([part[name] for part in parts]).sum(0) for name in parts[0]} | {"lse": total})
    values = {}
    for name in heads[0]:
        rows = [head[name] for head in heads]
        values[name] = torch.stack(rows).sum(0) if name in OF_KEYS else torch.cat(rows, 1)
    return Reference(values, smallest(q.dtype))
