"""`decode`: flash-decoding, for few queries against many keys. With one query a flash kernel has only as many programs
as heads. Here the keys are split: a program takes one split of one KV head for all queries that share it, and `merge_n`
merges the splits. Forward only. A window's programs read its keys alone. Batch elements may have different numbers of keys, which the
kernel reads on the GPU.

Source: Dao et al., "Flash-Decoding for long-context inference" (2023)."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from attention.errors import UnsupportedCall
from attention.gpu.triton_launcher import MOST, TritonLauncher
from attention.kernels.aten import HALF, name_of
from attention.kernels.fit import fit, without_autocast
from attention.kernels.interface import Call, Kernel, Pair, Shape, Triple, settle
from attention.masks.band import Band
from attention.ops.merge_n import merge_n_triton
from attention.reduction.lse_merge import empty_result, result_tensors
from attention.tensors import result_like

FAR = 1 << 30  # keys: a wider window cuts nothing
MOST_DIM = 256  # D and Dv
MAX_ROWS = 64  # queries per program: a larger accumulator costs the occupancy that hides the loads
MAX_ROWS_FP32 = 16  # without tensor cores the operands are in registers, too
STAGE_BYTES = 32768  # K and V of one stage
STAGES = 4  # in flight, where shared memory holds them, else 3
FOUR_STAGES_BYTES = 112 << 10  # shared memory that four stages take, rounded up
SHORTEST_SPLIT = 256  # keys: below it, writing and merging the partial results outweighs the parallelism
BUSY = 0.95  # average share of busy SMs from which more splits gain nothing
LOG2E = 1.4426950408889634
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)


@triton.jit
def _tanh(x):  # type: ignore[no-untyped-def]
    """To a relative 3e-7: near 0, where the quotient cancels, by its series."""
    e = tl.exp(-2.0 * tl.abs(x))
    far = (1.0 - e) / (1.0 + e)
    x2 = x * x
    near = x * (1.0 + x2 * (-1 / 3 + x2 * (2 / 15 + x2 * (-17 / 315 + x2 * (62 / 2835)))))
    return tl.where(tl.abs(x) < 0.25, near, tl.where(x < 0.0, -far, far))


@triton.jit
def _keys(  # type: ignore[no-untyped-def]
    length, n_keys, split, split_keys, first_key, all_keys, left, n_queries,
    LENGTHS: tl.constexpr, LEFT: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The keys `[start, stop)` of a split, and where the last query lies, plus 1."""
    end = n_keys
    if LENGTHS:
        end = tl.minimum(tl.maximum(tl.load(length).to(tl.int32), 0), all_keys) - first_key
    first_seen = 0
    if LEFT:
        first_seen = tl.maximum(end - n_queries - left, 0)
    stop = tl.minimum(n_keys, end)
    if LENGTHS:  # each element has as many splits, of its own keys
        share = tl.cdiv(tl.maximum(stop - first_seen, 0), tl.num_programs(1))
        split_keys = tl.cdiv(share, BLOCK_N) * BLOCK_N
    start = first_seen + split * split_keys
    return start, tl.minimum(start + split_keys, stop), end


@triton.jit
def _seen(  # type: ignore[no-untyped-def]
    s, key, stop, place, scale_log2, cap_log2, per_cap, left, right,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """The scores in base 2, -inf for keys that a query does not see. place: of each query."""
    if SOFTCAP:
        s = _tanh(s * per_cap) * cap_log2
    else:
        s = s * scale_log2
    seen = (key < stop)[None, :]
    if LEFT:
        seen = seen & (key[None, :] >= place[:, None] - left)
    if RIGHT:
        seen = seen & (key[None, :] <= place[:, None] + right)
    return tl.where(seen, s, float("-inf"))


@triton.jit
def _split(  # type: ignore[no-untyped-def]
    q, k, v, out, lse, lengths, n_keys, split_keys, first_key, all_keys, scale_log2, cap_log2, per_cap, left, right,
    lengths_b, n_queries, row_blocks, q_b, q_t, q_h, k_b, k_n, k_h, v_b, v_n, v_h, out_p, out_b, out_t, out_h,
    lse_p, lse_b, lse_h, lse_t,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, LENGTHS: tl.constexpr, LEFT: tl.constexpr,
    RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    # KV heads vary fastest: concurrent programs read neighbouring heads of the same keys
    kv_head = (tl.program_id(0) // row_blocks).to(tl.int64)
    split = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    row = (tl.program_id(0) % row_blocks) * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_V)
    live = row < n_queries * GROUP
    t = (row // GROUP).to(tl.int64)
    h = kv_head * GROUP + row % GROUP
    q_at = q + b * q_b + t[:, None] * q_t + h[:, None] * q_h + d[None, :]
    q_ = tl.load(q_at, mask=live[:, None] & (d < HEAD_DIM)[None, :], other=0.0)

    start, stop, end = _keys(
        lengths + b * lengths_b, n_keys, split, split_keys, first_key, all_keys, left, n_queries, LENGTHS, LEFT, BLOCK_N
    )
    place = end - n_queries + row // GROUP  # of each query
    key = tl.arange(0, BLOCK_N)
    first = start.to(tl.int64)
    k_at = k + b * k_b + kv_head * k_h + first * k_n + key[:, None].to(tl.int64) * k_n + d[None, :]
    v_at = v + b * v_b + kv_head * v_h + first * v_n + key[:, None].to(tl.int64) * v_n + dv[None, :]
    step = tl.full([], BLOCK_N, tl.int64)

    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    for at in range(start, stop, BLOCK_N):
        inside = at + key < stop
        k_ = tl.load(k_at, mask=inside[:, None] & (d < HEAD_DIM)[None, :], other=0.0)
        s = tl.dot(q_, tl.trans(k_), input_precision=PRECISION)
        s = _seen(s, at + key, stop, place, scale_log2, cap_log2, per_cap, left, right, LEFT, RIGHT, SOFTCAP)
        higher = tl.maximum(top, tl.max(s, 1))
        safe = tl.where(higher == float("-inf"), 0.0, higher)  # a query may have seen no key yet
        p = tl.exp2(s - safe[:, None])
        shrink = tl.exp2(top - safe)
        total = total * shrink + tl.sum(p, 1)
        v_ = tl.load(v_at, mask=inside[:, None] & (dv < VALUE_DIM)[None, :], other=0.0)
        acc = tl.dot(p.to(v_.dtype), v_, acc * shrink[:, None], input_precision=PRECISION)
        top = higher
        k_at += step * k_n
        v_at += step * v_n

    norm = tl.where(total == 0.0, 1.0, total)
    out_at = out + split.to(tl.int64) * out_p + b * out_b + t[:, None] * out_t + h[:, None] * out_h + dv[None, :]
    kept = live[:, None] & (dv < VALUE_DIM)[None, :]
    tl.store(out_at, (acc / norm[:, None]).to(out.dtype.element_ty), mask=kept)
    lse_at = lse + split.to(tl.int64) * lse_p + b * lse_b + h * lse_h + t * lse_t
    tl.store(lse_at, tl.where(total == 0.0, float("-inf"), (top + tl.log2(norm)) * LN2), mask=live)


def missing(device: str) -> str | None:
    """Why Triton kernels cannot run on `device`, or None."""
    if device == "cuda" or os.environ.get("TRITON_INTERPRET") == "1":
        return None
    return "needs a CUDA GPU, or TRITON_INTERPRET=1 set before the start to run it slowly on a CPU"


def dtype_rule(dtype: torch.dtype, device: str) -> str | None:
    """Why our kernels do not take `dtype` on `device`, or None. Triton's interpreter (3.6 to 3.9) multiplies bf16
    wrongly, as integers."""
    if device == "cuda":
        return None if dtype in (*HALF, torch.float32) else f"dtype={name_of(dtype)}: bf16, fp16 and fp32 only"
    return (
        None
        if dtype in (torch.float16, torch.float32)
        else f"dtype={name_of(dtype)}: under Triton's interpreter fp16 and fp32 only"
    )


class DecodeKernel(Kernel):
    name = "decode"
    summary = "flash-decoding in Triton: keys split among programs, for few queries; forward only"
    align = 1
    features = frozenset({"softcap", "v_head_dim", "kv_lengths"})

    def missing(self, device: str) -> str | None:
        return missing(device)

    def refuses(self, shape: Shape, mask: Band) -> str | None:
        if shape.packed:
            return "packed: dense calls only"
        if shape.backward:
            return "backward: forward only, for decoding without gradients"
        wrong = dtype_rule(shape.dtype, shape.device)
        if wrong:
            return wrong
        for name in ("head_dim", "v_head_dim"):
            if (n := getattr(shape, name)) > MOST_DIM:
                return f"{name}={n}: up to {MOST_DIM} only"
        return None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call, into: Pair | None) -> Pair:
        _check_call(call)
        return decode(q, k, v, call, into=into)

    @without_autocast
    def splits(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Pair:
        _check_call(call)
        q, k, v = fit((q, k, v), self.align)
        _check(q, k, v)
        return _splits(q, k, v, call)

    def backward(self, *_: Any, **__: Any) -> Triple:
        raise UnsupportedCall("kernel=decode: forward only; for gradients take another kernel, or kernel=auto")


def decode(q: Tensor, k: Tensor, v: Tensor, call: Call, splits: int | None = None, into: Pair | None = None) -> Pair:
    """Attention of few queries under a band: (out `[B, Sq, H, Dv]` in q's dtype, lse `[B, H, Sq]` in fp32, natural log).

    q: `[B, Sq, H, D]`; k: `[B, N, Hk, D]`; v: `[B, N, Hk, Dv]`; N >= 0, any strides with a contiguous head dim; bf16, fp16
    or fp32, D and Dv up to 256. A query that sees no key has out 0 and lse -inf. call: dense, also with `Call.lengths`.
    splits: the most pieces that the keys are cut into, by default enough to fill the GPU.
    into: as in `Kernel`; an fp32 out is a partial result, to be merged with others.

    Raises ValueError for other shapes, dtypes or strides."""
    _check(q, k, v)
    if k.shape[1] == 0 or q.numel() == 0:
        out, lse = empty_result(result_like(q, v))
        return settle((out.to(q.dtype), lse), into)
    parts, lses = _splits(q, k, v, call, splits, into, q.dtype)
    if parts.shape[0] == 1:
        return into or (parts[0], lses[0])
    out, lse = into or result_tensors(parts, lses, q.dtype)
    merge_n_triton(parts, lses, out, lse)
    return out, lse


def _splits(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    call: Call,
    splits: int | None = None,
    into: Pair | None = None,
    single: torch.dtype = torch.float32,
) -> Pair:
    """The partial results of at most `splits` pieces of the keys, `[n, B, Sq, H, Dv]` in fp32, and their LSEs. A single
    one is in `into`, or in the dtype `single`."""
    batch, n_queries, heads, _ = q.shape
    n_keys, kv_heads, value_dim = k.shape[1], k.shape[2], v.shape[3]
    tiles = _tiles(q.shape, kv_heads, value_dim, q.dtype)
    reach = n_keys if call.mask.left < 0 else min(n_keys, call.mask.left + n_queries)  # the most keys that are read
    if splits is None:
        programs, uneven = batch * kv_heads * tiles.row_blocks, batch > 1 and call.lengths is not None
        splits = (most_splits if uneven else split_count)(reach, programs, multiprocessors(q.device))
    split_keys = max(triton.cdiv(triton.cdiv(reach, splits), tiles.keys), 1) * tiles.keys
    splits = triton.cdiv(reach, split_keys)  # none is empty, but where lengths or a rank's end leave less
    if into is not None and splits == 1:
        parts, lses = (x.unsqueeze(0) for x in into)
    else:
        dtype = single if splits == 1 else torch.float32
        parts = torch.empty((splits, *q.shape[:3], value_dim), dtype=dtype, device=q.device)
        lses = torch.empty((splits, batch, heads, n_queries), dtype=torch.float32, device=q.device)
    if parts.numel():
        # the batch stride of a batch of one changes with a growing KV cache; as 0 it needs no new launcher
        strides = tuple([(0, *x.stride()[1:]) if batch == 1 else x.stride() for x in (q, k, v)])
        strides += parts.stride(), lses.stride()
        lengths, first, total = (lses, 0, 0) if call.lengths is None else call.lengths
        stride = None if call.lengths is None else lengths.stride(0)
        of = _Launched(q.shape, kv_heads, value_dim, q.dtype, call.scale, call.mask, call.softcap, stride)
        start = _start(of, strides, splits, stages_on(q.device))
        start(q, k, v, parts, lses, lengths, changing=(n_keys, split_keys, first, total))
    return parts, lses


@dataclass(frozen=True)
class _Tiles:
    """The tile of one program: `rows` of the queries times the heads of one KV head, `keys` keys at a time."""

    rows: int
    row_blocks: int
    keys: int
    head_dim: int
    value_dim: int


@lru_cache
def _tiles(shape: torch.Size, kv_heads: int, value_dim: int, dtype: torch.dtype) -> _Tiles:
    _, n_queries, heads, head_dim = shape
    rows = n_queries * (heads // kv_heads)
    most = MAX_ROWS_FP32 if dtype == torch.float32 else MAX_ROWS
    block_m = min(most, max(16, triton.next_power_of_2(rows)))
    block_d, block_v = (max(16, triton.next_power_of_2(n)) for n in (head_dim, value_dim))
    keys = STAGE_BYTES // ((block_d + block_v) * dtype.itemsize)
    block_n = min(128, max(16, 1 << (keys.bit_length() - 1)))
    return _Tiles(block_m, triton.cdiv(rows, block_m), block_n, block_d, block_v)


class _Launched(NamedTuple):
    """What a launch depends on beside strides and splits; `shape` is that of q."""

    shape: torch.Size
    kv_heads: int
    value_dim: int
    dtype: torch.dtype
    scale: float
    mask: Band
    softcap: float | None
    lengths: int | None  # their stride


@lru_cache(maxsize=MOST)
def _start(of: _Launched, strides: tuple[tuple[int, ...], ...], splits: int, stages: int) -> TritonLauncher:
    """strides: of q, k, v, the parts and their LSEs."""
    batch, n_queries, heads, head_dim = of.shape
    tiles, group = _tiles(of.shape, of.kv_heads, of.value_dim, of.dtype), heads // of.kv_heads
    fp32 = of.dtype == torch.float32
    of_q, of_k, of_v, of_parts, of_lses = strides
    cap = of.softcap or 1.0
    return TritonLauncher(
        _split,
        (of.kv_heads * tiles.row_blocks, splits, batch),
        (
            of.scale * LOG2E,
            cap * LOG2E,
            of.scale / cap,
            min(of.mask.left, FAR),
            min(of.mask.right, FAR),
            of.lengths or 0,
            n_queries,
            tiles.row_blocks,
            *of_q[:3],
            *of_k[:3],
            *of_v[:3],
            *of_parts[:4],
            *of_lses,
        ),
        GROUP=group,
        HEAD_DIM=head_dim,
        VALUE_DIM=of.value_dim,
        LENGTHS=of.lengths is not None,
        LEFT=of.mask.left >= 0,
        RIGHT=0 <= of.mask.right < n_queries - 1,  # else the first query sees the last key
        SOFTCAP=of.softcap is not None,
        PRECISION="ieee" if fp32 else "tf32",  # read for fp32 inputs only
        BLOCK_M=tiles.rows,
        BLOCK_N=tiles.keys,
        BLOCK_D=tiles.head_dim,
        BLOCK_V=tiles.value_dim,
        num_warps=8 if fp32 else 4,
        num_stages=stages,
    )


def split_count(n_keys: int, programs: int, n_sm: int) -> int:
    """The number of pieces to cut `n_keys` keys into. Each piece is `programs` programs on a GPU of `n_sm` SMs; an SM
    reads as fast with one program as with two."""
    return _split_count(most_splits(n_keys, programs, n_sm), programs, n_sm)


def most_splits(n_keys: int, programs: int, n_sm: int) -> int:
    """The most pieces that are worth their merge. Batch elements of different lengths are cut into so many: with a few
    programs for each SM, the longest element takes hardly more than its share."""
    return min(triton.cdiv(4 * n_sm, programs), max(1, n_keys // SHORTEST_SPLIT))


@lru_cache
def _split_count(most: int, programs: int, n_sm: int) -> int:
    """The fewest pieces, up to `most`, that keep the SMs busy; else those that keep them busiest."""

    def busy(splits: int) -> float:
        return programs * splits / (triton.cdiv(programs * splits, n_sm) * n_sm)

    return next((n for n in range(1, most + 1) if busy(n) >= BUSY), max(range(1, most + 1), key=busy))


@lru_cache
def multiprocessors(device: torch.device) -> int:
    """SMs of a GPU; 1 under Triton's interpreter, which runs one program at a time."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@lru_cache
def stages_on(device: torch.device) -> int:
    if device.type != "cuda":
        return STAGES
    properties = torch.cuda.get_device_properties(device)
    available = getattr(properties, "shared_memory_per_block_optin", FOUR_STAGES_BYTES)
    return STAGES if available >= FOUR_STAGES_BYTES else STAGES - 1


def _check_call(call: Call) -> None:
    if call.packed or call.pattern is not None:
        what = "packed" if call.packed else "a pattern"
        raise UnsupportedCall(f"kernel=decode: {what}: dense calls under a band only; take another kernel")


def _check(q: Tensor, k: Tensor, v: Tensor) -> None:
    if not q.dtype == k.dtype == v.dtype:
        given = ", ".join(name_of(x.dtype) for x in (q, k, v))
        raise ValueError(f"dtypes {given}: q, k and v must have one; cast them")
    wrong = dtype_rule(q.dtype, q.device.type)
    if wrong:
        raise ValueError(f"{wrong}; cast q, k and v, or take kernel=math")
    if k.shape[:3] != v.shape[:3] or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3] or q.shape[2] % k.shape[2]:
        raise ValueError(
            f"shapes {list(q.shape)}, {list(k.shape)}, {list(v.shape)}: must be q [B, Sq, H, D], k [B, N, Hk, D] and "
            "v [B, N, Hk, Dv] with H a multiple of Hk"
        )
    for name, x in (("head_dim", q), ("v_head_dim", v)):
        if x.shape[3] > MOST_DIM:
            raise ValueError(f"{name}={x.shape[3]}: up to {MOST_DIM} only; take kernel=math")
    if any(x.stride(-1) != 1 and x.shape[-1] > 1 for x in (q, k, v)):
        raise ValueError(
            f"strides {q.stride()}, {k.stride()}, {v.stride()}: the head dim must be contiguous; call .contiguous()"
        )
