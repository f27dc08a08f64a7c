"""What the schedule and transfer tests share: problems of every kind, and masks pair by pair."""

from collections.abc import Iterator
from itertools import accumulate

import numpy as np

from attention.layouts import positions
from attention.masks import CAUSAL, FULL, Mask
from attention.schedules import SEQUENCE, Problem, Step
from attention.variants import Variant

WORLDS = range(1, 9)
SHARD = 6  # tokens of a single sequence that a rank holds
# full, causal, and windows shorter than a shard, equal to one and longer, on one side or on both
WINDOWS = [
    Mask(*sides)
    for sides in ((0, 0), (3, 0), (SHARD, 0), (11, 0), (20, 0), (2, 4), (SHARD, SHARD), (13, 7), (-1, 5), (7, -1))
]
MASKS = [FULL, CAUSAL, *WINDOWS]


def cumulated(lengths) -> tuple[int, ...]:
    return tuple(accumulate(lengths, initial=0))


def does(variant: Variant, mask: Mask) -> bool:
    return not (variant.causal_only and not mask.causal) and not (mask.windowed and not variant.windows)


def packs(variant: Variant, world: int) -> list[tuple[int, ...]]:
    """cu_seqlens that the variant takes: one sequence, and packs of different lengths, an empty one among them."""
    unit = 2 * world
    found = [(SHARD * world,)]
    if variant.packs:
        found += [(unit, 4 * unit, 2 * unit), (3 * unit, 0, unit)]
        if not variant.layout.per_sequence or variant.layout.replicated:
            found += [(1, 5 * unit - 4, 3), (5 * unit - 1, 1)]
    return [cumulated(lengths) for lengths in found]


def problems(variant: Variant, world: int) -> Iterator[Problem]:
    for cu_seqlens in packs(variant, world):
        for mask in MASKS:
            if does(variant, mask):
                yield variant.problem(cu_seqlens, world, mask)


def band(mask: Mask, sq: int, sk: int) -> np.ndarray:
    """The pairs that a bottom-right aligned mask keeps, `[sq, sk]`."""
    offset = np.arange(sk)[None] - np.arange(sq)[:, None] - (sk - sq)
    keep = np.ones((sq, sk), dtype=bool)
    if mask.left >= 0:
        keep &= offset >= -mask.left
    if mask.right >= 0:
        keep &= offset <= mask.right
    return keep


def global_pairs(problem: Problem) -> np.ndarray:
    """All pairs of the mask, sequence by sequence, `[T, T]`."""
    total = problem.cu_seqlens[-1]
    keep = np.zeros((total, total), dtype=bool)
    for a, b in zip(problem.cu_seqlens, problem.cu_seqlens[1:], strict=False):
        keep[a:b, a:b] = band(problem.mask, b - a, b - a)
    return keep


def query_positions(problem: Problem, rank: int) -> np.ndarray:
    return np.array(positions(problem.q_layout.shards(problem.cu_seqlens, problem.world)[rank]), dtype=int)


def key_positions(problem: Problem, step: Step) -> np.ndarray:
    """The global places of the keys that a step's key slices index."""
    if step.owner == SEQUENCE:
        return np.arange(problem.cu_seqlens[-1])
    return np.array(positions(problem.layout.shards(problem.cu_seqlens, problem.world)[step.owner]), dtype=int)
