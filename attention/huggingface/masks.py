"""What the layers of a model of transformers see, as read from its mask functions. Imports nothing of transformers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from inspect import getclosurevars
from operator import and_, or_
from typing import Any, NamedTuple

import numpy as np

from attention.masks.band import CAUSAL, FULL, Band, narrower
from attention.masks.mask import Mask, short
from attention.masks.rectangles import Rectangles, from_columns

Function = Callable[..., Any]  # of transformers: whether a query sees a key, by batch element, head and two positions


class LayerMask(NamedTuple):
    """Which keys a query of a layer sees within its document, or would without any other mask: those within `band`, and those of
    its own block (an image's tokens) within `block`, None for no keys; of both, those of its own `chunk` tokens."""

    band: Band | None = FULL
    block: Band | None = FULL
    chunk: int | None = None

    @property
    def by_blocks(self) -> bool:
        return self.band != self.block

    def __and__(self, other: LayerMask) -> LayerMask:
        chunks = {self.chunk, other.chunk} - {None}
        if len(chunks) > 1:
            raise ValueError(f"the model's mask intersects chunks of {sorted(map(str, chunks))} tokens: not supported")
        band, block = _each(_intersection, self, other)
        return LayerMask(band, block, *chunks)

    def __or__(self, other: LayerMask) -> LayerMask:
        if self.chunk != other.chunk:
            raise ValueError("the model's mask has or_masks of chunks and other tokens: context_parallel does not")
        return LayerMask(*_each(_union, self, other), self.chunk)


@dataclass(frozen=True)
class Blocks(Mask):
    """The mask of a layer over a sequence with blocks of tokens, each from start to stop, in this order."""

    layer: LayerMask
    ranges: tuple[tuple[int, int], ...]

    def build(self, tokens: int) -> Rectangles:
        assert self.layer.chunk is None
        start, stop = np.array(self.ranges, np.int64).T
        after, before = np.append(0, stop), np.append(start, tokens)  # between the blocks
        beside, within = (x.bounds() if x else (1, 0) for x in (self.layer.band, self.layer.block))
        parts = [
            from_columns(after, before, 0, tokens, *beside),
            from_columns(start, stop, 0, start, *beside),
            from_columns(start, stop, start, stop, *within),
            from_columns(start, stop, stop, tokens, *beside),
        ]
        return np.concatenate(parts)

    def describe(self) -> str:
        return f"{self.layer} with blocks {short(self.ranges)}"


def _each(
    join: Callable[[Band | None, Band | None], Band | None], a: LayerMask, b: LayerMask
) -> tuple[Band | None, Band | None]:
    return join(a.band, b.band), join(a.block, b.block)


def _intersection(a: Band | None, b: Band | None) -> Band | None:
    return None if a is None or b is None else narrower(a, b)


def _union(a: Band | None, b: Band | None) -> Band | None:
    """Every band holds the diagonal, so that there is no gap between two."""
    if a is None or b is None:
        return a or b
    return Band(*(-1 if -1 in sides else max(sides) for sides in ((a.left, b.left), (a.right, b.right))))


def _banded(left: int = -1, right: int = -1) -> LayerMask:
    return LayerMask(Band(left, right), Band(left, right))


# by the name of the function that makes a mask function, from the variables of the latter
READ: dict[str, Callable[[Mapping[str, Any]], LayerMask]] = {
    "and_masks": lambda x: reduce(and_, map(layer_mask, x["mask_functions"])),
    "or_masks": lambda x: reduce(or_, map(layer_mask, x["mask_functions"])),
    # positions and documents are those of the sharded batch
    "remap_positions_for_packed_sequence": lambda x: layer_mask(x["mask_function"]),
    "packed_sequence_mask_function": lambda _: LayerMask(),
    "bidirectional_mask_function": lambda _: LayerMask(),
    "causal_mask_function": lambda _: LayerMask(CAUSAL, CAUSAL),
    "sliding_window_overlay": lambda x: _banded(x["sliding_window"] - 1),
    "sliding_window_bidirectional_overlay": lambda x: _banded(x["sliding_window"], x["sliding_window"]),
    "_bidirectional_window_overlay": lambda x: _banded(x["sliding_window"] - 1, x["sliding_window"] - 1),
    "chunked_overlay": lambda x: LayerMask(chunk=x["chunk_size"]),
    "blockwise_overlay": lambda _: LayerMask(None, FULL),
}


def layer_mask(function: Function) -> LayerMask:
    """The mask of a layer, from the function that transformers would make a tensor of. Raises ValueError for a function that
    is not known."""
    name = function.__qualname__.partition(".")[0]
    if name in READ:
        return READ[name](getclosurevars(function).nonlocals)
    if _constant(function):
        return LayerMask()
    raise ValueError(
        f"the model's mask has {name}: context_parallel does full and causal masks, windows, chunks and blocks"
    )


def _constant(function: Function) -> bool:
    """Whether the function says True without any positions."""
    try:
        return bool(function())
    except TypeError:
        return False


def in_graph(config: Any, two_sided: bool, size: int | None) -> LayerMask:
    """As `layer_mask`, within `torch.compile`, which can't look into a function. size: of windows or chunks."""
    window, chunk = (getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size"))
    if size is not None and window == chunk:
        raise ValueError(
            f"sliding_window=attention_chunk_size={size}: within torch.compile they must differ; change one, or run the model eagerly"
        )
    if size is not None and size == chunk:
        return LayerMask(CAUSAL, CAUSAL, chunk)
    if two_sided:
        return _banded() if size is None else _banded(size, size)
    return _banded(-1 if size is None else size - 1, 0)
