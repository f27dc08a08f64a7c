"""What the tests of the geometry share: problems of every kind, and masks pair by pair."""

from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from itertools import accumulate
from pkgutil import iter_modules
from typing import Any

import numpy as np

from attention import variants
from attention.geometry import layouts
from attention.geometry.cuts import Places
from attention.geometry.layouts import Layout, Shard, positions
from attention.geometry.schedules import Problem, steps
from attention.geometry.steps import SEQUENCE, Step
from attention.geometry.transfers import Move, move
from attention.masks.band import CAUSAL, FULL, Band
from attention.variants.base import Variant
from attention.variants.registry import VARIANTS
from tests.support.mask_definitions import rectangles

WORLDS = (1, 2, 3, 8)
SHARD = 6  # tokens of a single sequence that a rank holds
# full, causal, and windows shorter than a shard, equal to one and longer, on one side or on both
WINDOWS = [
    Band(*sides)
    for sides in ((0, 0), (3, 0), (SHARD, 0), (11, 0), (20, 0), (2, 4), (SHARD, SHARD), (13, 7), (-1, 5), (7, -1))
]
MASKS = [FULL, CAUSAL, *WINDOWS]
DECODES = {name for name, v in VARIANTS.items() if v.decode}
# these must take packed sequences of any lengths; others may want multiples
ANY_LENGTHS = {"dense", "llama3", "ulysses"}


def every_layout() -> dict[str, Layout]:
    """All that the geometry and the variants' files declare, by name."""
    modules = [layouts, *(import_module(f"{variants.__name__}.{m.name}") for m in iter_modules(variants.__path__))]
    return {x.name: x for module in modules for x in vars(module).values() if isinstance(x, Layout)}


def cumulated(lengths) -> tuple[int, ...]:
    return tuple(accumulate(lengths, initial=0))


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def settings(variant: Variant, world: int) -> list[dict[str, Any]]:
    """Every choice of the options that make another schedule; none where the variant has no such world."""
    if variant.name == "usp":
        return [{"ring": ring, "ulysses_size": n} for ring in ("zigzag", "contiguous") for n in divisors(world)]
    if variant.name == "grouped":
        return [{"n_groups": n} for n in range(1, 9)] if world == 1 else []
    if "own_first" in variant.options.names():
        return [{"own_first": False}, {"own_first": True}]
    return [{}]


def does(variant: Variant, mask: Band, options: Mapping[str, Any] | None = None) -> bool:
    if mask.windowed and ((options or {}).get("own_first") or (options or {}).get("grouping") == "fused"):
        return False
    if variant.options.from_call:  # made for the causal mask, where none is given
        return mask.right == 0
    zigzag = variant.name == "usp" and {**variant.parse().plain(), **(options or {})}["ring"] == "zigzag"
    if (zigzag or variant.causal_only) and mask.right != 0:
        return False
    return not (mask.windowed and not variant.windows)


def packs(variant: Variant, world: int, options: Mapping[str, Any]) -> list[tuple[int, ...]]:
    """cu_seqlens that the variant takes: one sequence, and packed batches of different lengths, with an empty sequence among them."""
    if variant.decode:  # as many keys as ranks, fewer, and last shards that are short or empty
        return [(0, n) for n in sorted({1, 2, world, world + 1, 2 * world + 1, SHARD * world - 1, SHARD * world})]
    chunks = options.get("n_groups", world)
    unit = 2 * chunks
    found = [(SHARD * chunks,), (unit, 4 * unit, 2 * unit), (3 * unit, 0, unit)]
    if "own_first" in variant.options.names() or variant.alias_of:  # many sequences: a shard moves in one stretch
        found.append(tuple(2 * world * n for n in range(1, 10)))
    if variant.name in ANY_LENGTHS:
        found += [(1, 5 * unit - 4, 3), (1,) * unit]
    return [cumulated(lengths) for lengths in found]


def problems(variant: Variant, world: int) -> Iterator[Problem]:
    for options in settings(variant, world):
        for cu_seqlens in packs(variant, world, options):
            for mask in MASKS:
                if not does(variant, mask, options):
                    continue
                for q_tokens in (1, 3) if variant.decode else (None,):
                    yield variant.problem(cu_seqlens, world, mask, options, q_tokens)


def band(mask: Band, sq: int, sk: int) -> np.ndarray:
    """The pairs that a bottom-right aligned mask keeps, `[sq, sk]`."""
    return rectangles(max(sq, sk), [((0, sq), (0, sk), (mask.left, mask.right))])[:sq, :sk]


def global_pairs(problem: Problem) -> np.ndarray:
    """All pairs of the mask, sequence by sequence, `[T, T]`; of a decode, whose queries are the last tokens, `[queries, T]`."""
    total = problem.cu_seqlens[-1]
    if problem.q_tokens is not None:
        return band(problem.band, problem.q_tokens, total)
    if problem.is_cut:
        return problem.mask.dense(total).numpy()
    keep = np.zeros((total, total), dtype=bool)
    for a, b in zip(problem.cu_seqlens, problem.cu_seqlens[1:], strict=False):
        keep[a:b, a:b] = band(problem.band, b - a, b - a)
    return keep


def query_positions(problem: Problem, place: int) -> np.ndarray:
    if problem.q_tokens is not None:
        return np.arange(problem.q_tokens)
    return np.array(positions(problem.q_layout.shards(problem.cu_seqlens, problem.world)[place]), dtype=int)


def key_positions(problem: Problem, place: int, step: Step) -> np.ndarray:
    """The global positions of the keys of a rank's step as its blocks index them: its own shard in place, others side by side."""
    if step.owner == SEQUENCE:
        at = np.arange(problem.cu_seqlens[-1])
    else:
        at = np.array(positions(problem.layout.shards(problem.cu_seqlens, problem.world)[step.owner]), dtype=int)
    if step.owner == place or step.places is not None:
        return at
    return np.concatenate([at[a:b] for a, b in step.keys]) if step.keys else at[:0]


def needed_keys(problem: Problem, rank: int) -> Shard:
    """The global positions of the keys that a rank gathers, in the order of the gathered keys."""
    return tuple(range(*interval) for interval in steps(problem, rank)[-1].keys)


def redistributed(sources: Sequence[Shard], targets: Sequence[Shard], rank: int) -> Move:
    """This rank's part in a move from shards to others."""
    return move(Places.of_shards(sources), Places.of_shards(targets), len(sources), rank)
