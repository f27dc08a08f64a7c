"""Dynamic Context Allocation: a window, global tokens, and random keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from attention.masks.checks import one_of, set_flags, set_whole, within
from attention.masks.global_window import window_and_globals
from attention.masks.mask import Mask
from attention.masks.random_keys import GRANULARITIES, random_keys
from attention.masks.rectangles import Rectangles


def dca(
    window: int,
    global_tokens: int,
    random: int,
    granularity: str = "block",
    seed: int = 0,
    causal: bool = False,
    selector: str = "static",
    block: int = 64,
) -> Mask:
    """|q - k| <= window // 2, or k < global_tokens, or q < global_tokens, or k in R(q); with causal, k <= q, too

    R(q) is drawn with `seed` among the keys that the rest of the mask leaves out:

    - granularity=token: `random` single keys for each query.
    - granularity=tile: `random` single keys for each tile of 128 queries, of those that no query of the tile sees
      otherwise.
    - granularity=block: max(1, random // block) blocks of `block` keys for each tile of 128 queries (none for
      random=0), of the blocks in which no query of the tile sees a key otherwise. Block j has the keys
      [j * block, (j + 1) * block); the last may be short.

    With `causal` they are keys before the query, or the tile. A tile with a global query draws none, as that query sees
    all of these keys. Where fewer are left, R(q) has all of them. `attention.masks.random_keys` defines the draw, which
    is the same on every machine.

    Raises ValueError for a negative number, an unknown granularity, and selector=learned, for which hidden states are
    needed: `attention.masks.learned` makes that mask. When built, for more global tokens than the sequence has."""
    return DCA(window, global_tokens, random, granularity, seed, causal, selector, block)


@dataclass(frozen=True)
class DCA(Mask):
    window: int
    global_tokens: int
    random: int
    granularity: str = "block"
    seed: int = 0
    causal: bool = False
    selector: str = "static"
    block: int = 64

    name: ClassVar[str] = "dca"

    def __post_init__(self) -> None:
        set_whole(self, "window", "global_tokens", "random", "seed")
        set_whole(self, "block", least=1)
        set_flags(self, "causal")
        one_of("granularity", self.granularity, GRANULARITIES)
        one_of("selector", self.selector, ("static", "learned"))
        if self.selector == "learned":
            raise ValueError(
                "selector=learned: chooses global tokens from a model's hidden states, which a mask by parameters does not "
                "have; take attention.masks.learned.learned(hidden, score, window), or selector=static"
            )

    def build(self, tokens: int) -> Rectangles:
        within("global_tokens", self.global_tokens, tokens)
        half = self.window // 2
        rest = window_and_globals(tokens, half, ((0, self.global_tokens),), self.causal)
        always = np.arange(self.global_tokens)
        drawn = random_keys(tokens, half, always, self.random, self.granularity, self.block, self.seed, self.causal)
        return np.concatenate([rest, drawn])
