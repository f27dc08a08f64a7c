"""DCA with selector=learned: a linear score of the hidden states chooses the global tokens. The mask depends on data, and is
made for each input. One mask serves all sequences of a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from attention.masks.dca import chosen_globals
from attention.masks.mask import Mask

if TYPE_CHECKING:
    from torch import Tensor

MOST_GLOBAL = 64


def learned(
    hidden: Tensor, score: Callable[[Tensor], Tensor], window: int, seed: int = 0, causal: bool = False
) -> Mask:
    """The mask for hidden states `[S, C]` or `[B, S, C]`: the global tokens that `score` chooses, the window, and
    0.1 * S random keys. On several ranks, give each the hidden states of the whole sequence, so that all have the same
    mask."""
    return chosen_globals(window, global_positions(hidden, score), int(0.1 * hidden.shape[-2]), seed, causal)


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
