"""A mask drawn as text, from its rectangles: its work does not depend on the number of tokens."""

from __future__ import annotations

import numpy as np

from attention.masks.overlap import both
from attention.masks.rectangles import K0, Q0, Rectangles, from_columns, pairs

SHADES = "·░▒▓█"  # no pair, up to a third, up to two thirds, nearly all, all pairs


def picture(x: Rectangles, tokens: int, width: int) -> str:
    """A line for each interval of queries and a cell of two characters for each interval of keys, `min(width, tokens)`
    of each. Raises ValueError for a width below 1."""
    if width < 1:
        raise ValueError(f"width={width}: must be at least 1")
    cells = min(width, tokens)
    if not cells:
        return ""
    borders = np.arange(cells + 1) * tokens // cells
    start, stop = borders[:-1], borders[1:]
    parts = both(x, from_columns(start[:, None], stop[:, None], start, stop))
    kept, *_ = np.histogram2d(parts[:, Q0], parts[:, K0], (borders, borders), weights=pairs(parts).astype(float))
    size = np.diff(borders).astype(float)
    share = kept / np.outer(size, size)
    shade = np.where(share >= 1, len(SHADES) - 1, np.ceil(share * (len(SHADES) - 2)).astype(np.int64))
    return "\n".join("".join(SHADES[s] * 2 for s in row) for row in shade.tolist())
