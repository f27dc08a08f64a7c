"""Patterns by FlashAttention-4's block sparsity, for Hopper: tiles that a pattern does not touch are skipped, whole tiles
run as in dense attention, and in the other ones each score is checked against its query's intervals of keys.

A kernel's block works through one list of tiles. A list that is much longer than the mean, as that of a global tile,
would be worked on when all others are done. So it is cut in parts, and the tile that it belongs to is copied for each:
tiles of keys in the backward, whose gradients are summed; tiles of queries in the forward, whose results are merged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attention.gpu.uploads import uploaded
from attention.kernels.flash4_package import band_mod, mask_mod, scalars
from attention.kernels.interface import Pair, Shape
from attention.kernels.tile_lists import TILE, TileLists, Tiles, listed, most_at_once, row_intervals, tiles_of
from attention.masks.pattern import Pattern
from attention.masks.rectangles import K0, K1
from attention.reduction.parts import merge_n

MOST_INTERVALS = 4  # each costs two loads a score
RIGHT = (64, 128)  # head dims whose results were checked on sm90
LEAST_SPLIT = 32  # a list is cut in parts only where it is longer than this, and than twice the mean


def why_not(shape: Shape, pattern: Pattern, deterministic: bool) -> str | None:
    """Why tile lists cannot do a pattern, or None."""
    if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9:
        return "tile lists were checked on Hopper (sm90) alone"
    if shape.softcap or shape.v_head_dim != shape.head_dim or shape.head_dim not in RIGHT:
        dims = f"head_dim={shape.head_dim}, v_head_dim={shape.v_head_dim}, softcap={shape.softcap}"
        return f"{dims}: tile lists were checked with 64 or 128 for both dims and without softcap"
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
class Copies:
    """Copies of tiles, behind all tiles, for the parts of their lists.

    origin: int64 `[copies]`, the tile that each is a copy of. parts: int64 `[most, n]`, above the tiles that have copies,
    below each its copies; padded where `counted`, fp32 `[most, n]`, is 0, not 1."""

    origin: Tensor
    parts: Tensor
    counted: Tensor

    def added(self, x: Tensor) -> Tensor:
        """x `[B, S, H, D]`, filled up with zeros to whole tiles, and the copies behind."""
        batch, tokens, *heads = x.shape
        whole = -(-tokens // TILE) * TILE
        extended = x.new_empty(batch, whole + len(self.origin) * TILE, *heads)
        extended[:, :tokens] = x
        extended[:, tokens:whole] = 0
        extended[:, whole:] = extended[:, :whole].unflatten(1, (-1, TILE)).index_select(1, self.origin).flatten(1, 2)
        return extended

    def summed(self, x: Tensor, tokens: int) -> Tensor:
        """The gradients of the first tokens, with those of the copies of their tiles added, in fp32."""
        tiles = x.unflatten(1, (-1, TILE))
        sums = (tiles[:, self.parts].float() * self.counted.view(1, *self.counted.shape, 1, 1, 1)).sum(1)
        tiles.index_copy_(1, self.parts[0], sums.to(x.dtype))
        return x[:, :tokens]

    def merged(self, out: Tensor, lse: Tensor, tokens: int) -> Pair:
        """The results of the first tokens, merged with those of the copies of their tiles."""
        tiles, lses = out.unflatten(1, (-1, TILE)), lse.unflatten(2, (-1, TILE))
        parts = lses[:, :, self.parts] + self.counted.log().unsqueeze(-1)  # [B, H, most, n, TILE]
        merged, total = merge_n(
            tiles[:, self.parts].flatten(2, 3).transpose(0, 1), parts.flatten(3, 4).permute(2, 0, 1, 3)
        )
        tiles.index_copy_(1, self.parts[0], merged.unflatten(1, (-1, TILE)))
        lses.index_copy_(2, self.parts[0], total.unflatten(2, (-1, TILE)))
        return out[:, :tokens], lse[..., :tokens]


def arguments(pattern: Pattern, device: torch.device, backward: bool) -> tuple[dict[str, Any], Copies | None]:
    """A pattern as arguments of the forward or the backward, which takes lists by keys; and the copies that it takes."""
    tiles = tiles_of(pattern)
    rows = tiles.shape[backward]
    lists = listed(tiles, backward, longest_part(tiles, rows))
    copies = _copies(lists, device) if len(lists.origin) else None
    made: dict[str, Any] = {"block_sparse_tensors": _tensors(lists, device)} | ({} if backward else {"pack_gqa": False})
    copied_in_part = bool(lists.partial[0][rows:].any())  # whether a copy has a tile that is seen in part
    padded = backward and copies is not None and pattern.n_k % TILE > 0  # keys that no band cuts off
    if tiles.band is not None and not copied_in_part and not padded:
        return made | {"mask_mod": band_mod(), "aux_scalars": scalars(tiles.band)}, copies
    intervals = pattern.keep(("intervals", device), lambda: row_intervals(tiles.cut, pattern.n_q, device))
    aux = [intervals]
    if copies is not None and copied_in_part:
        if backward:
            behind = (np.arange(rows, rows + len(lists.origin)) - lists.origin) * TILE
            aux.append(uploaded(np.concatenate([np.zeros(rows), behind]).astype(np.int32), device))
        else:
            copied = intervals.view(rows, -1)[copies.origin].view(-1, intervals.shape[1])
            aux = [torch.cat([intervals, copied])]
    return made | {"mask_mod": mask_mod(max(1, tiles.intervals), len(aux) > 1), "aux_tensors": aux}, copies


def longest_part(tiles: Tiles, rows: int) -> int:
    """The longest part of a list, so that no row takes much longer than the mean of all."""
    return max(LEAST_SPLIT, 2 * (len(tiles.partial) + len(tiles.full)) // max(1, rows) + 1)


def _copies(lists: TileLists, device: torch.device) -> Copies:
    repeated, start, more = np.unique(lists.origin, return_index=True, return_counts=True)
    part = np.arange(more.max() + 1)[:, None]
    counted = part <= more
    parts = np.where(counted & (part > 0), lists.tiles + start + part - 1, repeated)
    return Copies(*(uploaded(x, device) for x in (lists.origin, parts, counted.astype(np.float32))))


def _tensors(lists: TileLists, device: torch.device) -> Any:
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

    arrays = [*lists.partial, *lists.full]
    flat = uploaded(np.concatenate([x.ravel() for x in arrays]), device)
    parts = flat.split([x.size for x in arrays])
    tensors = [part.view(1, 1, *x.shape) for part, x in zip(parts, arrays, strict=True)]
    return BlockSparseTensorsTorch(*tensors, block_size=(TILE, TILE))
