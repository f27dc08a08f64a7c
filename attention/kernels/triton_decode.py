"""`decode`: flash-decoding, for few queries against many keys. With one query a flash kernel has only as many programs
as heads. Here the keys are split: a program takes one split of one KV head for all queries that share it, and `merge_n`
merges the splits. Forward only. A window's programs read its keys alone. Batch elements may have different numbers of keys, which the
kernel reads on the GPU.

Source: Dao et al., "Flash-Decoding for long-context inference" (2023)."""

from __future__ import annotations

import os
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from attention.gpu.triton_launcher import MOST, TritonLauncher
from attention.kernels.interface import HALF, Call, Kernel, Pair, Shape, Tensors, name_of
from attention.kernels.triton_softmax import LOG2E, add_tile, empty, store
from attention.masks.band import Band
from attention.ops.merge import merge_n_triton
from attention.tensors import dense_like, empty_lse, result_like

FAR = 1 << 30  # keys: a wider window cuts nothing
MOST_DIM = 256  # D and Dv
MAX_ROWS = 64  # queries per program: a larger accumulator costs the occupancy that hides the loads
MAX_ROWS_FP32 = 16  # without tensor cores the operands are in registers, too
STAGE_BYTES = 32768  # K and V of one stage
STAGES = 4  # in flight, where shared memory holds them, else 3
FOUR_STAGES_BYTES = 112 << 10  # shared memory that four stages take, rounded up
SHORTEST_SPLIT = 256  # keys: below it, writing and merging the partial results outweighs the parallelism
BUSY = 0.95  # average share of busy SMs from which more splits gain nothing


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

    top, total, acc = empty(BLOCK_M, BLOCK_V)
    for at in range(start, stop, BLOCK_N):
        inside = at + key < stop
        k_ = tl.load(k_at, mask=inside[:, None] & (d < HEAD_DIM)[None, :], other=0.0)
        s = tl.dot(q_, tl.trans(k_), input_precision=PRECISION)
        if SOFTCAP:
            s = _tanh(s * per_cap) * cap_log2
        else:
            s = s * scale_log2
        seen = (at + key < stop)[None, :]
        if LEFT:
            seen = seen & ((at + key)[None, :] >= place[:, None] - left)
        if RIGHT:
            seen = seen & ((at + key)[None, :] <= place[:, None] + right)
        s = tl.where(seen, s, float("-inf"))
        v_ = tl.load(v_at, mask=inside[:, None] & (dv < VALUE_DIM)[None, :], other=0.0)
        top, total, acc = add_tile(s, v_, top, total, acc, 1.0, True, PRECISION)
        k_at += step * k_n
        v_at += step * v_n

    out_at = out + split.to(tl.int64) * out_p + b * out_b + t[:, None] * out_t + h[:, None] * out_h + dv[None, :]
    lse_at = lse + split.to(tl.int64) * lse_p + b * lse_b + h * lse_h + t * lse_t
    store(out_at, lse_at, top, total, acc, 1.0, live[:, None] & (dv < VALUE_DIM)[None, :], live)


def missing(device: str) -> str | None:
    """Why Triton kernels cannot run on `device`, or None."""
    if device == "cuda" or os.environ.get("TRITON_INTERPRET") == "1":
        return None
    return "needs a CUDA GPU, or TRITON_INTERPRET=1 set before the start to run it slowly on a CPU"


def dtype_rule(dtype: torch.dtype, device: str) -> str | None:
    """Why our kernels do not take `dtype` on `device`, or None. Triton's interpreter (3.6 to 3.9) multiplies bf16
    wrongly, as integers."""
    on_gpu = device == "cuda"
    if dtype in (torch.float16, torch.float32) or (on_gpu and dtype in HALF):
        return None
    return f"dtype={name_of(dtype)}: " + (
        "bf16, fp16 and fp32 only" if on_gpu else "under Triton's interpreter fp16 and fp32 only"
    )


class DecodeKernel(Kernel):
    name = "decode"
    summary = "flash-decoding in Triton: keys split among programs, for few queries; forward only"
    align = 1
    features = frozenset({"softcap", "v_head_dim", "kv_lengths"})
    writes = True

    def missing(self, device: str) -> str | None:
        return missing(device)

    def refuses(self, shape: Shape, mask: Band) -> str | None:
        if shape.packed:
            return "packed: dense calls only"
        if shape.backward:
            return "backward: forward only, for decoding without gradients"
        for name in ("head_dim", "v_head_dim"):
            if (n := getattr(shape, name)) > MOST_DIM:
                return f"{name}={n}: up to {MOST_DIM} only"
        return dtype_rule(shape.dtype, shape.device)

    def attend(self, tensors: Tensors, call: Call, into: Pair | None = None, splits: int | None = None) -> Pair:
        """splits: as in `splits`. With an fp32 out in `into` the result is a partial one, to be merged with others."""
        q, k, v = tensors
        out, lse = into or (dense_like(result_like(q, v)), empty_lse(q))
        parts, lses = self.splits(q, k, v, call, splits, (out, lse))
        if len(parts) != 1:
            merge_n_triton(parts, lses, out, lse)
        return out, lse

    def splits(
        self, q: Tensor, k: Tensor, v: Tensor, call: Call, splits: int | None = None, into: Pair | None = None
    ) -> Pair:
        """The partial results of pieces of the keys, `[n, B, Sq, H, Dv]` in fp32, and their LSEs. Without keys n is 0.

        splits: the most pieces, by default enough to fill the GPU. into: for a single piece, its out in any dtype, and LSE."""
        batch, n_queries, heads, _ = q.shape
        n_keys, kv_heads, value_dim = *k.shape[1:3], v.shape[3]
        form = q.shape, kv_heads, value_dim, q.dtype
        tiles = _tiles(*form)
        reach = n_keys if call.mask.left < 0 else min(n_keys, call.mask.left + n_queries)  # the most keys that are read
        sms, stages = _gpu(q.device)
        if splits is None:
            uneven = batch > 1 and call.lengths is not None
            splits = split_count(reach, batch * kv_heads * tiles.row_blocks, sms, uneven)
        split_keys = max(triton.cdiv(triton.cdiv(reach, splits), tiles.keys), 1) * tiles.keys
        splits = triton.cdiv(reach, split_keys)  # none is empty, but where lengths or a rank's end leave less
        if into is not None and splits == 1:
            parts, lses = (x.unsqueeze(0) for x in into)
        else:
            parts = torch.empty((splits, *q.shape[:3], value_dim), dtype=torch.float32, device=q.device)
            lses = torch.empty((splits, batch, heads, n_queries), dtype=torch.float32, device=q.device)
        if parts.numel():
            # the batch stride of a batch of one changes with a growing KV cache; as 0 it needs no new launcher
            strides = tuple([(0, *x.stride()[1:]) if batch == 1 else x.stride() for x in (q, k, v)])
            lengths, first, total = call.lengths or (lses, 0, 0)
            stride = None if call.lengths is None else lengths.stride(0)
            numbers = call.scale, call.softcap, call.mask, stride
            start = _start(form, numbers, (*strides, parts.stride(), lses.stride()), splits, stages)
            start(q, k, v, parts, lses, lengths, changing=(n_keys, split_keys, first, total))
        return parts, lses


class _Tiles(NamedTuple):
    """The tile of one program: `rows` of the queries times the heads of one KV head, `keys` keys at a time."""

    rows: int
    row_blocks: int
    keys: int
    head_dim: int
    value_dim: int


@lru_cache
def _tiles(shape: torch.Size, kv_heads: int, value_dim: int, dtype: torch.dtype) -> _Tiles:
    """shape: of q."""
    _, n_queries, heads, head_dim = shape
    rows = n_queries * (heads // kv_heads)
    most = MAX_ROWS_FP32 if dtype == torch.float32 else MAX_ROWS
    block_m = min(most, max(16, triton.next_power_of_2(rows)))
    block_d, block_v = (max(16, triton.next_power_of_2(n)) for n in (head_dim, value_dim))
    keys = STAGE_BYTES // ((block_d + block_v) * dtype.itemsize)
    block_n = min(128, max(16, 1 << (keys.bit_length() - 1)))
    return _Tiles(block_m, triton.cdiv(rows, block_m), block_n, block_d, block_v)


@lru_cache(maxsize=MOST)
def _start(
    form: tuple[torch.Size, int, int, torch.dtype],
    numbers: tuple[float, float | None, Band, int | None],
    strides: tuple[tuple[int, ...], ...],
    splits: int,
    stages: int,
) -> TritonLauncher:
    """form: as `_tiles` takes it. numbers: scale, softcap, mask, and the stride of the lengths. strides: of q, k, v, the
    parts and their LSEs."""
    (batch, n_queries, heads, head_dim), kv_heads, value_dim, dtype = form
    scale, softcap, mask, lengths = numbers
    tiles, fp32, cap = _tiles(*form), dtype == torch.float32, softcap or 1.0
    return TritonLauncher(
        _split,
        (kv_heads * tiles.row_blocks, splits, batch),
        (
            scale * LOG2E,
            cap * LOG2E,
            scale / cap,
            min(mask.left, FAR),
            min(mask.right, FAR),
            lengths or 0,
            n_queries,
            tiles.row_blocks,
            *(n for stride in strides[:3] for n in stride[:3]),
            *strides[3][:4],
            *strides[4],
        ),
        GROUP=heads // kv_heads,
        HEAD_DIM=head_dim,
        VALUE_DIM=value_dim,
        LENGTHS=lengths is not None,
        LEFT=mask.left >= 0,
        RIGHT=0 <= mask.right < n_queries - 1,  # else the first query sees the last key
        SOFTCAP=softcap is not None,
        PRECISION="ieee" if fp32 else "tf32",  # read for fp32 inputs only
        BLOCK_M=tiles.rows,
        BLOCK_N=tiles.keys,
        BLOCK_D=tiles.head_dim,
        BLOCK_V=tiles.value_dim,
        num_warps=8 if fp32 else 4,
        num_stages=stages,
    )


def split_count(n_keys: int, programs: int, sms: int, uneven: bool = False) -> int:
    """The number of pieces to cut `n_keys` keys into, as far as they are worth their merge. Each piece is `programs` programs
    on a GPU of `sms` SMs; an SM reads as fast with one program as with two. uneven: batch elements have different lengths.
    With a few programs for each SM, the longest element takes hardly more than its share."""
    most = min(triton.cdiv(4 * sms, programs), max(1, n_keys // SHORTEST_SPLIT))
    return most if uneven else _busy_splits(most, programs, sms)


@lru_cache
def _busy_splits(most: int, programs: int, sms: int) -> int:
    """The fewest pieces, up to `most`, that keep the SMs busy; else those that keep them busiest."""

    def busy(splits: int) -> float:
        return programs * splits / (triton.cdiv(programs * splits, sms) * sms)

    return next((n for n in range(1, most + 1) if busy(n) >= BUSY), max(range(1, most + 1), key=busy))


@lru_cache
def _gpu(device: torch.device) -> tuple[int, int]:
    """The SMs of a GPU, and the stages that its shared memory holds. Triton's interpreter runs one program at a time."""
    if device.type != "cuda":
        return 1, STAGES
    properties = torch.cuda.get_device_properties(device)
    available = getattr(properties, "shared_memory_per_block_optin", FOUR_STAGES_BYTES)
    return properties.multi_processor_count, STAGES if available >= FOUR_STAGES_BYTES else STAGES - 1
