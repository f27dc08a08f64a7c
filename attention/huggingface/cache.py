"""A cache of transformers whose tokens are split over the ranks."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


class ShardedLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer's keys and values of the tokens `rank * share` to `(rank + 1) * share`."""

    is_sliding = False

    def __init__(self, rank: int, share: int, tokens: int):
        super().__init__()
        self.first, self.share, self.tokens = rank * share, share, tokens
        self.seen = 0  # tokens on all ranks

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys, self.values = (
            x.new_zeros((*x.shape[:2], self.share, x.shape[3])) for x in (key_states, value_states)
        )
        self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True

    def update(self, key_states: Tensor, value_states: Tensor, *unused: Any, **options: Any) -> tuple[Tensor, Tensor]:
        """Stores those of the new tokens `[B, Hk, n, D]` that belong to this rank. Returns all of the rank's `[B, Hk, share,
        D]`, of which those beyond the last token are 0. Raises ValueError beyond the cache's size."""
        if self.keys is None:
            self.lazy_initialization(key_states, value_states)
        start, self.seen = self.seen, self.seen + key_states.shape[-2]
        if self.seen > self.tokens:
            raise ValueError(
                f"the cache has {self.tokens} tokens, and {self.seen} are needed: cp.cache(tokens={self.seen})"
            )
        low, high = max(start, self.first), min(self.seen, self.first + self.share)
        if low < high:
            for mine, new in ((self.keys, key_states), (self.values, value_states)):
                mine[:, :, low - self.first : high - self.first] = new[:, :, low - start : high - start]
        return self.keys, self.values

    def get_seq_length(self, *unused: Any) -> int:
        return self.seen

    def get_mask_sizes(self, new: Any) -> tuple[int, int]:
        """(keys, offset) with the new tokens: their number or, before transformers 5, their positions."""
        return self.seen + (new if isinstance(new, int) else len(new)), 0

    def get_max_length(self) -> int:
        return self.tokens

    get_max_cache_shape = get_max_length  # its name before transformers 5

    def reset(self) -> None:
        super().reset()
        self.seen = 0


def sharded_cache(layers: int, rank: int, world: int, tokens: int) -> Cache:
    share = -(-tokens // world)
    return Cache(layers=[ShardedLayer(rank, share, tokens) for _ in range(layers)])
