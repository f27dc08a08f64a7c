"""A sliding window with global tokens: they see every key, and every query sees them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from attention.masks.band import Interval
from attention.masks.checks import set_flags, set_whole, within
from attention.masks.mask import Mask
from attention.masks.rectangles import UNBOUNDED, Rectangles, from_columns


def global_window(window: int, global_tokens: int, causal: bool = False) -> Mask:
    """|q - k| <= window, or k < global_tokens, or q < global_tokens; with causal, k <= q, too

    A window of 0 is the diagonal. Raises ValueError for a negative number; when built, for more global tokens than the
    sequence has."""
    return GlobalWindow(window, global_tokens, causal)


@dataclass(frozen=True)
class GlobalWindow(Mask):
    window: int
    global_tokens: int
    causal: bool = False

    name: ClassVar[str] = "global_window"

    def __post_init__(self) -> None:
        set_whole(self, "window", "global_tokens")
        set_flags(self, "causal")

    def build(self, tokens: int) -> Rectangles:
        within("global_tokens", self.global_tokens, tokens)
        return window_and_globals(tokens, self.window, ((0, self.global_tokens),), self.causal)


def window_and_globals(tokens: int, window: int, runs: Sequence[Interval], causal: bool) -> Rectangles:
    """|q - k| <= window, or q or k is global; with `causal`, k <= q, too. runs: the global tokens as disjoint, sorted
    intervals. Of n runs the rectangles are at most (n + 1) * (2 n + 1)."""
    start, stop = np.array(list(runs), np.int64).reshape(-1, 2).T
    after, before = np.append(0, stop), np.append(start, tokens)  # between the runs
    hi = 0 if causal else UNBOUNDED
    rows = from_columns(start, stop, 0, tokens, hi=hi)
    queries, upto = after[:, None], before[:, None]
    columns = from_columns(queries, upto, start, stop, hi=hi)
    windows = from_columns(queries, upto, after, before, -window, 0 if causal else window)
    return np.concatenate([rows, columns, windows])
