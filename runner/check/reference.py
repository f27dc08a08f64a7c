"""Plain softmax attention, the reference of the correctness check: forward, LSE and backward in fp64 or fp32, by chunks of
queries. It shares no code with `attention`; which keys a query sees is an argument (`Sees`).

It also gives the scale of each row's error. If every term `p_ij v_j` of a row of out has an independent relative error of
size u, the row's error in the L2 norm is about `u sqrt(sum_j p_ij^2 |v_j|^2)`, whatever the number of terms. The same holds
for dv over the queries, for dq and dk, whose terms also contain the rounding of `dout.v`, and for the gradient of a sink,
whose terms contain that of `dout.out`. The row's own norm is added for its last rounding. Below the smallest normal number of a dtype (which matters in fp16) errors no longer shrink with the
term. Divided by this scale, the errors of a correct result are a few u, at any length."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

Rows = tuple[int, int]  # [start, stop)
Columns = slice | Tensor  # places of keys

LEAST_ROWS = 128  # queries per chunk, unless the scores of fewer fill the memory
BUSY = 0.75  # at least this share of a chunk's scores is visible under the mask


class Sees(Protocol):
    """What each query sees."""

    @property
    def queries(self) -> int: ...

    @property
    def keys(self) -> int: ...

    def columns(self, rows: Rows) -> Columns:
        """The keys that these queries see together, sorted."""

    def hidden(self, rows: Rows, columns: Columns, device: torch.device) -> Tensor | None:
        """The pairs that the mask hides, bool `[rows, columns]`; None if it hides none."""

    def chunks(self, rows: Rows, scores: int) -> Iterator[Rows]:
        """The rows in chunks of at most `scores` scores per head."""


@dataclass(frozen=True)
class Seen:
    """What each query sees, where its keys are one interval: first to end (exclusive) of `keys`, int64 `[queries]` on the
    CPU; equal for no key."""

    first: Tensor
    end: Tensor
    keys: int

    @classmethod
    def band(
        cls,
        q_lengths: Sequence[int],
        k_lengths: Sequence[int],
        causal: bool = False,
        window: tuple[int, int] = (-1, -1),
    ) -> Seen:
        """Sequences side by side. The queries and keys of each end together, and a query sees `window` tokens to its left
        and right (-1: all), none to its right if causal."""
        first, end = [], []
        left, right = window[0], 0 if causal else window[1]
        for n_q, n_k, start in zip(q_lengths, k_lengths, accumulate(k_lengths, initial=0), strict=False):
            place = torch.arange(n_q) + (n_k - n_q)
            low = (place - left if left >= 0 else torch.zeros_like(place)).clamp(0, n_k)
            high = (place + right + 1 if right >= 0 else torch.full_like(place, n_k)).clamp(0, n_k)
            first.append(start + low)
            end.append(start + torch.maximum(low, high))
        return cls(torch.cat(first), torch.cat(end), sum(k_lengths))

    @property
    def queries(self) -> int:
        return len(self.first)

    def columns(self, rows: Rows) -> Columns:
        """The keys that these queries see together."""
        return slice(int(self.first[slice(*rows)].min()), int(self.end[slice(*rows)].max()))

    def hidden(self, rows: Rows, columns: Columns, device: torch.device) -> Tensor | None:
        """The pairs that the mask hides, bool `[rows, columns]`; None if it hides none."""
        assert isinstance(columns, slice)
        first, end = self.first[slice(*rows)], self.end[slice(*rows)]
        if int(first.max()) <= columns.start and int(end.min()) >= columns.stop:
            return None
        place = torch.arange(columns.start, columns.stop, device=device)
        return (place < first.to(device).unsqueeze(-1)) | (place >= end.to(device).unsqueeze(-1))

    def chunks(self, rows: Rows, scores: int) -> Iterator[Rows]:
        """The rows in chunks of at most `scores` scores per head, most of them visible."""
        start, stop = rows
        seen = (self.end - self.first).cumsum(0)
        while start < stop:
            n = stop - start
            while n > 1:
                last = start + n - 1
                held = n * int(self.end[last] - self.first[start])
                visible = int(seen[last] - seen[start] + self.end[start] - self.first[start])
                if held <= scores and (n <= LEAST_ROWS or visible >= BUSY * held):
                    break
                n = (n + 1) // 2
            yield start, start + n
            start += n


@dataclass(frozen=True)
class SeenRectangles:
    """What each query sees under any mask, as rectangles, int64 `[n, 6]` on the CPU: queries q0 to q1 see those of the keys
    k0 to k1 (ends exclusive) with lo <= key - query <= hi. No pair is in two. Of these keys a query sees those that it has
    in `within`, too."""

    rectangles: Tensor
    within: Seen

    @property
    def queries(self) -> int:
        return self.within.queries

    @property
    def keys(self) -> int:
        return self.within.keys

    def columns(self, rows: Rows) -> Columns:
        """The keys that these queries see together: an interval or, where few of it are seen, their places, sorted."""
        _, first, end = self._intervals(rows)
        if not len(first):
            return slice(0, 0)
        low, high = int(first.min()), int(end.max())
        step = torch.zeros(high - low + 1, dtype=torch.int32)
        step.index_add_(0, first - low, torch.ones(len(first), dtype=torch.int32))
        step.index_add_(0, end - low, torch.full((len(end),), -1, dtype=torch.int32))
        seen = (step.cumsum(0) > 0)[:-1]
        if int(seen.sum()) >= BUSY * len(seen):
            return slice(low, high)
        return seen.nonzero().squeeze(-1) + low

    def hidden(self, rows: Rows, columns: Columns, device: torch.device) -> Tensor:
        """The pairs that the mask hides, bool `[rows, columns]`."""
        row, first, end = self._intervals(rows)
        if isinstance(columns, slice):
            n, first, end = columns.stop - columns.start, first - columns.start, end - columns.start
        else:
            n, first, end = len(columns), torch.searchsorted(columns, first), torch.searchsorted(columns, end)
        step = torch.zeros((rows[1] - rows[0], n + 1), dtype=torch.int32)  # +1 where an interval begins, -1 after it
        one = torch.ones(len(row), dtype=torch.int32)
        step.index_put_((row, first), one, accumulate=True)
        step.index_put_((row, end), -one, accumulate=True)
        return (step.to(device).cumsum(1, dtype=torch.int32) == 0)[:, :-1]

    def chunks(self, rows: Rows, scores: int) -> Iterator[Rows]:
        """The rows in chunks of at most `scores` scores per head; above `LEAST_ROWS` rows, most scores are visible."""
        start, stop = rows
        n = LEAST_ROWS
        while start < stop:
            n = min(2 * n, stop - start)
            while n > 1:
                held = n * _number(self.columns((start, start + n)))
                if held <= scores and (n <= LEAST_ROWS or self._pairs((start, start + n)) >= BUSY * held):
                    break
                n = (n + 1) // 2
            yield start, start + n
            start += n

    def _pairs(self, rows: Rows) -> int:
        _, first, end = self._intervals(rows)
        return int((end - first).sum())

    def _intervals(self, rows: Rows) -> tuple[Tensor, Tensor, Tensor]:
        """The intervals of keys that these queries see: each one's row (from 0), first key and end, int64 `[intervals]`."""
        start, stop = rows
        x = self.rectangles
        x = x[(x[:, 0] < stop) & (x[:, 1] > start)]
        low, high = x[:, 0].clamp(min=start), x[:, 1].clamp(max=stop)
        height = high - low
        before = (height.cumsum(0) - height).repeat_interleave(height)
        query = low.repeat_interleave(height) + torch.arange(len(before)) - before
        k0, k1, lo, hi = x[:, 2:].repeat_interleave(height, 0).T
        first = torch.maximum(torch.maximum(k0, query + lo), self.within.first[query])
        end = torch.minimum(torch.minimum(k1, query + hi + 1), self.within.end[query])
        some = first < end
        return query[some] - start, first[some], end[some]


def _number(columns: Columns) -> int:
    return columns.stop - columns.start if isinstance(columns, slice) else len(columns)


@dataclass
class Reference:
    """values: out `[queries, H, Dv]`, dq `[queries, H, D]`, dk `[keys, Hk, D]`, dv `[keys, Hk, Dv]`, dsinks `[1, H, 1]`, lse
    `[queries, H]`; without a backward only out and lse. squares: for all but the LSE, the squared scale of each row's error
    without its own norm, `[tokens, heads]`. least: the smallest normal number of the checked dtype. For a subset of the
    queries, dk, dv, dsinks and their squares are that subset's share; the shares sum to the whole."""

    values: dict[str, Tensor]
    squares: dict[str, Tensor]
    least: float = 0.0

    def scales(self, name: str) -> Tensor:
        """The scale of each row's error, relative to the error of one term, `[tokens, heads]`; for the LSE of each value."""
        value = self.values[name]
        if name == "lse":
            return 1 + value.masked_fill(value == -torch.inf, 0).abs()
        return (self.squares[name] + value.square().sum(-1) + value.shape[-1] * self.least**2).sqrt_()

    def to(self, device: torch.device | str) -> Reference:
        values, squares = ({name: x.to(device) for name, x in kept.items()} for kept in (self.values, self.squares))
        return Reference(values, squares, self.least)

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in (*self.values.values(), *self.squares.values()))


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor | None,
    seen: Sees,
    scale: float,
    dtype: torch.dtype = torch.float64,
    scores: int = 1 << 26,
    rows: Sequence[Rows] | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Reference:
    """The reference of q `[queries, H, D]`, dout `[queries, H, Dv]`, k `[keys, Hk, D]` and v `[keys, Hk, Dv]` in the checked
    dtype, computed in `dtype`, with gradients if there is a `dout`. scale: of the scores. scores: about the most scores held at
    once. rows: compute only these queries; out, dq and the LSE hold them side by side. softcap: scaled scores x become
    `softcap * tanh(x / softcap)`. sinks: `[H]`, a score of each head beside those of all keys, with the value 0. Raises ValueError
    for numbers of tokens or heads that do not fit."""
    _check(q, k, seen)
    # results in other dtypes are never that small
    least = torch.finfo(q.dtype).smallest_normal if q.dtype == torch.float16 else 0.0
    kv_heads, group = k.shape[1], q.shape[1] // k.shape[1]
    sink = None if sinks is None else sinks.to(dtype).view(kv_heads, group)
    found = defaultdict(list)
    with exact_matmul():
        k_, v_ = (x.to(dtype).transpose(0, 1).contiguous() for x in (k, v))  # [Hk, keys, D]
        kk, vv = (x.square().sum(-1) for x in (k_, v_))  # [Hk, keys]
        of_keys = torch.stack([vv, vv * kk], -1)
        dk, dv, dkv2 = (torch.zeros_like(x) for x in (k_, v_, of_keys))
        dsinks = k_.new_zeros(2, kv_heads, group)  # and their squares
        for chunk in (each for all_ in rows or [(0, seen.queries)] for each in seen.chunks(all_, scores // q.shape[1])):
            keys = seen.columns(chunk)
            hidden = seen.hidden(chunk, keys, q.device)
            keys = keys if isinstance(keys, slice) else keys.to(q.device)
            q_ = _by_head(q[slice(*chunk)], dtype, kv_heads)  # [Hk, G * rows, D]
            of_rows = None if sink is None else sink.repeat_interleave(chunk[1] - chunk[0], 1).unsqueeze(-1)
            p, slope, lse = _softmax(q_, k_[:, keys], scale, softcap, hidden, of_rows)
            out = p @ v_[:, keys]
            p2 = ((p + least).mul_(p > 0) if least else p).square()
            out2, dq2 = (p2 @ of_keys[:, keys]).split(1, -1)
            parts = {"out": out, "lse": lse, "out2": out2}
            if dout is not None:
                dout_ = _by_head(dout[slice(*chunk)], dtype, kv_heads)
                oo, qq = (x.square().sum(-1, keepdim=True) for x in (dout_, q_))
                dkv2[:, keys] += p2.mT @ torch.cat([oo, oo * qq], -1)
                del p2
                dv[:, keys] += p.mT @ dout_
                ds, delta = _score_gradients(dout_, v_[:, keys], out, p, slope, scale)
                dk[:, keys] += ds.mT @ q_
                parts |= {"dq": ds @ k_[:, keys], "dq2": dq2 * oo}
                if of_rows is not None:
                    dsinks += _sink_gradients((of_rows - lse).exp(), delta, oo, out, out2, group)
            for name, x in parts.items():
                found[name].append(_by_token(x, group))
    unit = scale**2 / v.shape[2]  # the rounding of dout.v is about |dout| |v| / sqrt(Dv)
    sums = {} if dout is None else {"dk": (dk, dkv2[..., 1] * vv * unit), "dv": (dv, dkv2[..., 0])}
    rows_of = {name: torch.cat(parts) for name, parts in found.items()}
    return _named(rows_of, sums, None if sink is None else dsinks, unit, least)


def _check(q: Tensor, k: Tensor, seen: Sees) -> None:
    if (len(q), len(k)) != (seen.queries, seen.keys) or q.shape[1] % k.shape[1]:
        must = f"must be [{seen.queries}, H, D] and [{seen.keys}, Hk, D], H a multiple of Hk"
        raise ValueError(f"q {list(q.shape)}, k {list(k.shape)}: {must}")


def _named(
    of_rows: dict[str, Tensor],
    of_keys: dict[str, tuple[Tensor, Tensor]],
    dsinks: Tensor | None,
    unit: float,
    least: float,
) -> Reference:
    """The reference of all rows; without a backward `of_keys` is empty. of_keys: gradients `[Hk, keys, .]` and their squares
    `[Hk, keys]`. dsinks: and its squares, `[2, Hk, G]`. unit: of the squares of dq."""
    values, squares = {"out": of_rows["out"], "lse": of_rows["lse"].squeeze(-1)}, {"out": of_rows["out2"].squeeze(-1)}
    if of_keys:
        values["dq"], squares["dq"] = of_rows["dq"], of_rows["dq2"].squeeze(-1) * unit
        for name, (value, square) in of_keys.items():
            values[name], squares[name] = value.transpose(0, 1), square.T
        if dsinks is not None:
            values["dsinks"], squares["dsinks"] = dsinks[0].view(1, -1, 1), dsinks[1].view(1, -1)
    values, squares = ({name: x.contiguous() for name, x in kept.items()} for kept in (values, squares))
    return Reference(values, squares, least)


def _score_gradients(
    dout: Tensor, v: Tensor, out: Tensor, p: Tensor, slope: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """(the gradient of the scaled scores `[Hk, G * rows, keys]` times the scale, dout.out of each row)."""
    delta = (dout * out).sum(-1, keepdim=True)
    ds = (dout @ v.mT).sub_(delta).mul_(p).mul_(scale)
    return ds if slope is None else ds.mul_(slope), delta


def _sink_gradients(share: Tensor, delta: Tensor, oo: Tensor, out: Tensor, out2: Tensor, group: int) -> Tensor:
    """The sinks' gradient and its square of these rows, `[2, Hk, G]`. share: of the sink in each row's softmax."""
    error = share.square() * oo * (out.square().sum(-1, keepdim=True) + out2) / out.shape[-1]
    return torch.stack([-share * delta, error]).view(2, len(out), group, -1).sum(-1)


def _softmax(
    q: Tensor, k: Tensor, scale: float, softcap: float | None, hidden: Tensor | None, sink: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """(p `[Hk, G * rows, keys]`, the slope of the softcap at each score, LSE `[Hk, G * rows, 1]`): p is 0 in a row without keys, and
    the LSE that of the sink, without one -inf. sink: of each row, `[Hk, G * rows, 1]`."""
    s = torch.baddbmm(q.new_empty(()), q, k.mT, beta=0, alpha=scale)
    slope = None
    if softcap is not None:
        s.div_(softcap).tanh_()
        slope = 1 - s.square()
        s.mul_(softcap)
    if hidden is not None:
        s.unflatten(1, (-1, len(hidden))).masked_fill_(hidden, -torch.inf)
    top = s.amax(-1, keepdim=True) if s.shape[-1] else s.new_full((*s.shape[:-1], 1), -torch.inf)
    if sink is not None:
        top = torch.maximum(top, sink)
    p = s.sub_(top.masked_fill(top == -torch.inf, 0)).exp_()
    total = p.sum(-1, keepdim=True)
    if sink is not None:
        total = total + (sink - top).exp()
    return p.div_(total.masked_fill(total == 0, 1)), slope, top + total.log()


def _by_head(x: Tensor, dtype: torch.dtype, kv_heads: int) -> Tensor:
    """`[rows, H, D]` to `[Hk, G * rows, D]`."""
    return x.to(dtype).transpose(0, 1).reshape(kv_heads, -1, x.shape[-1])


def _by_token(x: Tensor, group: int) -> Tensor:
    """The inverse of `_by_head`: `[rows, H, D]`."""
    return x.reshape(x.shape[0] * group, -1, x.shape[-1]).transpose(0, 1)


@contextmanager
def exact_matmul() -> Iterator[None]:
    """Disables TF32 within the context."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
