"""The reference of dilated attention, by its definition: for each head the keys of its pairs of segment length and rate, one pair
after another, under plain softmax attention (`reference.attend`). It shares no code with `attention`. Beside it, what the same
kernel makes of it on one device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from attention.kernels import Call, Kernel, Shape, select
from attention.masks.band import Band
from attention.reduction.parts import merge
from attention.reduction.sinks import saved_with, sinks_gradients, with_sinks
from runner.check.reference import BUSY, LEAST_ROWS, Columns, Reference, Rows, attend
from runner.config.experiment import AttentionCall, Dilation


@dataclass(frozen=True)
class Selected:
    """The tokens that one head of one pair selects, in order, int64 `[n]` on the CPU. lengths: how many in each segment."""

    places: Tensor
    lengths: tuple[int, ...]

    @staticmethod
    def of(cu_seqlens: Sequence[int], segment: int, rate: int, offset: int) -> Selected:
        found = [
            torch.arange(start + offset, min(start + segment, b), rate)
            for a, b in pairwise(cu_seqlens)
            for start in range(a, b, segment)
            if start + offset < min(start + segment, b)
        ]
        places = torch.cat(found) if found else torch.zeros(0, dtype=torch.int64)
        return Selected(places, tuple(map(len, found)))


@dataclass(frozen=True)
class SeenPairs:
    """What each query sees, where the keys of several pairs lie one pair after another: of each pair from first to end
    (exclusive), int64 `[pairs, queries]` on the CPU; equal for no key."""

    first: Tensor
    end: Tensor
    keys: int

    @classmethod
    def of(cls, selected: Sequence[Selected], queries: int, causal: bool) -> SeenPairs:
        first, end = torch.zeros(2, len(selected), queries, dtype=torch.int64)
        at = 0
        for pair, each in enumerate(selected):
            lengths = torch.tensor(each.lengths, dtype=torch.int64)
            stops = at + lengths.cumsum(0)
            first[pair, each.places] = (stops - lengths).repeat_interleave(lengths)
            own = torch.arange(at + 1, at + 1 + len(each.places))
            end[pair, each.places] = own if causal else stops.repeat_interleave(lengths)
            at += len(each.places)
        return cls(first, end, at)

    @property
    def queries(self) -> int:
        return self.first.shape[1]

    def columns(self, rows: Rows) -> Columns:
        """The keys that these queries see together: their places, sorted."""
        found = []
        for first, end in zip(self.first[:, slice(*rows)], self.end[:, slice(*rows)], strict=True):
            some = first < end
            if bool(some.any()):
                found.append(torch.arange(int(first[some].min()), int(end[some].max())))
        return torch.cat(found) if found else slice(0, 0)

    def hidden(self, rows: Rows, columns: Columns, device: torch.device) -> Tensor:
        """The pairs that the mask hides, bool `[rows, columns]`."""
        place = torch.arange(columns.start, columns.stop) if isinstance(columns, slice) else columns
        place = place.to(device)
        seen = torch.zeros(rows[1] - rows[0], len(place), dtype=torch.bool, device=device)
        for first, end in zip(
            self.first[:, slice(*rows)].to(device), self.end[:, slice(*rows)].to(device), strict=True
        ):
            seen |= (place >= first.unsqueeze(-1)) & (place < end.unsqueeze(-1))
        return ~seen

    def chunks(self, rows: Rows, scores: int) -> Iterator[Rows]:
        """The rows in chunks of at most `scores` scores per head; above `LEAST_ROWS` rows, most scores are visible."""
        start, stop = rows
        seen = torch.cat([torch.zeros(1, dtype=torch.int64), (self.end - self.first).sum(0).cumsum(0)])
        n = LEAST_ROWS
        while start < stop:
            n = min(2 * n, stop - start)
            while n > 1:
                columns = self.columns((start, start + n))
                held = n * (columns.stop - columns.start if isinstance(columns, slice) else len(columns))
                if held <= scores and (n <= LEAST_ROWS or int(seen[start + n] - seen[start]) >= BUSY * held):
                    break
                n = (n + 1) // 2
            yield start, start + n
            start += n


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
    found = []
    for g in range(inputs["q"].shape[1]):
        mine = {name: x[:, g : g + 1] for name, x in inputs.items() if name in ("q", "dout")}
        mine |= {name: inputs[name] for name in ("k", "v")}
        sinks = inputs["sinks"][g : g + 1] if "sinks" in inputs else None
        selected = [Selected.of(spec.cu_seqlens, *pair) for pair in dilation.pairs_of(first_head + g, spec.heads)]
        head = _Head(mine, spec, dtype, scores, rows)
        found.append(
            head.detached(selected) if dilation.weights == "detached" else head.joint(selected, dilation.divisor, sinks)
        )
    parts: dict[str, dict[str, Tensor]] = {"values": {}, "squares": {}}
    for kind, whole in parts.items():
        for name in getattr(found[0], kind):
            each = [getattr(x, kind)[name] for x in found]
            whole[name] = torch.stack(each).sum(0) if name in ("dk", "dv") else torch.cat(each, 1)
    return Reference(parts["values"], parts["squares"], found[0].least)


@dataclass(frozen=True)
class _Head:
    """One head: q, dout `[S, 1, .]` and its k, v `[S, 1, .]`."""

    inputs: dict[str, Tensor]
    spec: AttentionCall
    dtype: torch.dtype
    scores: int
    rows: Sequence[Rows] | None

    def attend(self, selected: Sequence[Selected], dout: Tensor | None, sinks: Tensor | None = None) -> Reference:
        """Over the keys of all these pairs together; dk and dv are of all tokens."""
        q, k, v = (self.inputs[name] for name in ("q", "k", "v"))
        places = torch.cat([each.places for each in selected]).to(q.device)
        seen = SeenPairs.of(selected, len(q), self.spec.causal)
        about = self.spec.scale_of_scores, self.dtype, self.scores, self.rows, self.spec.softcap, sinks
        found = attend(q, k[places], v[places], dout, seen, *about)
        for kind in (found.values, found.squares):
            for name in {"dk", "dv"} & set(kind):
                x = kind[name]
                kind[name] = x.new_zeros(len(q), *x.shape[1:]).index_add_(0, places, x)
        return found

    def joint(self, selected: Sequence[Selected], divisor: int, sinks: Tensor | None) -> Reference:
        """One softmax over all pairs; the result divided."""
        dout = self.inputs.get("dout")
        found = self.attend(selected, dout if dout is None else dout.to(self.dtype) / divisor, sinks)
        found.values["out"] /= divisor
        found.squares["out"] /= divisor**2
        return found

    def detached(self, selected: Sequence[Selected]) -> Reference:
        """A softmax for each pair, with its share of dout."""
        dout, q = self.inputs.get("dout"), self.inputs["q"]
        lses = torch.stack([self.attend([each], None).values["lse"] for each in selected])
        total = torch.logsumexp(lses, 0)
        shares = (lses - total.masked_fill(total == -torch.inf, 0)).exp().unsqueeze(-1)  # [pairs, rows, 1, 1]
        at = torch.cat([torch.arange(*each) for each in self.rows or [(0, len(q))]]).to(q.device)
        values: dict[str, Tensor] = {"lse": total}
        squares: dict[str, Tensor] = {}
        for each, share in zip(selected, shares, strict=True):
            given = None
            if dout is not None:
                given = torch.zeros_like(dout, dtype=self.dtype)
                given[at] = dout[at].to(self.dtype) * share
            found = self.attend([each], given)
            found.values["out"], found.squares["out"] = (
                found.values["out"] * share,
                found.squares["out"] * share[..., 0] ** 2,
            )
            for whole, parts in ((values, found.values), (squares, found.squares)):
                for name in set(parts) - {"lse"}:
                    whole[name] = whole[name] + parts[name] if name in whole else parts[name]
        return Reference(values, squares, found.least)


def local(
    inputs: dict[str, Tensor], first_head: int, spec: AttentionCall, dilation: Dilation, name: str, call: Call
) -> dict[str, Tensor]:
    """out, dq, dk, dv and dsinks `[S, ., .]` of the kernel `name` on one device: a call for each head and pair, merged and summed
    in fp32. q has the sign of the scale."""
    q = inputs["q"]
    compute_dtype = torch.promote_types(q.dtype, torch.float32)
    grads = (
        {f"d{x}": torch.zeros_like(inputs[x], dtype=compute_dtype) for x in ("q", "k", "v")} if "dout" in inputs else {}
    )
    outs, dsinks = [], []
    for g in range(q.shape[1]):
        pairs = dilation.pairs_of(first_head + g, spec.heads)
        parts = [_Calls(Selected.of(spec.cu_seqlens, *pair), spec, q.device, name, call) for pair in pairs]
        rows = {x: y[:, g : g + 1] if x in ("q", "dout") else y for x, y in inputs.items() if x != "sinks"}
        own = [part.forward(rows) for part in parts]
        out = torch.zeros_like(inputs["v"], dtype=compute_dtype)
        lse = torch.full((1, len(q)), -torch.inf, dtype=compute_dtype, device=q.device)
        for part, (x, x_lse) in zip(parts, own, strict=True):
            here, here_lse = out[part.at], lse[:, part.at]
            merge(here, here_lse, here, here_lse, x, x_lse)
            out[part.at], lse[:, part.at] = here, here_lse
        sinks = inputs["sinks"][g : g + 1] if "sinks" in inputs else None
        out, lse = with_sinks(out.to(q.dtype), lse, sinks)
        outs.append(out / dilation.divisor)
        if not grads:
            continue
        dout = rows["dout"]
        dsinks += sinks_gradients(dout, saved_with(sinks, rows["q"], rows["k"], rows["v"], out, lse))
        for part, (x, x_lse) in zip(parts, own, strict=True):
            if dilation.weights == "detached":
                share = (x_lse - lse[:, part.at]).exp().T.unsqueeze(-1)
                found = part.backward((dout[part.at] * share).to(q.dtype), rows, x, x_lse)
            else:
                found = part.backward(dout[part.at], rows, out[part.at], lse[:, part.at])
            for total, grad in zip((grads["dq"][:, g : g + 1], grads["dk"], grads["dv"]), found, strict=True):
                total.index_add_(0, part.at, grad.to(compute_dtype))
    result = {"out": torch.cat(outs, 1), **{key: (x / dilation.divisor).to(q.dtype) for key, x in grads.items()}}
    return result | ({"dsinks": torch.cat(dsinks) / dilation.divisor} if dsinks else {})


class _Calls:
    """One head's calls of one pair: its segments as a packed batch."""

    def __init__(self, selected: Selected, spec: AttentionCall, device: torch.device, name: str, call: Call):
        self.at, self.device = selected.places.to(device), device
        self.call = call.of_packed(Band.of(spec.causal, (-1, -1)), selected.lengths, selected.lengths, device)
        self.name = name

    def kernel(self, q: Tensor, k: Tensor, v: Tensor) -> Kernel:
        shape = Shape.of(q, k, v, softcap=self.call.softcap is not None)
        return select(self.name, shape, (self.call.mask,))

    def forward(self, rows: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        q, k, v = (rows[x][self.at] for x in ("q", "k", "v"))
        return self.kernel(q, k, v).forward(q, k, v, self.call)

    def backward(
        self, dout: Tensor, rows: dict[str, Tensor], out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (rows[x][self.at] for x in ("q", "k", "v"))
        return self.kernel(q, k, v).backward(dout, q, k, v, out, lse.contiguous(), self.call)
