"""Steps, in which a rank meets the keys of an owner, and the blocks that it computes against them. Without torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from attention.geometry.cuts import Places
from attention.geometry.intervals import Column, by_number, joined
from attention.masks.band import Band, Interval, Intervals
from attention.masks.pattern import Pattern

SEQUENCE = -1  # the owner of keys that were gathered


class Block(NamedTuple):
    """`group`: the number of the query chunk within its sequence, if several chunks of a sequence see prefixes of its
    keys. A packed kernel call takes the blocks of one group, so that it has each sequence once. Under a pattern, a
    block has all queries of the rank and all keys of the step."""

    q: Interval
    k: Interval
    mask: Band | Pattern
    group: int = 0

    @property
    def pairs(self) -> int:
        return self.mask.pairs(self.q[1] - self.q[0], self.k[1] - self.k[0])


@dataclass(frozen=True, eq=False)
class Repeated(Sequence[Block]):
    """The same blocks in every sequence of a packed batch, whose shard begins at `first` and has chunks of `size` tokens.
    unit: the blocks of one sequence, in chunks."""

    unit: tuple[Block, ...]
    first: Column
    size: Column

    def slices(self, unit: Interval) -> list[Interval]:
        """By sequence, what lies in these chunks."""
        start, stop = (self.first + self.size * at for at in unit)
        return list(zip(start.tolist(), stop.tolist(), strict=True))

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        """Sequence by sequence."""
        columns = [zip(self.slices(b.q), self.slices(b.k), strict=True) for b in self.unit]
        return tuple(
            Block(q, k, b.mask, b.group)
            for sequence in zip(*columns, strict=True)
            for b, (q, k) in zip(self.unit, sequence, strict=True)
        )

    def __getitem__(self, i: Any) -> Any:
        return self.blocks[i]

    def __len__(self) -> int:
        return len(self.unit) * len(self.first)


class Step(NamedTuple):
    """keys: the tokens that the step needs, in the order in which they lie for the rank: intervals of the owner's shard, or
    after a gather of the sequence. They contain the keys of all blocks, and may contain more. Equal steps of a ring share one
    tuple of blocks. places: where each token of the sequence lies among the keys, if not in the order of the sequence."""

    owner: int
    keys: Intervals
    blocks: Sequence[Block]
    places: Places | None = None

    @property
    def pairs(self) -> int:
        return sum(block.pairs for block in self.blocks)

    def where(self, keys: Iterable[Interval]) -> Intervals:
        """Where the key slices of blocks lie among the step's keys, one after another; neighbours are joined."""
        if self.places is None:
            return joined(keys)
        _, parts = self.places.within(*np.array(list(keys), np.int64).reshape(-1, 2).T)
        ((intervals,),) = by_number(np.zeros_like(parts.at), 1, parts.lengths, parts.at)
        return intervals
