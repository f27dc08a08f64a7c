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
from attention.kernels.aten import name_of
from attention.kernels.interface import Pair, settle
from attention.kernels.triton_decode import dtype_rule
from attention.reduction.lse_merge import empty_result

MAX_GROUPS = 8
MAX_SETS = 4
HEAD_DIMS = (64, 128)
LOG2E = 1.4426950408889634
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)


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
def _attend(q, k_t, v, top, total, acc, seen, key, scale_log2, MASKED: tl.constexpr, PRECISION: tl.constexpr):  # type: ignore[no-untyped-def]
    """Adds one tile of keys to the running softmax of one set; row i sees the keys below `seen[i]`. `top` is the
    maximum of the unscaled scores, so scaling and shifting are one fused multiply-add."""
    s = tl.dot(q, k_t, input_precision=PRECISION)
    if MASKED:
        s = tl.where(key[None, :] < seen[:, None], s, float("-inf"))
    higher = tl.maximum(top, tl.max(s, 1))
    if MASKED:
        base = tl.where(higher == float("-inf"), 0.0, higher * scale_log2)
    else:
        base = higher * scale_log2
    p = tl.exp2(s * scale_log2 - base[:, None])
    shrink = tl.exp2(top * scale_log2 - base)
    total = total * shrink + tl.sum(p, 1)
    acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
    return higher, total, acc


@triton.jit
def _walk(  # type: ignore[no-untyped-def]
    k, v, k_n, v_n, n_keys, start, stop, scale_log2, q, seen, sums,
    FIRST: tl.constexpr, SETS: tl.constexpr, MASKED: tl.constexpr, KEYS: tl.constexpr, HEAD_DIM: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds the tiles of keys from `start` (a multiple of KEYS) to `stop` to the sets FIRST .. SETS - 1. q, seen, sums: of
    each set."""
    d = tl.arange(0, HEAD_DIM)
    for at in range(start, stop, KEYS):
        key = at + tl.arange(0, KEYS)
        place = key.to(tl.int64)
        k_at = k + place[:, None] * k_n + d[None, :]
        v_at = v + place[:, None] * v_n + d[None, :]
        if MASKED:
            k_t = tl.trans(tl.load(k_at, mask=(key < n_keys)[:, None], other=0.0))
            v_ = tl.load(v_at, mask=(key < n_keys)[:, None], other=0.0)
        else:
            k_t = tl.trans(tl.load(k_at))
            v_ = tl.load(v_at)
        after = ()
        for i in tl.static_range(SETS):
            top, total, acc = sums[i]
            if i >= FIRST:
                top, total, acc = _attend(q[i], k_t, v_, top, total, acc, seen[i], key, scale_log2, MASKED, PRECISION)
            after = after + ((top, total, acc),)  # type: ignore[assignment]
        sums = after
    return sums


@triton.jit
def _place(chunk, block, ends, GROUPS: tl.constexpr, SET: tl.constexpr, PACK: tl.constexpr, PAD: tl.constexpr, ROWS: tl.constexpr, CAUSAL: tl.constexpr):  # type: ignore[no-untyped-def]  # fmt: skip
    """For each row of a set: the index of its query in q `[G * chunk]`, whether it exists, and how many keys it sees.
    Sets are filled from the end: a missing group costs least where the prefix is shortest."""
    r = tl.arange(0, PACK * ROWS)
    group = SET * PACK - PAD + r // ROWS
    i = block * ROWS + r % ROWS
    live = (group >= 0) & (group < GROUPS) & (i < chunk)
    end = tl.load(ends + group, mask=live, other=0)
    if CAUSAL:
        seen = tl.minimum(end, end - chunk + i + 1)
    else:
        seen = end
    return group.to(tl.int64) * chunk + i, live, seen


@triton.jit
def _bounds(chunk, block, ends, SET: tl.constexpr, PACK: tl.constexpr, PAD: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, CAUSAL: tl.constexpr):  # type: ignore[no-untyped-def]  # fmt: skip
    """For a set: the multiple of KEYS below which every row sees every key, and the first key that no row sees."""
    first: tl.constexpr = SET * PACK - PAD if SET * PACK > PAD else 0
    last: tl.constexpr = SET * PACK - PAD + PACK - 1
    low = tl.load(ends + first)
    high = tl.load(ends + last)
    if CAUSAL:
        low = low - chunk + block * ROWS + 1
        high = tl.minimum(high, high - chunk + block * ROWS + ROWS)
    return tl.maximum(low, 0) // KEYS * KEYS, high


@triton.jit
def _set(  # type: ignore[no-untyped-def]
    q, q_t, chunk, block, ends,
    GROUPS: tl.constexpr, SET: tl.constexpr, PACK: tl.constexpr, PAD: tl.constexpr, ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """The queries of a set, the number of keys that each sees, and (top, total, acc) of an empty softmax."""
    at, live, seen = _place(chunk, block, ends, GROUPS, SET, PACK, PAD, ROWS, CAUSAL)
    d = tl.arange(0, HEAD_DIM)
    x = tl.load(q + at[:, None] * q_t + d[None, :], mask=live[:, None], other=0.0)
    top = tl.full([PACK * ROWS], float("-inf"), tl.float32)
    return x, seen, (top, tl.zeros([PACK * ROWS], tl.float32), tl.zeros([PACK * ROWS, HEAD_DIM], tl.float32))


@triton.jit
def _store(  # type: ignore[no-untyped-def]
    out, lse, out_t, sums, scale_log2, chunk, block, ends,
    GROUPS: tl.constexpr, SET: tl.constexpr, PACK: tl.constexpr, PAD: tl.constexpr, ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    at, live, _ = _place(chunk, block, ends, GROUPS, SET, PACK, PAD, ROWS, CAUSAL)
    top, total, acc = sums
    d = tl.arange(0, HEAD_DIM)
    norm = tl.where(total == 0.0, 1.0, total)
    tl.store(out + at[:, None] * out_t + d[None, :], (acc / norm[:, None]).to(out.dtype.element_ty), mask=live[:, None])
    tl.store(lse + at, tl.where(total == 0.0, top, (top * scale_log2 + tl.log2(norm)) * LN2), mask=live)


@triton.jit
def _grouped(  # type: ignore[no-untyped-def]
    q, k, v, ends, out, lse, scale_log2, chunk, n_keys, heads,
    q_b, q_t, q_h, k_b, k_n, k_h, v_b, v_n, v_h, out_b, out_t, out_h,
    GROUPS: tl.constexpr, GQA: tl.constexpr, PACK: tl.constexpr, SETS: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, HEAD_DIM: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    PAD: tl.constexpr = SETS * PACK - GROUPS
    block = tl.num_programs(0) - 1 - tl.program_id(0)  # causal: the longest rows first
    h = tl.program_id(1).to(tl.int64)
    b = tl.program_id(2).to(tl.int64)
    q += b * q_b + h * q_h
    k += b * k_b + h // GQA * k_h
    v += b * v_b + h // GQA * v_h
    out += b * out_b + h * out_h
    lse += (b * heads + h) * chunk * GROUPS
    queries, seen, sums = (), (), ()
    for i in tl.static_range(SETS):
        of_set = _set(q, q_t, chunk, block, ends, GROUPS, i, PACK, PAD, ROWS, HEAD_DIM, CAUSAL)
        queries, seen, sums = queries + (of_set[0],), seen + (of_set[1],), sums + (of_set[2],)  # type: ignore[assignment]

    # phase P ends with set P: first the tiles that all rows of the remaining sets see, then those on the edge of set P
    at = 0
    for P in tl.static_range(SETS):
        whole, stop = _bounds(chunk, block, ends, P, PACK, PAD, ROWS, KEYS, CAUSAL)
        sums = _walk(k, v, k_n, v_n, n_keys, at, whole, scale_log2, queries, seen, sums, P, SETS, False, KEYS, HEAD_DIM, PRECISION)  # fmt: skip
        at = tl.maximum(at, whole)
        sums = _walk(k, v, k_n, v_n, n_keys, at, stop, scale_log2, queries, seen, sums, P, SETS, True, KEYS, HEAD_DIM, PRECISION)  # fmt: skip
        at = tl.maximum(at, tl.cdiv(tl.maximum(stop, 0), KEYS) * KEYS)

    for i in tl.static_range(SETS):
        _store(out, lse, out_t, sums[i], scale_log2, chunk, block, ends, GROUPS, i, PACK, PAD, ROWS, HEAD_DIM, CAUSAL)


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
    keys `j <= i + ends[g] - c`. G = len(ends), at most 8, ends ascending. into: as in `Kernel`.

    Returns (out `[B, G * c, H, D]` in q's dtype, lse `[B, H, G * c]` in fp32, natural log); a query without keys gives
    0 and -inf. Raises ValueError for other shapes, dtypes, strides or ends."""
    groups = len(ends)
    _check(q, k, v, ends, scale)
    batch, n_queries, heads, head_dim = q.shape
    if q.numel() == 0 or ends[-1] == 0:
        out, lse = empty_result(q)
        return settle((out.to(q.dtype), lse), into)
    tiles = tiles or tiling(groups, head_dim, q.element_size())
    sets = tiles.sets(groups)
    if sets > MAX_SETS:
        raise ValueError(f"pack={tiles.pack} for {groups} groups makes {sets} sets: at most {MAX_SETS}; raise pack")
    out = into[0] if into else torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if into and into[1].is_contiguous():
        lse = into[1]
    else:
        lse = torch.empty((batch, heads, n_queries), dtype=torch.float32, device=q.device)
    strides = q.stride(), k.stride(), v.stride(), out.stride()
    start = _start(q.shape, k.shape, q.dtype, strides, groups, tiles, scale, causal)
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
        (scale * LOG2E, chunk, k_shape[1], heads, *(n for each in strides for n in each[:3])),
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


def _check(q: Tensor, k: Tensor, v: Tensor, ends: Sequence[int], scale: float) -> None:
    given = list(ends)
    if not 1 <= len(given) <= MAX_GROUPS:
        raise ValueError(f"{len(given)} groups: 1 to {MAX_GROUPS} only; make fewer groups, or take grouping=separate")
    if q.shape[1] % len(given):
        raise ValueError(
            f"{q.shape[1]} queries in {len(given)} groups: must be a multiple; pad the chunks to one length"
        )
    if given[0] < 0 or given != sorted(given) or given[-1] > k.shape[1]:
        raise ValueError(
            f"ends={given}: must ascend from 0 to at most the {k.shape[1]} keys; order the groups by prefix"
        )
    if not q.dtype == k.dtype == v.dtype:
        dtypes = ", ".join(name_of(x.dtype) for x in (q, k, v))
        raise ValueError(f"dtypes {dtypes}: q, k and v must have one; cast them")
    wrong = dtype_rule(q.dtype, q.device.type)
    if wrong:
        raise ValueError(f"{wrong}; cast q, k and v, or take grouping=separate")
    if k.shape != v.shape or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3] or q.shape[2] % k.shape[2]:
        raise ValueError(
            f"shapes {list(q.shape)}, {list(k.shape)}, {list(v.shape)}: must be q [B, G * c, H, D], k and v "
            "[B, L, Hk, D] with H a multiple of Hk"
        )
    if q.shape[3] not in HEAD_DIMS:
        raise ValueError(f"head_dim={q.shape[3]}: 64 and 128 only; take grouping=separate")
    if any(x.stride(-1) != 1 for x in (q, k, v)):
        raise ValueError(
            f"strides {q.stride()}, {k.stride()}, {v.stride()}: the head dim must be contiguous; call .contiguous()"
        )
    if scale <= 0:
        raise ValueError(f"scale={scale}: must be positive; for a negative scale, negate q")
