"""The keys and values of one layer, split over the ranks."""

from __future__ import annotations

from torch import Tensor


class ShardedKV:
    """This rank's share of at most `tokens` keys and values: the tokens `rank * share` to `(rank + 1) * share`, as a decode takes
    them. `seen` counts those of all ranks."""

    def __init__(self, rank: int, world: int, tokens: int):
        self.share = -(-tokens // world)
        self.first, self.tokens, self.seen = rank * self.share, tokens, 0
        self.parts: list[Tensor] = []

    def append(self, *new: Tensor) -> list[Tensor]:
        """Stores what this rank holds of the next tokens: keys `[B, Hk, n, D]`, values `[B, Hk, n, Dv]`. Returns its whole share `[B,
        Hk, share, .]` of each, of which tokens to come are 0. Raises ValueError beyond the size."""
        start, self.seen = self.seen, self.seen + new[0].shape[-2]
        if self.seen > self.tokens:
            raise ValueError(
                f"the cache has {self.tokens} tokens, and {self.seen} are needed: cp.cache(tokens={self.seen})"
            )
        if not self.parts:
            self.parts = [x.new_zeros((*x.shape[:2], self.share, x.shape[3])) for x in new]
        low, high = max(start, self.first), min(self.seen, self.first + self.share)
        if low < high:
            for mine, x in zip(self.parts, new, strict=True):
                mine[:, :, low - self.first : high - self.first] = x[:, :, low - start : high - start]
        return self.parts
