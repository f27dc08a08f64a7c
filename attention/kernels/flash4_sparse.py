"""Patterns by FlashAttention-4's block sparsity, for Hopper: tiles that a pattern does not touch are skipped, whole tiles
run as in dense attention, and in the other ones each score is checked against its query's intervals of keys.

A kernel's block works through one list of tiles. A list that is much longer than the mean, as that of a global tile,
would be worked on when all others are done. So it is cut in parts, and the tile that it belongs to is copied for each:
tiles of keys in the backward, whose gradients are summed; tiles of queries in the forward, whose results are merged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attention.gpu.private import FLASH4
from attention.gpu.uploads import held, uploaded
from attention.kernels.fit import dense_like
from attention.kernels.flash4_mods import band_mod, mask_mod, scalars
from attention.kernels.flash4_package import as_taken, functions, writable
from attention.kernels.interface import Call, Pair, Shape, Triple, settle
from attention.kernels.tile_lists import (
    TILE,
    TileLists,
    balanced,
    by_keys,
    by_queries,
    most_at_once,
    row_intervals,
    tiles_of,
)
from attention.masks.pattern import Pattern
from attention.masks.rectangles import K0, K1
from attention.tensors import empty_lse

MOST_INTERVALS = 4  # each costs two loads a score
RIGHT = (64, 128)  # head dims whose results were checked on sm90


def why_not(shape: Shape, pattern: Pattern, deterministic: bool) -> str | None:
    """Why tile lists cannot do a pattern, or None."""
    if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9:
        return "tile lists were checked on Hopper (sm90) alone"
    if shape.softcap:
        return "softcap: tile lists were checked without"
    if shape.v_head_dim != shape.head_dim:
        return f"v_head_dim={shape.v_head_dim}: tile lists were checked with head_dim={shape.head_dim} alone"
    if shape.head_dim not in RIGHT:
        return f"head_dim={shape.head_dim}: tile lists were checked with {', '.join(map(str, RIGHT))}"
    if deterministic and shape.backward:
        return "deterministic=True: its tiles add gradients up in any order"
    if min(pattern.n_q, pattern.n_k) <= TILE:
        return f"{pattern.n_q} queries and {pattern.n_k} keys: lists are for more than one tile of {TILE}"
    rows = pattern.rectangles
    if most_at_once(rows) <= 1 and int((rows[:, K1] - rows[:, K0]).sum()) <= 2 * pattern.n_k:
        return "no query sees two rectangles: packed calls are quicker"
    needed = tiles_of(pattern).intervals
    if needed > MOST_INTERVALS:
        return f"a query sees {needed} intervals of keys in tiles that it sees in part: at most {MOST_INTERVALS}"
    return None


@dataclass(frozen=True, eq=False)
class Side:
    """The lists of one direction on a GPU, as the package takes them.

    origin: int64 `[copies]`, the tile that each copied tile is a copy of. repeated: int64 `[n]`, those tiles, once each.
    parts: int64 `[n, most]`, each of them and its copies; padded where `counted`, fp32 `[n, most]`, is 0, not 1."""

    tensors: Any  # BlockSparseTensorsTorch
    aux: list[Tensor] | None
    band: tuple[Any, Any] | None  # cutlass.Int32
    mod: Callable[..., Any]
    origin: Tensor | None = None
    repeated: Tensor | None = None
    parts: Tensor | None = None
    counted: Tensor | None = None


def forward(q: Tensor, k: Tensor, v: Tensor, call: Call, into: Pair | None) -> Pair:
    """As `attend` of a kernel. q `[B, n_q, H, D]`, k and v `[B, n_k, Hk, D]`."""
    out, lse = into or (dense_like(q), empty_lse(q))
    side = _kept(_pattern(call, q, k), q.device, False)
    extended = q if side.origin is None else _with_copies(q, side.origin)
    own = side.origin is None
    found = FLASH4.of(functions()).forward(
        extended,
        k,
        v,
        softmax_scale=call.scale,
        pack_gqa=False,
        mask_mod=side.mod,
        aux_tensors=side.aux,
        aux_scalars=side.band,
        block_sparse_tensors=side.tensors,
        out=out if own and writable(out) and out.dtype == q.dtype else None,
        lse=lse if own and writable(lse, align=4) else None,
        return_lse=True,
    )
    if not own:
        return _merged(found[0], found[1], side, (out, lse))
    return settle((found[0], found[1]), (out, lse))


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    call: Call,
    into: Triple | None,
) -> Triple:
    """As `gradients` of a kernel, shapes as in `forward`."""
    dq, dk, dv = into or (dense_like(q), dense_like(k), dense_like(v))
    side = _kept(_pattern(call, q, k), q.device, True)
    own = side.origin is None
    k_, v_ = (k, v) if side.origin is None else (_with_copies(x, side.origin) for x in (k, v))
    found = FLASH4.of(functions()).backward(
        q,
        k_,
        v_,
        out,
        dout,
        as_taken(lse),
        softmax_scale=call.scale,
        mask_mod=side.mod,
        aux_tensors=side.aux,
        aux_scalars=side.band,
        block_sparse_tensors=side.tensors,
        dq=dq if writable(dq) else None,
        dk=dk if own and writable(dk) else None,
        dv=dv if own and writable(dv) else None,
    )
    if not own:
        found = found[0], *(_without_copies(x, side, k.shape[1]) for x in found[1:3])
    return settle((found[0], found[1], found[2]), (dq, dk, dv))


def _pattern(call: Call, q: Tensor, k: Tensor) -> Pattern:
    pattern = call.pattern
    assert pattern is not None and (pattern.n_q, pattern.n_k) == (q.shape[1], k.shape[1])
    return pattern


def _kept(pattern: Pattern, device: torch.device, transposed: bool) -> Side:
    """A pattern's lists on a device; kept with the pattern."""
    key = ("flash4", device, transposed)
    if key not in pattern.kept:
        pattern.kept[key] = _side(pattern, device, transposed)
    found: Side = held(pattern.kept[key], device)
    return found


def _side(pattern: Pattern, device: torch.device, transposed: bool) -> Side:
    tiles = tiles_of(pattern)
    rows = -(-(pattern.n_k if transposed else pattern.n_q) // TILE)
    listed = (by_keys if transposed else by_queries)(tiles, balanced(tiles, rows))
    tensors = _tensors(listed, device)
    copied = bool(listed.partial.counts[rows:].any())  # whether a copy has a tile that is seen in part
    padded = transposed and len(listed.origin) > 0 and pattern.n_k % TILE > 0  # keys that no band cuts off
    if tiles.band is not None and not copied and not padded:
        return Side(tensors, None, scalars(tiles.band), band_mod(), *_parts(listed, device))
    if ("intervals", device) not in pattern.kept:
        pattern.kept["intervals", device] = row_intervals(tiles.rows[tiles.in_part], pattern.n_q, device)
    intervals = pattern.kept["intervals", device]
    aux, parts = [intervals], _parts(listed, device)
    if copied and transposed:
        behind = (np.arange(rows, rows + len(listed.origin)) - listed.origin) * TILE
        aux.append(uploaded(np.concatenate([np.zeros(rows), behind]).astype(np.int32), device))
    elif copied:
        aux = [torch.cat([intervals, intervals.view(rows, -1)[parts[0]].view(-1, intervals.shape[1])])]
    return Side(tensors, aux, None, mask_mod(max(1, tiles.intervals), copied and transposed), *parts)


def _parts(listed: TileLists, device: torch.device) -> tuple[Tensor, ...]:
    """origin, repeated, parts and counted of a `Side`; none where no list is cut."""
    if not len(listed.origin):
        return ()
    repeated, start, more = np.unique(listed.origin, return_index=True, return_counts=True)
    column = np.arange(more.max() + 1)
    counted = column <= more[:, None]
    copies = listed.tiles + start[:, None] + column - 1
    parts = np.where(counted & (column > 0), copies, repeated[:, None])
    where = (uploaded(x.astype(np.int64), device) for x in (listed.origin, repeated, parts))
    return *where, uploaded(counted.astype(np.float32), device)


def _tensors(listed: TileLists, device: torch.device) -> Any:
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

    arrays = [x for lists in (listed.partial, listed.full) for x in (lists.counts, lists.indices)]
    flat = uploaded(np.concatenate([x.ravel() for x in arrays]), device)
    parts = flat.split([x.size for x in arrays])
    tensors = [part.view(1, 1, *x.shape) for part, x in zip(parts, arrays, strict=True)]
    return BlockSparseTensorsTorch(*tensors, block_size=(TILE, TILE))


def _with_copies(x: Tensor, origin: Tensor) -> Tensor:
    """x `[B, S, H, D]`, filled up with zeros to whole tiles, and copies of its tiles `origin` behind."""
    batch, tokens, *heads = x.shape
    whole = -(-tokens // TILE) * TILE
    found = x.new_empty(batch, whole + len(origin) * TILE, *heads)
    found[:, :tokens] = x
    found[:, tokens:whole] = 0
    found[:, whole:] = found[:, :whole].unflatten(1, (-1, TILE)).index_select(1, origin).flatten(1, 2)
    return found


def _without_copies(x: Tensor, side: Side, tokens: int) -> Tensor:
    """The gradients of the first tokens, with those of the copies of their tiles added, in fp32."""
    assert side.repeated is not None and side.parts is not None and side.counted is not None
    tiles = x.unflatten(1, (-1, TILE))
    sums = (tiles[:, side.parts].float() * side.counted.view(1, *side.counted.shape, 1, 1, 1)).sum(2)
    tiles.index_copy_(1, side.repeated, sums.to(x.dtype))
    return x[:, :tokens]


def _merged(out: Tensor, lse: Tensor, side: Side, into: Pair) -> Pair:
    """The results of the first tokens, merged with those of the copies of their tiles."""
    assert side.repeated is not None and side.parts is not None and side.counted is not None
    tokens = into[0].shape[1]
    tiles, lses = out.unflatten(1, (-1, TILE)), lse.unflatten(2, (-1, TILE))
    parts = lses[:, :, side.parts] + side.counted.log().unsqueeze(-1)  # [B, H, n, most, TILE]
    total = parts.logsumexp(3)
    weights = (parts - total.masked_fill(total == -torch.inf, 0).unsqueeze(3)).exp()
    sums = (tiles[:, side.parts] * weights.permute(0, 2, 3, 4, 1).unsqueeze(-1)).sum(2)
    tiles.index_copy_(1, side.repeated, sums.to(out.dtype))
    lses.index_copy_(2, side.repeated, total)
    return settle((out[:, :tokens], lse[..., :tokens]), into)
