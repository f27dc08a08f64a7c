"""Block-sparse masks: whole tiles of `block` queries by `block` keys, chosen by a pattern of the tiles' distance. Each
rectangle starts and ends at tile borders, except the last tile, which may be short. Neighbouring tiles are one
rectangle.

Query tile t has the queries [t * block, (t + 1) * block), key tile u the keys [u * block, (u + 1) * block)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from attention.masks.checks import one_of, set_flags, set_whole
from attention.masks.mask import Mask
from attention.masks.rectangles import UNBOUNDED, Rectangles, from_columns

LOCAL_TOKENS = 512  # how far the local window reaches
GLOBAL_TOKENS = 64
NEAR_TILES = 8  # all tiles nearer than this are kept by dilated_sparse; a power of two


def block_sparse(pattern: str, block: int = 128, causal: bool = False) -> Mask:
    """whole tiles of `block` tokens: local_window, dilated_sparse or global_local; with causal, k <= q, too

    With query tile t = q // block, key tile u = k // block and their distance d = |t - u|:

    - local_window: d <= ceil(512 / block). It contains every pair with |q - k| <= 512.
    - dilated_sparse: d % r(d) == 0, where r(d) = 1 for d < 8, 2 for d < 16, 4 for d < 32, and so on:
      r(d) = 2 ** max(0, floor(log2(d)) - 2). From d = 4 on, each doubling of the distance keeps 4 tiles.
    - global_local: local_window, or t < g, or u < g, with g = ceil(64 / block) tiles of global tokens.

    With `causal` tiles ahead are left out, and those on the diagonal are causal within. The last tile is short where
    the sequence is no multiple of `block`. Raises ValueError for an unknown pattern and a block below 1."""
    return BlockSparse(pattern, block, causal)


@dataclass(frozen=True)
class BlockSparse(Mask):
    pattern: str
    block: int = 128
    causal: bool = False

    name: ClassVar[str] = "block_sparse"

    def __post_init__(self) -> None:
        one_of("pattern", self.pattern, _PATTERNS)
        set_whole(self, "block", least=1)
        set_flags(self, "causal")

    def build(self, tokens: int) -> Rectangles:
        return _PATTERNS[self.pattern](tokens, self.block, self.causal)


def _band(tokens: int, block: int, reach: int, causal: bool, first_query: int = 0, first_key: int = 0) -> Rectangles:
    """Tiles of distance at most `reach`, without the queries and keys before the first ones (multiples of `block`)."""
    start = np.arange(first_query, tokens, block)
    stop = np.minimum(start + block, tokens)
    k0 = np.maximum(start - reach * block, first_key)
    k1 = stop if causal else np.minimum(start + (reach + 1) * block, tokens)
    return from_columns(start, stop, k0, k1, hi=0 if causal else UNBOUNDED)


def _local_window(tokens: int, block: int, causal: bool) -> Rectangles:
    return _band(tokens, block, _tiles(LOCAL_TOKENS, block), causal)


def _global_local(tokens: int, block: int, causal: bool) -> Rectangles:
    start = min(_tiles(GLOBAL_TOKENS, block) * block, tokens)
    hi = 0 if causal else UNBOUNDED
    rows, columns = from_columns(0, start, 0, tokens, hi=hi), from_columns(start, tokens, 0, start)
    return np.concatenate([rows, columns, _band(tokens, block, _tiles(LOCAL_TOKENS, block), causal, start, start)])


def _dilated_sparse(tokens: int, block: int, causal: bool) -> Rectangles:
    tiles = _tiles(tokens, block)
    octaves = [1 << i for i in range(NEAR_TILES.bit_length() - 1, tiles.bit_length())]
    far = np.concatenate([np.zeros(0, np.int64), *(np.arange(d, 2 * d, d // 4) for d in octaves)])
    distance = far if causal else np.concatenate([far, -far])
    query = np.arange(tiles)[:, None]
    query, key = np.broadcast_arrays(query, query - distance)
    kept = (key >= 0) & (key < tiles)
    start, k0 = query[kept] * block, key[kept] * block
    single = from_columns(start, np.minimum(start + block, tokens), k0, np.minimum(k0 + block, tokens))
    return np.concatenate([_band(tokens, block, NEAR_TILES - 1, causal), single])


def _tiles(tokens: int, block: int) -> int:
    return -(-tokens // block)


_PATTERNS: dict[str, Callable[[int, int, bool], Rectangles]] = {
    "local_window": _local_window,
    "dilated_sparse": _dilated_sparse,
    "global_local": _global_local,
}
