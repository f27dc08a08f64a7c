"""Plain softmax attention, the reference of the correctness gate: forward, LSE and backward in fp64 or fp32, by chunks
of queries.

It shares no code with `attention`. The keys that a query sees follow from the workload alone (`Words`): for each query
the first key and the end of its keys. So packed batches, windows and decodes are one case.

It also gives the scale of each row's error. If every term `p_ij v_j` of a row of out has an independent relative error
of size u, the row's error in the L2 norm is about `u sqrt(sum_j p_ij^2 |v_j|^2)`, whatever the number of terms. The
same holds for dv over the queries, and for dq and dk, whose terms also contain the rounding of `dout.v`. The row's own
norm is added for its last rounding. Below the smallest normal number of a dtype (which matters in fp16) errors no
longer shrink with the term. Divided by this scale, the errors of a correct result are a few u, at any length."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

Rows = tuple[int, int]  # [start, stop)

LEAST_ROWS = 128  # queries per chunk, unless the scores of fewer fill the memory
BUSY = 0.75  # at least this share of a chunk's scores is visible under the mask


@dataclass(frozen=True)
class Words:
    """Which query sees which key: sequences side by side, whose queries and keys end together, and within each a window
    of (left, right) tokens back and ahead (-1: all); causal: none ahead. scale: of the scores."""

    q_lengths: tuple[int, ...]
    k_lengths: tuple[int, ...]
    scale: float
    causal: bool = False
    window: tuple[int, int] = (-1, -1)

    def seen(self) -> tuple[Tensor, Tensor]:
        """For each query the first key that it sees and the end of its keys (exclusive), int64 `[queries]` on the CPU;
        equal for a query without keys."""
        first, behind = [], []
        starts = accumulate(self.k_lengths, initial=0)
        left, right = self.window
        for n_q, n_k, start in zip(self.q_lengths, self.k_lengths, starts, strict=False):
            place = torch.arange(n_q) + (n_k - n_q)
            low = (place - left if left >= 0 else torch.zeros_like(place)).clamp(0, n_k)
            ahead = 0 if self.causal else right
            high = (place + ahead + 1 if ahead >= 0 else torch.full_like(place, n_k)).clamp(0, n_k)
            first.append(start + low)
            behind.append(start + torch.maximum(low, high))
        return torch.cat(first), torch.cat(behind)


@dataclass
class Reference:
    """values: out, dq `[queries, H, D]`, dk, dv `[keys, Hk, D]`, lse `[queries, H]`; without a backward only out and
    lse. squares: for all but the LSE, the squared scale of each row's error without its own norm, `[tokens, heads]`.
    least: the smallest normal number of the checked dtype.
    For a subset of the queries, dk, dv and their squares are that subset's share; the shares sum to the whole."""

    values: dict[str, Tensor]
    squares: dict[str, Tensor]
    least: float = 0.0

    def scales(self, name: str) -> Tensor:
        """The scale of each row's error, relative to the error of one term, `[tokens, heads]`; for the LSE of each
        value."""
        value = self.values[name]
        if name == "lse":
            return 1 + value.masked_fill(value == -torch.inf, 0).abs()
        return (self.squares[name] + value.square().sum(-1) + value.shape[-1] * self.least**2).sqrt_()

    def to(self, device: torch.device | str) -> Reference:
        values, squares = ({name: x.to(device) for name, x in kept.items()} for kept in (self.values, self.squares))
        return Reference(values, squares, self.least)

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for kept in (self.values, self.squares) for x in kept.values())


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor | None,
    words: Words,
    dtype: torch.dtype = torch.float64,
    scores: int = 1 << 26,
    rows: Sequence[Rows] | None = None,
) -> Reference:
    """The reference of q, dout `[queries, H, D]` and k, v `[keys, Hk, D]` in the checked dtype; computed in `dtype`,
    with gradients if there is a `dout`.

    scores: about the most scores held at once. rows: compute only these queries; out, dq and the LSE hold them side by
    side. Raises ValueError for numbers of tokens or heads that do not fit together."""
    if (len(q), len(k)) != (sum(words.q_lengths), sum(words.k_lengths)) or q.shape[1] % k.shape[1]:
        raise ValueError(
            f"q {list(q.shape)}, k {list(k.shape)}: must be [{sum(words.q_lengths)}, H, D] and "
            f"[{sum(words.k_lengths)}, Hk, D], H a multiple of Hk"
        )
    first, behind = words.seen()
    least = (
        torch.finfo(q.dtype).smallest_normal if q.dtype == torch.float16 else 0.0
    )  # other dtypes have no results that small
    rows = [(0, len(q))] if rows is None else rows
    kv_heads, head_dim = k.shape[1:]
    group = q.shape[1] // kv_heads
    with exact_matmul():
        k_, v_ = (x.to(dtype).transpose(0, 1).contiguous() for x in (k, v))  # [Hk, keys, D]
        kk, vv = (x.square().sum(-1) for x in (k_, v_))  # [Hk, keys]
        of_keys = torch.stack([vv, vv * kk], -1)
        found: dict[str, list[Tensor]] = {name: [] for name in ("out", "lse", "out2", "dq", "dq2")}
        dk, dv = torch.zeros_like(k_), torch.zeros_like(v_)
        dkv2 = torch.zeros_like(of_keys)
        for a, b in (chunk for each in rows for chunk in _chunks(first, behind, each, scores // q.shape[1])):
            c, d = int(first[a:b].min()), int(behind[a:b].max())
            flat = (kv_heads, group * (b - a), -1)
            q_ = _by_head(q[a:b], dtype, kv_heads)  # [Hk, G * rows, D]
            s = torch.baddbmm(q_.new_empty(()), q_, k_[:, c:d].mT, beta=0, alpha=words.scale)  # [Hk, G * rows, keys]
            hidden = _hidden(first[a:b], behind[a:b], (c, d), q.device)
            if hidden is not None:
                s.view(kv_heads, group, b - a, d - c).masked_fill_(hidden, -torch.inf)
            top = s.amax(-1, keepdim=True) if d > c else s.new_full((*s.shape[:-1], 1), -torch.inf)
            p = s.sub_(top.masked_fill(top == -torch.inf, 0)).exp_()
            total = p.sum(-1, keepdim=True)
            lse = (top + total.log()).view(kv_heads, group, b - a)
            p.div_(total.masked_fill(total == 0, 1))
            out = p @ v_[:, c:d]
            p2 = ((p + least).mul_(p > 0) if least else p).square()
            out2, dq2 = (p2 @ of_keys[:, c:d]).view(*flat[:2], 2).unbind(-1)
            found["out"].append(_by_token(out, group))
            found["lse"].append(lse.flatten(0, 1).T)
            found["out2"].append(_by_token(out2.unsqueeze(-1), group).squeeze(-1))
            if dout is None:
                continue
            dout_ = _by_head(dout[a:b], dtype, kv_heads)
            oo, qq = (x.square().sum(-1) for x in (dout_, q_))
            dkv2[:, c:d] += p2.mT @ torch.stack([oo, oo * qq], -1)
            del p2
            dv[:, c:d] += p.mT @ dout_
            ds = dout_ @ v_[:, c:d].mT
            ds.sub_((dout_ * out).sum(-1, keepdim=True)).mul_(p).mul_(words.scale)
            found["dq"].append(_by_token(ds @ k_[:, c:d], group))
            found["dq2"].append(_by_token((dq2 * oo).unsqueeze(-1), group).squeeze(-1))
            dk[:, c:d] += ds.mT @ q_
    values = {name: torch.cat(found[name]) for name in ("out", "lse")}
    squares = {"out": torch.cat(found["out2"])}
    if dout is not None:
        unit = words.scale**2 / head_dim  # the rounding of dout.v is about |dout| |v| / sqrt(D)
        values |= {"dq": torch.cat(found["dq"]), "dk": dk.transpose(0, 1), "dv": dv.transpose(0, 1)}
        squares |= {
            "dq": torch.cat(found["dq2"]) * unit,
            "dk": (dkv2[..., 1] * vv * unit).T,
            "dv": dkv2[..., 0].T,
        }
    values, squares = ({name: x.contiguous() for name, x in kept.items()} for kept in (values, squares))
    return Reference(values, squares, least)


def _by_head(x: Tensor, dtype: torch.dtype, kv_heads: int) -> Tensor:
    """`[rows, H, D]` to `[Hk, G * rows, D]`."""
    return x.to(dtype).transpose(0, 1).reshape(kv_heads, -1, x.shape[-1])


def _by_token(x: Tensor, group: int) -> Tensor:
    """The inverse of `_by_head`: `[rows, H, D]`."""
    return x.reshape(x.shape[0] * group, -1, x.shape[-1]).transpose(0, 1)


def _chunks(first: Tensor, behind: Tensor, rows: Rows, scores: int) -> Iterator[Rows]:
    """The rows in chunks of at most `scores` scores per head, of which the mask hides few."""
    start, stop = rows
    seen = (behind - first).cumsum(0)
    while start < stop:
        n = stop - start
        while n > 1:
            last = start + n - 1
            held = n * int(behind[last] - first[start])
            visible = int(seen[last] - seen[start] + behind[start] - first[start])
            if held <= scores and (n <= LEAST_ROWS or visible >= BUSY * held):
                break
            n = (n + 1) // 2
        yield start, start + n
        start += n


def _hidden(first: Tensor, behind: Tensor, keys: Rows, device: torch.device) -> Tensor | None:
    """The pairs that the mask hides, bool `[rows, keys]`; None where it hides none."""
    if int(first.max()) <= keys[0] and int(behind.min()) >= keys[1]:
        return None
    place = torch.arange(*keys, device=device)
    low, high = (x.to(device).unsqueeze(-1) for x in (first, behind))
    return (place < low) | (place >= high)


@contextmanager
def exact_matmul() -> Iterator[None]:
    """Disables TF32 within the context."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
