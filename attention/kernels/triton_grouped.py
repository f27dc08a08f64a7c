"""Attention over nested prefixes in one Triton kernel: G chunks of queries ("groups") see nested prefixes of the same
keys, and a KV tile is read once for all groups that see it.

A program takes `rows` queries of every group, at the same place in each chunk. The prefixes are nested, so it walks the
longest once, and a group drops out where its prefix ends. The running softmax of every group is in registers. This
bounds the design: Hopper's matrix instruction needs 64 rows per four warps, and 256 rows of head dim 128 take half of
the register file. So `pack` neighbouring groups can share a tile (a "set") of `pack` times `rows` queries. A set is
computed until its last group ends: partly in vain, but at full rate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from attention.gpu.triton_launcher import MOST, TritonLauncher
from attention.gpu.uploads import held, uploaded
from attention.kernels.interface import Pair, settle
from attention.kernels.triton_softmax import LOG2E, add_tile, empty, store

MAX_SETS = 4  # whose accumulators the registers hold
HEAD_DIMS = (64, 128)


@dataclass(frozen=True)
class Tiling:
    """The tiles of a program: sets of `pack` groups by `rows` queries, against tiles of `keys` keys."""

    pack: int
    rows: int
    keys: int
    warps: int
    stages: int

    def sets(self, groups: int) -> int:
        return -(-groups // self.pack)


def tiling(groups: int, head_dim: int, itemsize: int) -> Tiling:
    """The default tiles: fp32 accumulators of at most 256 rows by head dim 128 over all sets, 128 registers per
    thread."""
    if itemsize > 2:  # no tensor cores: small tiles, for tests
        return Tiling(pack=1 if groups <= MAX_SETS else 2, rows=16, keys=16, warps=8, stages=2)
    sets = 2 if head_dim > 64 else MAX_SETS
    pack = 1
    while pack * sets < groups:
        pack *= 2
    return Tiling(pack=pack, rows=128 // pack, keys=64, warps=8, stages=3)


@triton.jit
def _walk(  # type: ignore[no-untyped-def]
    k, v, k_n, v_n, n_keys, d, start, stop, scale_log2, queries, seen, sums,
    FIRST: tl.constexpr, SETS: tl.constexpr, MASKED: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds the tiles of keys from `start` (a multiple of KEYS) to `stop` to the running softmaxes of the sets from FIRST on. For
    each set: its queries, for each of them the number of keys that it sees, and (top, total, acc). `top` is the maximum of the
    unscaled scores, so scaling and shifting are one fused multiply-add."""
    for at in range(start, stop, KEYS):
        key = at + tl.arange(0, KEYS)
        place = key.to(tl.int64)
        inside = (key < n_keys)[:, None] if MASKED else None
        other = 0.0 if MASKED else None
        k_t = tl.trans(tl.load(k + place[:, None] * k_n + d[None, :], mask=inside, other=other))
        v_ = tl.load(v + place[:, None] * v_n + d[None, :], mask=inside, other=other)
        after = ()
        for i in tl.static_range(SETS):
            top, total, acc = sums[i]
            if i >= FIRST:
                s = tl.dot(queries[i], k_t, input_precision=PRECISION)
                if MASKED:
                    s = tl.where(key[None, :] < seen[i][:, None], s, float("-inf"))
                top, total, acc = add_tile(s, v_, top, total, acc, scale_log2, MASKED, PRECISION)
            after = after + ((top, total, acc),)  # type: ignore[assignment]
        sums = after
    return sums


@triton.jit
def _rows(chunk, block, ends, first, GROUPS: tl.constexpr, PACK: tl.constexpr, ROWS: tl.constexpr, CAUSAL: tl.constexpr):  # type: ignore[no-untyped-def]  # fmt: skip
    """For each row of a set: the index of its query in q `[G * chunk]`, whether it exists, and how many keys it sees. first: the
    set's first group."""
    r = tl.arange(0, PACK * ROWS)
    group = first + r // ROWS
    i = block * ROWS + r % ROWS
    live = (group >= 0) & (group < GROUPS) & (i < chunk)
    end = tl.load(ends + group, mask=live, other=0)
    if CAUSAL:
        end = tl.minimum(end, end - chunk + i + 1)
    return group.to(tl.int64) * chunk + i, live, end


@triton.jit
def _grouped(  # type: ignore[no-untyped-def]
    q, k, v, ends, out, lse, scale_log2, chunk, n_keys, heads,
    q_b, q_t, q_h, k_b, k_n, k_h, v_b, v_n, v_h, out_b, out_t, out_h,
    GROUPS: tl.constexpr, GQA: tl.constexpr, PACK: tl.constexpr, SETS: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, HEAD_DIM: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # sets are filled from the end: a missing group costs least where the prefix is shortest
    PAD: tl.constexpr = SETS * PACK - GROUPS
    block = tl.num_programs(0) - 1 - tl.program_id(0)  # causal: the longest rows first
    h = tl.program_id(1).to(tl.int64)
    b = tl.program_id(2).to(tl.int64)
    q += b * q_b + h * q_h
    k += b * k_b + h // GQA * k_h
    v += b * v_b + h // GQA * v_h
    out += b * out_b + h * out_h
    lse += (b * heads + h) * chunk * GROUPS
    d = tl.arange(0, HEAD_DIM)
    places, lives, queries, seen, sums = (), (), (), (), ()
    for i in tl.static_range(SETS):
        place, live, end = _rows(chunk, block, ends, i * PACK - PAD, GROUPS, PACK, ROWS, CAUSAL)
        x = tl.load(q + place[:, None] * q_t + d[None, :], mask=live[:, None], other=0.0)
        places, lives, queries, seen = places + (place,), lives + (live,), queries + (x,), seen + (end,)  # type: ignore[assignment]
        sums = sums + (empty(PACK * ROWS, HEAD_DIM),)  # type: ignore[assignment]

    # phase P ends with set P: first the tiles that all rows of the remaining sets see, then those on the edge of set P
    at = 0
    for P in tl.static_range(SETS):
        low = tl.load(ends + (P * PACK - PAD if P * PACK > PAD else 0))
        stop = tl.load(ends + (P * PACK - PAD + PACK - 1))
        if CAUSAL:
            low = low - chunk + block * ROWS + 1
            stop = tl.minimum(stop, stop - chunk + block * ROWS + ROWS)
        whole = tl.maximum(low, 0) // KEYS * KEYS
        sums = _walk(
            k, v, k_n, v_n, n_keys, d, at, whole, scale_log2, queries, seen, sums, P, SETS, False, KEYS, PRECISION
        )
        at = tl.maximum(at, whole)
        sums = _walk(
            k, v, k_n, v_n, n_keys, d, at, stop, scale_log2, queries, seen, sums, P, SETS, True, KEYS, PRECISION
        )
        at = tl.maximum(at, tl.cdiv(tl.maximum(stop, 0), KEYS) * KEYS)

    for i in tl.static_range(SETS):
        top, total, acc = sums[i]  # type: ignore[var-annotated]
        out_at = out + places[i][:, None] * out_t + d[None, :]
        store(out_at, lse + places[i], top, total, acc, scale_log2, lives[i][:, None], lives[i])


def grouped_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ends: Sequence[int],
    scale: float,
    causal: bool = True,
    tiles: Tiling | None = None,
    into: Pair | None = None,
) -> Pair:
    """Attention of G chunks of queries over nested prefixes of the same keys.

    q: `[B, G * c, H, D]`, the chunks side by side; k, v: `[B, L, Hk, D]`; bf16, fp16 or fp32, D 64 or 128, the head dim
    contiguous. Chunk g sees the keys `[0, ends[g])`, causal ones aligned bottom-right in that prefix: query i sees the
    keys `j <= i + ends[g] - c`. G = len(ends), ends ascending to at most L. scale: positive. into: as in `Kernel`.

    Returns (out `[B, G * c, H, D]` in q's dtype, lse `[B, H, G * c]` in fp32, natural log); a query without keys gives
    0 and -inf."""
    batch, n_queries, heads, head_dim = q.shape
    out = into[0] if into else torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if into and into[1].is_contiguous():
        lse = into[1]
    else:
        lse = torch.empty((batch, heads, n_queries), dtype=torch.float32, device=q.device)
    strides = q.stride(), k.stride(), v.stride(), out.stride()
    tiles = tiles or tiling(len(ends), head_dim, q.element_size())
    start = _start(q.shape, k.shape, q.dtype, strides, len(ends), tiles, scale, causal)
    start(q, k, v, held(_on_device(tuple(ends), q.device), q.device), out, lse)
    return settle((out, lse), into)


@lru_cache(maxsize=MOST)
def _start(
    q_shape: torch.Size,
    k_shape: torch.Size,
    dtype: torch.dtype,
    strides: tuple[tuple[int, ...], ...],
    groups: int,
    tiles: Tiling,
    scale: float,
    causal: bool,
) -> TritonLauncher:
    """strides: of q, k, v and out."""
    batch, n_queries, heads, head_dim = q_shape
    chunk = n_queries // groups
    return TritonLauncher(
        _grouped,
        (triton.cdiv(chunk, tiles.rows), heads, batch),
        (scale * LOG2E, chunk, k_shape[1], heads, *(n for stride in strides for n in stride[:3])),
        GROUPS=groups,
        GQA=heads // k_shape[2],
        PACK=tiles.pack,
        SETS=tiles.sets(groups),
        ROWS=tiles.rows,
        KEYS=tiles.keys,
        HEAD_DIM=head_dim,
        CAUSAL=causal,
        PRECISION="ieee" if dtype == torch.float32 else "tf32",  # read for fp32 inputs only
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )


@lru_cache(maxsize=256)
def _on_device(ends: tuple[int, ...], device: torch.device) -> Tensor:
    """int32 `[G]`; cached, so that a repeated call copies nothing to the device."""
    return uploaded(np.array(ends, np.int32), device)
