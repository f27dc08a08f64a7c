"""Combining partial attentions over disjoint keys (`lse = logaddexp(lse1, lse2)`,
`o = exp(lse1-lse) o1 + exp(lse2-lse) o2`), computed in fp32 (fp64 for fp64). A part without keys has `o = 0`,
`lse = -inf` and never makes a NaN. On CUDA one Triton kernel does it, which reads each part once and writes once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attention.geometry.merge_plan import Bundle, passes
from attention.geometry.transfers import Intervals
from attention.reduction.grad_sum import Running, both_ends, cut, may_be_result
from attention.tensors import FEW, lse_room, put_, room, take, tokens, wide


def merge(out: Tensor, lse: Tensor, a: Tensor, lse_a: Tensor, b: Tensor, lse_b: Tensor) -> None:
    """Write the merge of the parts `(a, lse_a)` and `(b, lse_b)` to `(out, lse)`, which may be either of them.

    out, a, b: `[B, S, H, D]` or `[T, H, D]`, each in any dtype and strides, but for a contiguous last dim.
    lse, lse_a, lse_b: `[B, H, S]` or `[H, T]`, fp32 (fp64 for fp64)."""
    if out.is_cuda:
        from attention.kernels.ops.merge import merge_triton

        merge_triton(out, lse, a, lse_a, b, lse_b)
        return
    merge_eager(out, lse, a, lse_a, b, lse_b)


def merge_eager(out: Tensor, lse: Tensor, a: Tensor, lse_a: Tensor, b: Tensor, lse_b: Tensor) -> None:
    """As `merge`, in plain PyTorch on any device."""
    total = torch.logaddexp(lse_a, lse_b)
    # where both are empty the weights are exp(-inf - 0) = 0 instead of exp(-inf + inf) = NaN
    safe = total.masked_fill(total == -torch.inf, 0)
    share_a, share_b = ((x - safe).exp().transpose(-1, -2).unsqueeze(-1) for x in (lse_a, lse_b))
    out.copy_(a * share_a + b * share_b)
    lse.copy_(total)


class Accumulator:
    """The merge of parts that come one by one, each over queries that were said beforehand. It takes the parts over: the
    first is kept as it is, and becomes the result itself where it has all queries; queries of three parts or more are
    merged in a wide buffer, and a query's last part is merged in the pass that rounds it. So a single call costs nothing,
    and two read two parts and write one.

    parts: the queries' intervals of each part to come, in order."""

    def __init__(self, q: Tensor, parts: Sequence[Intervals]):
        self.q, self.parts = q, tuple(parts)
        self.passes = passes(tokens(q), self.parts)
        self.running = Running(self.passes.running)
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}
        self.number = 0  # of the part to come
        self.out: Tensor | None = None
        self.lse: Tensor | None = None  # merged in place: it is wide anyway

    def add(self, part: Tensor, part_lse: Tensor) -> None:
        """part: as q, but for the tokens, which are those of its intervals, side by side, and any dtype; part_lse as its."""
        if self.out is None and may_be_result(part, self.q, self.parts):
            self.out, self.lse = part, part_lse
        out, lse = self._begun()
        self.kept[self.number] = part, part_lse
        for each in self.passes.bundles[self.number]:
            if not each.first:
                self._merge(each, part, part_lse, out, lse)
            elif each.last and part is not out:
                put_(out, each.rows, take(part, each.at))
                put_(lse, each.rows, take(part_lse, each.at, -1), -1)
        self.kept = {i: x for i, x in self.kept.items() if self.passes.until[i] > self.number}
        self.number += 1

    def _merge(self, each: Bundle, part: Tensor, part_lse: Tensor, out: Tensor, lse: Tensor) -> None:
        if each.kept:
            (first, first_lse), places = self.kept[each.kept[0]], each.kept[1]
            lse_places = places
        else:
            (first, places), first_lse, lse_places = self.running.place(out, each.rows), lse, each.rows
        into, rows = (out, each.rows) if each.last else self.running.place(out, each.rows)
        before, target = both_ends(first, places, into, rows)
        before_lse, target_lse = both_ends(first_lse, lse_places, lse, each.rows, -1)
        merge(target, target_lse, before, before_lse, take(part, each.at), take(part_lse, each.at, -1))
        if len(rows) > 1:  # which are copies
            put_(into, rows, target)
            put_(lse, each.rows, target_lse, -1)

    def result(self) -> tuple[Tensor, Tensor]:
        """(out in the queries' dtype, lse)."""
        assert self.number == len(self.parts), f"{self.number} of {len(self.parts)} parts were added"
        return self._begun()

    def _begun(self) -> tuple[Tensor, Tensor]:
        if self.out is None or self.lse is None:
            self.out = room(self.q, tokens(self.q))
            self.lse = lse_room(self.q)
        if self.number == 0:
            for start, stop in self.passes.bare if len(self.passes.bare) <= FEW else [(0, tokens(self.out))]:
                cut(self.out, start, stop - start).zero_()
                self.lse.narrow(-1, start, stop - start).fill_(-torch.inf)
        return self.out, self.lse


def empty_result(q: Tensor) -> tuple[Tensor, Tensor]:
    """What attention over no keys is: out 0 in the wide dtype, lse -inf."""
    return torch.zeros(q.shape, dtype=wide(q.dtype), device=q.device), lse_room(q).fill_(-torch.inf)


def merge_n(
    parts: Tensor,
    lses: Tensor,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Merge n partial results over disjoint keys; a part without keys has lse -inf and out 0.

    parts: `[n, B, S, H, D]`; lses: `[n, B, H, S]`, fp32 (fp64 for fp64 parts), natural log.
    Gives (out `[B, S, H, D]`, lse `[B, H, S]` in the dtype of `lses`). `dtype` is that of a new out, by default the
    parts'; a given `out` or `lse` is written to instead, and may be `parts[0]` or `lses[0]`.

    Raises ValueError for shapes that do not belong together."""
    if parts.is_cuda and parts.dtype != torch.float64:
        from attention.kernels.ops.merge_n import merge_n_triton

        return merge_n_triton(parts, lses, dtype, out, lse)
    return merge_n_eager(parts, lses, dtype, out, lse)


def merge_n_eager(
    parts: Tensor,
    lses: Tensor,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """As `merge_n`, in plain PyTorch on any device."""
    out, lse = result_tensors(parts, lses, dtype, out, lse)
    total = torch.logsumexp(lses, 0)
    # where every part is empty the weights are exp(-inf - 0) = 0 instead of exp(-inf + inf) = NaN
    safe = total.masked_fill(total == -torch.inf, 0)
    weights = (lses - safe).exp().transpose(-1, -2).unsqueeze(-1)
    out.copy_((parts.to(wide(parts.dtype)) * weights).sum(0))
    lse.copy_(total)
    return out, lse


def result_tensors(
    parts: Tensor, lses: Tensor, dtype: torch.dtype | None, out: Tensor | None, lse: Tensor | None
) -> tuple[Tensor, Tensor]:
    if parts.dim() != 5:
        raise ValueError(f"parts {list(parts.shape)}: must be [n, B, S, H, D]; unsqueeze what is missing")
    n, batch, n_tokens, heads, head_dim = parts.shape
    if lses.shape != (n, batch, heads, n_tokens):
        raise ValueError(
            f"lses {list(lses.shape)}: must be [n, B, H, S] = {[n, batch, heads, n_tokens]} as parts {list(parts.shape)}"
        )
    if out is None:
        out = torch.empty((batch, n_tokens, heads, head_dim), dtype=dtype or parts.dtype, device=parts.device)
    elif dtype not in (None, out.dtype):
        raise ValueError(f"dtype={dtype}: the given out is {out.dtype}; leave dtype out, or let out be made")
    if lse is None:
        lse = torch.empty((batch, heads, n_tokens), dtype=lses.dtype, device=lses.device)
    if out.shape != parts.shape[1:] or lse.shape != lses.shape[1:]:
        raise ValueError(
            f"out {list(out.shape)}, lse {list(lse.shape)}: must be {list(parts.shape[1:])}, {list(lses.shape[1:])}"
        )
    return out, lse
