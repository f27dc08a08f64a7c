"""Block-sparse masks: whole tiles of `block` queries by `block` keys, chosen by a pattern of the tiles' distance. Each
rectangle starts and ends at tile borders, except the last tile, which may be short. Neighbouring tiles are one
rectangle.

Query tile t has the queries [t * block, (t + 1) * block), key tile u the keys [u * block, (u + 1) * block)."""

from __future__ import annotations

from typing import Annotated

import numpy as np

from attention.masks.checks import Flag, Positive, one_of
from attention.masks.mask import family
from attention.masks.rectangles import UNBOUNDED, Rectangles, from_columns

LOCAL_TOKENS = 512  # how far the local window reaches
GLOBAL_TOKENS = 64
NEAR_TILES = 8  # all tiles nearer than this are kept by dilated_sparse; a power of two
PATTERNS = "local_window", "dilated_sparse", "global_local"


@family
def block_sparse(
    tokens: int, pattern: Annotated[str, one_of(*PATTERNS)], block: Positive = 128, causal: Flag = False
) -> Rectangles:
    """whole tiles of `block` tokens: local_window, dilated_sparse or global_local; with causal, k <= q, too

    With query tile t = q // block, key tile u = k // block and their distance d = |t - u|:

    - local_window: d <= ceil(512 / block). It contains every pair with |q - k| <= 512.
    - dilated_sparse: d % r(d) == 0, where r(d) = 1 for d < 8, 2 for d < 16, 4 for d < 32, and so on:
      r(d) = 2 ** max(0, floor(log2(d)) - 2). From d = 4 on, each doubling of the distance keeps 4 tiles.
    - global_local: local_window, or t < g, or u < g, with g = ceil(64 / block) tiles of global tokens.

    With `causal` tiles ahead are left out, and those on the diagonal are causal within. The last tile is short where
    the sequence is no multiple of `block`. Raises ValueError for an unknown pattern and a block below 1."""
    hi = 0 if causal else UNBOUNDED
    if pattern == "dilated_sparse":
        return np.concatenate([_near(tokens, block, NEAR_TILES - 1, hi), _far(tokens, block, causal)])
    reach = _tiles(LOCAL_TOKENS, block)
    if pattern == "local_window":
        return _near(tokens, block, reach, hi)
    start = min(_tiles(GLOBAL_TOKENS, block) * block, tokens)
    rows, columns = from_columns(0, start, 0, tokens, hi=hi), from_columns(start, tokens, 0, start)
    return np.concatenate([rows, columns, _near(tokens, block, reach, hi, start)])


def _near(tokens: int, block: int, reach: int, hi: int, first: int = 0) -> Rectangles:
    """Tiles of distance at most `reach`, without the tokens before the first one (a multiple of `block`)."""
    start = np.arange(first, tokens, block)
    stop = np.minimum(start + block, tokens)
    k0, k1 = np.maximum(start - reach * block, first), np.minimum(start + (reach + 1) * block, tokens)
    return from_columns(start, stop, k0, k1, hi=hi)


def _far(tokens: int, block: int, causal: bool) -> Rectangles:
    octaves = range(NEAR_TILES.bit_length() - 1, _tiles(tokens, block).bit_length())
    far = np.array([quarters << i - 2 for i in octaves for quarters in range(4, 8)], np.int64)
    distance = far if causal else np.concatenate([far, -far])
    start = np.arange(0, tokens, block)[:, None]
    k0 = start - distance * block
    return from_columns(start, np.minimum(start + block, tokens), np.maximum(k0, 0), np.minimum(k0 + block, tokens))


def _tiles(tokens: int, block: int) -> int:
    return -(-tokens // block)
