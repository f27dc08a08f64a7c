"""A cache of transformers whose keys and values are split over the ranks. Imports transformers."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicLayer

from attention.api import ContextParallel
from attention.huggingface.batch import of_band
from attention.huggingface.masks import LayerMask
from attention.masks import chunked


class ShardedCache(Cache):  # type: ignore[misc]
    """The cache of a model with `layers` layers, for a decode `fn`. It has room for `tokens` tokens, prompt included."""

    def __init__(self, fn: ContextParallel, layers: int, tokens: int):
        super().__init__(layers=[ShardedLayer(fn, tokens) for _ in range(layers)])
        self.fn = fn

    def attend(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, layer: LayerMask, **options: Any) -> Tensor:
        """Attention of q `[B, s, H, D]`, the newest tokens, over this rank's share of the keys `[B, share, Hk, D]`."""
        options |= {"kv_lengths": [self.get_seq_length()] * len(q), "kv_tokens": k.shape[1] * self.fn.world}
        if layer.by_blocks:
            raise ValueError(
                "token_type_ids: tokens of an image see each other, which a decode does not; leave them out"
            )
        mask = None if layer.chunk is None else chunked(layer.chunk)
        return self.fn(q, k, v, mask=mask, **of_band(layer.band), **options)


class ShardedLayer(DynamicLayer):  # type: ignore[misc]
    """A layer's keys and values: this rank's share, the tokens `rank * share` to `(rank + 1) * share` as a decode takes them.
    `seen` counts the tokens of all ranks. What transformers does to the batch of `keys` and `values` is inherited."""

    def __init__(self, fn: ContextParallel, tokens: int):
        super().__init__()
        self.share = -(-tokens // fn.world)
        self.first, self.tokens, self.seen = fn.rank * self.share, tokens, 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor | None = None) -> None:
        """Makes room for the share. Before transformers 5, early initialization has keys and values of one shape."""
        shapes = key_states, key_states if value_states is None else value_states
        self.keys, self.values = (x.new_zeros((*x.shape[:2], self.share, x.shape[3])) for x in shapes)
        self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True

    def update(self, key_states: Tensor, value_states: Tensor, *unused: Any, **options: Any) -> tuple[Tensor, Tensor]:
        """Stores what this rank holds of the next tokens: keys `[B, Hk, n, D]`, values `[B, Hk, n, Dv]`. Returns its whole
        share `[B, Hk, share, .]` of each, tokens to come included. Raises ValueError beyond the size."""
        if self.keys is None:
            self.lazy_initialization(key_states, value_states)
        start, stop = self.seen, self.seen + key_states.shape[-2]
        if stop > self.tokens:
            raise ValueError(f"the cache has {self.tokens} tokens, and {stop} are needed: cp.cache(tokens={stop})")
        self.seen = stop
        low, high = max(start, self.first), min(stop, self.first + self.share)
        if low < high:
            for share, new in ((self.keys, key_states), (self.values, value_states)):
                share[:, :, low - self.first : high - self.first] = new[:, :, low - start : high - start]
        return self.keys, self.values

    def crop(self, tokens: int) -> None:
        """Removes the last -tokens tokens. Before transformers 5, a positive number is of tokens that stay."""
        self.seen = min(self.seen, tokens) if tokens > 0 else self.seen + tokens

    def get_seq_length(self, *unused: Any) -> int:
        return self.seen

    def get_mask_sizes(self, new: Any) -> tuple[int, int]:
        """The keys with the new tokens, and the first key. new: their number, before transformers 5 their positions."""
        return self.seen + (new if isinstance(new, int) else len(new)), 0

    def get_max_length(self) -> int:
        return self.tokens

    get_max_cache_shape = get_max_length  # before transformers 5

    def reset(self) -> None:
        super().reset()
        self.seen = 0
