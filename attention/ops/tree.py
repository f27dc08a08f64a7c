"""The fused tree reduction: one Triton kernel merges the partial results of this rank's splits, writes the result into
the memory of every remote rank, waits for theirs, and merges them all.

A program does one piece of a row and waits only for the other ranks' same piece. So programs need not run at the same
time, as long as they start in order. A program is one warp with one element per thread."""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from attention.geometry.mailbox import PIECE, Mailbox, pieces
from attention.gpu.triton_launcher import MOST, TritonLauncher
from attention.ops.merge import finite, normalised

AT_ONCE = 64  # splits that a program loads at once
WARP = 32  # threads: each flag is read by one of them


@triton.jit
def _merged(  # type: ignore[no-untyped-def]
    values, lses, n, values_n, lses_n, live, PARTS: tl.constexpr, PIECE: tl.constexpr, CACHE: tl.constexpr
):
    """(a piece of a row, merged over n partial results in their order, and its LSE). values, lses: where the first one's lie."""
    d = tl.arange(0, PIECE)
    top = tl.full((), float("-inf"), tl.float32)
    den = tl.zeros((), tl.float32)
    acc = tl.zeros((PIECE,), tl.float32)
    for first in range(0, n, PARTS):
        i = first + tl.arange(0, PARTS)
        here = i < n
        i = i.to(tl.int64)
        x = tl.load(lses + i * lses_n, mask=here, other=float("-inf"), cache_modifier=CACHE)
        mask = here[:, None] & live[None, :]
        y = tl.load(values + i[:, None] * values_n + d[None, :], mask=mask, other=0.0, cache_modifier=CACHE)
        higher = tl.maximum(top, tl.max(x, 0))
        kept = tl.exp(top - finite(higher))
        w = tl.exp(x - finite(higher))
        acc = acc * kept + tl.sum(y.to(tl.float32) * w[:, None], 0)
        den = den * kept + tl.sum(w, 0)
        top = higher
    norm, lse = normalised(top, den)
    return acc / norm, lse


@triton.jit
def _exchange(  # type: ignore[no-untyped-def]
    parts, parts_lse, out, out_lse, table, n, rank, capacity, row_pieces, head_dim, queries, heads,
    lses, flags, turns, marks, parts_strides, lses_strides,
    WORLD: tl.constexpr, RANKS: tl.constexpr, PARTS: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    piece = tl.program_id(0)
    row = piece // row_pieces
    at = (piece % row_pieces) * PIECE
    h = (row % heads).to(tl.int64)
    t = ((row // heads) % queries).to(tl.int64)
    b = (row // (heads * queries)).to(tl.int64)
    d = tl.arange(0, PIECE)
    live = at + d < head_dim

    parts_at = parts + b * parts_strides[1] + t * parts_strides[2] + h * parts_strides[3] + at
    lses_at = parts_lse + b * lses_strides[1] + h * lses_strides[2] + t * lses_strides[3]
    mine, mine_lse = _merged(parts_at, lses_at, n, parts_strides[0], lses_strides[0], live, PARTS, PIECE, "")

    boxes = table.to(tl.int64).to(tl.pointer_type(tl.uint64))  # Triton passes a low address as int32
    own = tl.load(boxes + rank)
    own_values = own.to(tl.pointer_type(tl.float32))
    own_numbers = own.to(tl.pointer_type(tl.int32))
    turn = tl.load(own_numbers + turns + piece)
    sent = ((turn * WORLD + rank) * capacity + piece).to(tl.int64)
    for remote in range(WORLD):  # and this rank's own box: all ranks merge the same, for identical bits
        box = tl.load(boxes + remote).to(tl.pointer_type(tl.float32))
        tl.store(box + sent * PIECE + d, mine, mask=live)
        tl.store(box + lses + sent, mine_lse)
    tl.debug_barrier()  # all data before any flag
    ranks = tl.arange(0, RANKS)
    others = (ranks < WORLD) & (ranks != rank)
    theirs = tl.load(boxes + ranks, mask=others, other=0).to(tl.pointer_type(tl.int32))
    ones = tl.full((RANKS,), 1, tl.int32)
    tl.atomic_xchg(theirs + flags + sent, ones, mask=others, sem="release", scope="sys")

    flag = own_numbers + flags + (turn * WORLD + ranks).to(tl.int64) * capacity + piece
    tl.store(own_numbers + marks + piece, 1)  # for the watchdog, which ends endless waits
    arrived = tl.zeros((), tl.int32)
    while arrived < WORLD - 1:
        arrived = tl.sum(tl.load(flag, mask=others, other=0, volatile=True), 0)
    tl.atomic_xchg(flag, ones - 1, mask=others, sem="acquire", scope="sys")  # reset for the call after next
    tl.debug_barrier()
    tl.store(own_numbers + marks + piece, 0)
    tl.store(own_numbers + turns + piece, 1 - turn)

    # written by remote ranks: bypass this multiprocessor's cache
    received = (turn * WORLD * capacity + piece).to(tl.int64)
    values_at, lses_at = own_values + received * PIECE, own_values + lses + received
    value, total = _merged(values_at, lses_at, WORLD, capacity * PIECE, capacity, live, 1, PIECE, ".cg")
    tl.store(out + row.to(tl.int64) * head_dim + at + d, value.to(out.dtype.element_ty), mask=live)
    tl.store(out_lse + (b * heads + h) * queries + t, total, mask=at == 0)


def exchange(parts: Tensor, lses: Tensor, boxes: int, box: Mailbox, rank: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """The attention over the keys of all ranks: (out like `like`, lse `[B, H, Sq]` in fp32), bitwise equal on every
    rank. All ranks must call it, with the same number of queries.

    parts: this rank's partial results `[n, B, Sq, H, Dv]`, n >= 0, contiguous in the last dim; lses: `[n, B, H, Sq]`;
    both fp32. boxes: the device address of a table with the address of each rank's memory for `box`.
    like: `[B, Sq, H, Dv]`, the shape and dtype of out."""
    batch, queries, heads, _ = like.shape
    out = torch.empty_like(like, memory_format=torch.contiguous_format)
    lse = torch.empty(batch, heads, queries, dtype=torch.float32, device=like.device)
    _start(like.shape, parts.stride(), parts.shape[0], lses.stride(), boxes, box, rank)(parts, lses, out, lse)
    return out, lse


@lru_cache(maxsize=MOST)
def _start(
    shape: torch.Size, parts: tuple[int, ...], n: int, lses: tuple[int, ...], boxes: int, box: Mailbox, rank: int
) -> TritonLauncher:
    """parts, lses: strides."""
    batch, queries, heads, head_dim = shape
    return TritonLauncher(
        _exchange, (pieces(batch * queries * heads, head_dim),),
        (boxes, n, rank, box.capacity, pieces(1, head_dim), head_dim, queries, heads,
         box.lses, box.flags, box.turns, box.marks, parts, lses),
        WORLD=box.world, RANKS=max(WARP, triton.next_power_of_2(box.world)),
        PARTS=min(AT_ONCE, triton.next_power_of_2(max(n, 1))), PIECE=PIECE, num_warps=1,
    )  # fmt: skip
