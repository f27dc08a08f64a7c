"""Plain softmax attention, the reference of the correctness check: forward, LSE and backward in fp64 or fp32, by chunks of
queries. It shares no code with `attention`; which keys a query sees is an argument (`Seen`).

It also gives the scale of each row's error. If every term `p_ij v_j` of a row of out has an independent relative error of
size u, the row's error in the L2 norm is about `u sqrt(sum_j p_ij^2 |v_j|^2)`, whatever the number of terms. The same holds
for dv over the queries, for dq and dk, whose terms also contain the rounding of `dout.v`, and for the gradient of a sink,
whose terms contain that of `dout.out`. The row's own norm is added for its last rounding. Below the smallest normal number of
a dtype (which matters in fp16) errors no longer shrink with the term. Divided by this scale, the errors of a correct result
are a few u, at any length."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

LEAST_ROWS = 128  # queries per chunk, unless the scores of fewer fill the memory
BUSY = 0.75  # at least this share of a chunk's scores is visible under the mask


@dataclass(frozen=True)
class Chunk:
    """Queries, `rows` of all, and the intervals of keys that they see, int64 `[intervals]` on the CPU: each one's row (of this
    chunk), first key and end (exclusive)."""

    rows: slice
    row: Tensor
    first: Tensor
    end: Tensor

    @property
    def visible(self) -> int:
        """The pairs that the mask keeps."""
        return int((self.end - self.first).sum())

    @cached_property
    def keys(self) -> tuple[slice | Tensor, int]:
        """The keys that these queries see together, and their number: an interval or, where few of it are seen, their places,
        sorted."""
        if not len(self.first):
            return slice(0, 0), 0
        first, order = self.first.sort()
        end = self.end[order].cummax(0).values
        apart = (first[1:] > end[:-1]).nonzero().squeeze(-1)  # a key between two intervals is not seen
        first, end = (torch.cat(x) for x in ((first[:1], first[apart + 1]), (end[apart], end[-1:])))
        width = end - first
        n, low, high = int(width.sum()), int(first[0]), int(end[-1])
        if n >= BUSY * (high - low):
            return slice(low, high), high - low
        return torch.arange(n) + (first - width.cumsum(0) + width).repeat_interleave(width), n

    @property
    def scores(self) -> int:
        """The scores that are computed for each head."""
        return (self.rows.stop - self.rows.start) * self.keys[1]

    def hidden(self, device: torch.device) -> Tensor | None:
        """The pairs that the mask hides, bool `[rows, keys]`; None if it hides none."""
        keys, n = self.keys
        if self.visible == self.scores:
            return None
        if isinstance(keys, slice):
            first, end = self.first - keys.start, self.end - keys.start
        else:
            first, end = torch.searchsorted(keys, self.first), torch.searchsorted(keys, self.end)
        step = torch.zeros((self.rows.stop - self.rows.start, n), dtype=torch.int8, device=device)
        ends = end < n
        step[self.row.to(device), first.to(device)] += 1  # +1 where an interval begins, -1 after it
        step[self.row[ends].to(device), end[ends].to(device)] -= 1
        return step.cumsum_(1) == 0


@dataclass(frozen=True)
class Seen:
    """What each query sees: n intervals of keys, each from `first` to `end` (exclusive; equal for no key), int64 `[n, queries]` on the
    CPU. keys: how many there are.

    rectangles: of a query's only interval it sees those keys that are in one of these, int64 `[., 6]` on the CPU: queries q0 to
    q1 see those of the keys k0 to k1 (ends exclusive) with lo <= key - query <= hi. No pair is in two."""

    first: Tensor
    end: Tensor
    keys: int
    rectangles: Tensor | None = None

    @classmethod
    def band(
        cls,
        q_lengths: Sequence[int],
        k_lengths: Sequence[int],
        causal: bool = False,
        window: tuple[int, int] = (-1, -1),
        rectangles: Tensor | None = None,
    ) -> Seen:
        """Sequences side by side. The queries and keys of each end together, and a query sees `window` tokens to its left
        and right (-1: all), none to its right if causal."""
        first, end = [], []
        everything = sum(q_lengths) + sum(k_lengths)
        left, right = (x if x >= 0 else everything for x in (window[0], 0 if causal else window[1]))
        for n_q, n_k, start in zip(q_lengths, k_lengths, accumulate(k_lengths, initial=0), strict=False):
            place = torch.arange(n_q) + (n_k - n_q)
            first.append(start + (place - left).clamp(0, n_k))
            end.append(start + (place + right + 1).clamp(0, n_k))
        return cls(torch.cat(first)[None], torch.cat(end)[None], sum(k_lengths), rectangles)

    def chunks(self, rows: slice, scores: int) -> Iterator[Chunk]:
        """These queries in chunks of at most `scores` scores per head; above `LEAST_ROWS` rows, most scores are visible."""
        n, start = LEAST_ROWS, rows.start
        while start < rows.stop:
            n = min(2 * n, rows.stop - start)
            while True:
                chunk = self._chunk(slice(start, start + n))
                is_busy = n <= LEAST_ROWS or chunk.visible >= BUSY * chunk.scores
                if n == 1 or (is_busy and chunk.scores <= scores):
                    break
                n = (n + 1) // 2
            yield chunk
            start += n

    def _chunk(self, rows: slice) -> Chunk:
        first, end = self.first[:, rows], self.end[:, rows]
        row = torch.arange(first.shape[1]).expand_as(first)
        if self.rectangles is not None:
            x = self.rectangles[(self.rectangles[:, 0] < rows.stop) & (self.rectangles[:, 1] > rows.start)]
            low, high = x[:, :2].clamp(rows.start, rows.stop).T
            height = high - low
            query = torch.arange(int(height.sum())) + (low - height.cumsum(0) + height).repeat_interleave(height)
            k0, k1, lo, hi = x[:, 2:].repeat_interleave(height, 0).T
            row = query - rows.start
            first = torch.maximum(torch.maximum(k0, query + lo), first[0, row])
            end = torch.minimum(torch.minimum(k1, query + hi + 1), end[0, row])
        some = first < end
        return Chunk(rows, row[some], first[some], end[some])


@dataclass
class Reference:
    """values: out `[queries, H, Dv]`, dq `[queries, H, D]`, dk `[keys, Hk, D]`, dv `[keys, Hk, Dv]`, dsinks `[1, H, 1]`, lse
    `[queries, H, 1]`; without a backward only out and lse. For all but the LSE `NAME2` is the squared scale of each row's error
    without its own norm, `[tokens, heads, 1]`. least: the smallest normal number of the checked dtype. For a subset of the queries,
    dk, dv, dsinks and their squares are that subset's share; the shares sum to the whole."""

    values: dict[str, Tensor]
    least: float = 0.0

    def scales(self, name: str) -> Tensor:
        """The scale of each row's error, relative to the error of one term, `[tokens, heads]`."""
        value = self.values[name]
        if name == "lse":
            return 1 + value.masked_fill(value == -torch.inf, 0).abs().squeeze(-1)
        squares = self.values[f"{name}2"].squeeze(-1) + value.square().sum(-1)
        return (squares + value.shape[-1] * self.least**2).sqrt_()

    def to(self, device: torch.device | str) -> Reference:
        return Reference({name: x.to(device) for name, x in self.values.items()}, self.least)

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in self.values.values())


def smallest(dtype: torch.dtype) -> float:
    """The smallest normal number, where results are that small: in fp16."""
    return torch.finfo(dtype).smallest_normal if dtype == torch.float16 else 0.0


@contextmanager
def exact_matmul() -> Iterator[None]:
    """Disables TF32 within the context."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _by_key(**sums: Tensor) -> dict[str, Tensor]:
    """`[Hk, keys, .]` as `[keys, Hk, .]`."""
    return {name: x.transpose(0, 1).contiguous() for name, x in sums.items()}


@exact_matmul()
def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor | None,
    seen: Seen,
    scale: float,
    dtype: torch.dtype = torch.float64,
    scores: int = 1 << 26,
    rows: slice | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Reference:
    """The reference of q `[queries, H, D]`, dout `[queries, H, Dv]`, k `[keys, Hk, D]` and v `[keys, Hk, Dv]` in the checked
    dtype, computed in `dtype`, with gradients if there is a `dout`. scale: of the scores. scores: about the most scores held at
    once. rows: compute only these queries; out, dq and the LSE hold no others. softcap: scaled scores x become
    `softcap * tanh(x / softcap)`. sinks: `[H]`, a score of each head beside those of all keys, with the value 0."""
    least, kv_heads, group = smallest(q.dtype), k.shape[1], q.shape[1] // k.shape[1]

    def by_head(x: Tensor) -> Tensor:
        """`[rows, H, D]` to `[Hk, G * rows, D]`."""
        return x.to(dtype).transpose(0, 1).reshape(kv_heads, -1, x.shape[-1])

    sink = (q.new_full((q.shape[1],), -torch.inf) if sinks is None else sinks).to(dtype).view(kv_heads, group)
    unit = scale**2 / v.shape[2]  # the rounding of dout.v is about |dout| |v| / sqrt(Dv)
    by_chunk = defaultdict(list)
    k_, v_ = (x.to(dtype).transpose(0, 1).contiguous() for x in (k, v))  # [Hk, keys, D]
    kk, vv = (x.square().sum(-1, keepdim=True) for x in (k_, v_))  # [Hk, keys, 1]
    terms = torch.cat([vv, vv * kk * unit], -1)  # the squares of a term of out, and of dq by that of dout
    dk, dv, dkv2 = (torch.zeros_like(x) for x in (k_, v_, terms))
    dsinks = k_.new_zeros(2, kv_heads, group)  # and their squares
    for chunk in seen.chunks(rows or slice(0, len(q)), scores // q.shape[1]):
        hidden, (keys, _) = chunk.hidden(q.device), chunk.keys
        keys = keys if isinstance(keys, slice) else keys.to(q.device)
        q_ = by_head(q[chunk.rows])  # [Hk, G * rows, D]
        sink_ = sink.repeat_interleave(chunk.rows.stop - chunk.rows.start, 1).unsqueeze(-1)
        p, slope, lse = _softmax(q_, k_[:, keys], scale, softcap, hidden, sink_)
        out = p @ v_[:, keys]
        p2 = ((p + least).mul_(p > 0) if least else p).square()
        out2, dq2 = (p2 @ terms[:, keys]).split(1, -1)
        results = {"out": out, "lse": lse, "out2": out2}
        if dout is not None:
            dout_ = by_head(dout[chunk.rows])
            oo, qq = (x.square().sum(-1, keepdim=True) for x in (dout_, q_))
            dkv2[:, keys] += p2.mT @ torch.cat([oo, oo * qq], -1)
            del p2
            dv[:, keys] += p.mT @ dout_
            delta = (dout_ * out).sum(-1, keepdim=True)
            ds = (dout_ @ v_[:, keys].mT).sub_(delta).mul_(p).mul_(slope)
            dk[:, keys] += ds.mT @ q_
            results |= {"dq": ds @ k_[:, keys], "dq2": dq2 * oo}
            share = (sink_ - lse).exp()
            error = share.square() * oo * (out.square().sum(-1, keepdim=True) + out2) / out.shape[-1]
            dsinks += torch.stack([-share * delta, error]).view(2, kv_heads, group, -1).sum(-1)
        for name, x in results.items():  # [rows, H, .]
            by_chunk[name].append(x.reshape(q.shape[1], -1, x.shape[-1]).transpose(0, 1))
    values = {name: torch.cat(chunks) for name, chunks in by_chunk.items()}
    if dout is not None:
        dv2, dk2 = dkv2.split(1, -1)
        values |= _by_key(dk=dk, dk2=dk2 * vv * unit, dv=dv, dv2=dv2)
        if sinks is not None:
            values |= dict(zip(("dsinks", "dsinks2"), dsinks.view(2, 1, -1, 1), strict=True))
    return Reference(values, least)


def _softmax(
    q: Tensor, k: Tensor, scale: float, softcap: float | None, hidden: Tensor | None, sink: Tensor
) -> tuple[Tensor, Tensor | float, Tensor]:
    """(p `[Hk, G * rows, keys]`, the slope of the scores by `q k`, LSE `[Hk, G * rows, 1]`): p is 0 in a row without keys, and the LSE
    that of the sink. sink: of each row, `[Hk, G * rows, 1]`, -inf for none."""
    s = torch.baddbmm(q.new_empty(()), q, k.mT, beta=0, alpha=scale)
    slope: Tensor | float = scale
    if softcap is not None:
        s.div_(softcap).tanh_()
        slope = (1 - s.square()).mul_(scale)
        s.mul_(softcap)
    if hidden is not None:
        s.unflatten(1, (-1, len(hidden))).masked_fill_(hidden, -torch.inf)
    top = torch.maximum(s.amax(-1, keepdim=True), sink) if s.shape[-1] else sink
    top = top.masked_fill(top == -torch.inf, 0)
    p = s.sub_(top).exp_()
    total = p.sum(-1, keepdim=True) + (sink - top).exp()
    return p.div_(total.masked_fill(total == 0, 1)), slope, top + total.log()
