"""DCA with selector=learned: a linear score of the hidden states chooses the global tokens. The mask depends on data, and is
made for each input. One mask serves all sequences of a batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from attention.masks.checks import set_flags, set_whole, whole_numbers, within
from attention.masks.global_window import window_and_globals
from attention.masks.mask import Mask
from attention.masks.random_keys import random_keys, runs
from attention.masks.rectangles import Rectangles

if TYPE_CHECKING:
    from torch import Tensor

MOST_GLOBAL = 64
MOST_BLOCK = 64


@dataclass(frozen=True)
class ChosenGlobals(Mask):
    """|q - k| <= window // 2, or q or k is one of global_positions, or k in R(q); with causal, k <= q, too. R(q) is as
    in `dca` with granularity=block: `random` keys in blocks of at most 64 for each tile of 128 queries."""

    window: int
    global_positions: tuple[int, ...]
    random: int = 0
    seed: int = 0
    causal: bool = False

    name: ClassVar[str] = "chosen_globals"

    def __post_init__(self) -> None:
        set_whole(self, "window", "random", "seed")
        set_flags(self, "causal")
        positions = whole_numbers("global_positions", self.global_positions)
        object.__setattr__(self, "global_positions", tuple(sorted(set(positions))))

    def build(self, tokens: int) -> Rectangles:
        chosen, half = np.array(self.global_positions, np.int64), self.window // 2
        if len(chosen):
            within("the last of global_positions, plus 1,", int(chosen[-1]) + 1, tokens)
        _, first, last = runs(np.zeros_like(chosen), chosen)
        rest = window_and_globals(tokens, half, tuple(zip(first, last + 1, strict=True)), self.causal)
        block = min(MOST_BLOCK, max(1, self.random))
        drawn = random_keys(tokens, half, chosen, self.random, "block", block, self.seed, self.causal)
        return np.concatenate([rest, drawn])


def learned(
    hidden: Tensor, score: Callable[[Tensor], Tensor], window: int, seed: int = 0, causal: bool = False
) -> ChosenGlobals:
    """The mask for hidden states `[S, C]` or `[B, S, C]`: the global tokens that `score` chooses, the window, and
    0.1 * S random keys. On several ranks, give each the hidden states of the whole sequence, so that all have the same
    mask."""
    return ChosenGlobals(window, global_positions(hidden, score), int(0.1 * hidden.shape[-2]), seed, causal)


def global_positions(hidden: Tensor, score: Callable[[Tensor], Tensor]) -> tuple[int, ...]:
    """The positions with the highest scores, in order; equal scores go to the earlier position.

    hidden: `[S, C]` or `[B, S, C]`. score: from `[..., S, C]` to `[..., S, 1]`, as `torch.nn.Linear(C, 1)`. The
    scores of a batch are averaged."""
    scores = score(hidden).detach().squeeze(-1)  # [S] or [B, S]
    if scores.ndim == 2:
        scores = scores.mean(0)
    order = scores.argsort(descending=True, stable=True)[: global_count(hidden)]
    return tuple(sorted(order.tolist()))


def global_count(hidden: Tensor) -> int:
    """How many global tokens the hidden states `[..., S, C]` ask for: max(1, int(base * (0.5 + 0.5 * sigmoid(x)))) with
    base = min(64, max(1, int(0.2 * S))) and x = mean(std(h)) - 1, the standard deviation over the channels."""
    base = min(MOST_GLOBAL, max(1, int(0.2 * hidden.shape[-2])))
    spread = hidden.detach().float().std(-1).mean()
    return max(1, int(base * (0.5 + 0.5 * float((spread - 1).sigmoid()))))
