"""Random masks cut for every variant that takes them: the patterns of all ranks and steps, mapped back to global positions."""

import random

import numpy as np
import pytest

from attention import masks
from attention.geometry.layouts import positions
from attention.geometry.schedules import SEQUENCE, Problem, Step, steps
from attention.variants.registry import VARIANTS
from tests.support.coverage import WORLDS
from tests.support.mask_definitions import DEFINITIONS, random_parameters

TAKE_ANY = [name for name, v in VARIANTS.items() if v.any_mask]


def made(name: str, tokens: int, draw: random.Random) -> masks.Mask:
    parameters = random_parameters(name, tokens, draw)
    if "inner" in parameters:
        left, right = parameters["inner"]
        parameters["inner"] = masks.sliding_window(left, right)
    return masks.make(name, **parameters)


def random_masks(tokens: int, seed: int) -> list[masks.Mask]:
    draw = random.Random(seed)
    found = [made(name, tokens, draw) for name in DEFINITIONS]
    return found + [made(draw.choice(list(DEFINITIONS)), tokens, draw) & x for x in found[:4]]


def keys_of(problem: Problem, rank: int, step: Step) -> np.ndarray:
    """The global positions of a step's keys, as they lie for the rank."""
    if step.owner == SEQUENCE:
        return np.concatenate([np.arange(*x) for x in step.keys] or [np.zeros(0, int)])
    shard = np.array(positions(problem.layout.shards(problem.cu_seqlens, problem.world)[step.owner]), int)
    if step.owner == rank:
        return shard
    return np.concatenate([shard[a:b] for a, b in step.keys] or [np.zeros(0, int)])


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", TAKE_ANY)
def test_every_pair_is_cut_exactly_once_and_only_needed_keys_travel(name, world):
    variant, tokens = VARIANTS[name], 12 * world
    for mask in random_masks(tokens, world):
        if variant.causal_only:
            mask = mask & masks.causal()
        options = {"usp": {"ring": "contiguous"}, "balanced": {"mask": mask}}.get(name, {})
        problem = variant.problem((0, tokens), 1 if name == "dense" else world, mask, options)
        if not problem.is_cut:
            continue
        expected = mask.dense(tokens).numpy()
        counts = np.zeros((tokens, tokens), int)
        for rank in range(problem.world):
            queries = np.array(positions(problem.q_layout.shards(problem.cu_seqlens, problem.world)[rank]), int)
            for step in steps(problem, rank):
                keys = keys_of(problem, rank, step)
                for block in step.blocks:
                    for q0, q1, k0, k1, lo, hi in block.mask.rectangles.tolist():
                        ahead = np.arange(k0, k1) - np.arange(q0, q1)[:, None]
                        counts[np.ix_(queries[q0:q1], keys[k0:k1])] += (ahead >= lo) & (ahead <= hi)
                if step.owner != rank:
                    assert expected[queries][:, keys].any(0).all(), (mask, rank, step.owner)
        assert (counts == expected).all(), mask
