"""Pairs, FLOPs and the bytes that kernels move, worked out by hand."""

import pytest

from attention.geometry import counts
from attention.geometry.counts import Shapes
from attention.geometry.schedules import Problem
from attention.masks.band import CAUSAL, FULL
from attention.variants.registry import VARIANTS
from tests.support.coverage import WORLDS, cumulated, problems

# B 2, D 16, bf16: one head of a token is 64 bytes; k and v of a token, 2 KV heads
HEAD = 64
KV = 2 * 2 * HEAD
SHAPES = Shapes(batch=2, heads=8, kv_heads=2, head_dim=16, itemsize=2)


def made(name: str, lengths, world: int, mask=CAUSAL, q_tokens: int | None = None, **options) -> Problem:
    cu = cumulated(lengths if isinstance(lengths, tuple) else (lengths,))
    return VARIANTS[name].problem(cu, world, mask, options, q_tokens)


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("world", WORLDS)
def test_the_flops_of_the_ranks_sum_to_the_whole(name, world):
    shapes = Shapes(batch=3, heads=840, kv_heads=840, head_dim=4, itemsize=2)  # 840: divides for every world
    for problem in problems(VARIANTS[name], world):
        by_rank = counts.rank_flops(problem, shapes)
        assert len(by_rank) == world
        times = world if name in ("dense", "ring_decode") else 1  # there every rank computes everything
        assert sum(by_rank) == times * counts.forward_flops(shapes, counts.problem_pairs(problem)), problem


def test_a_block_moves_its_inputs_and_outputs_once():
    # 3, 3, 3 and 1 keys of 2 heads, k and v; q and out of one token, 8 heads
    problem = made("tree", 10, 4, FULL, 1)
    found = [counts.kernel_bytes(problem, SHAPES, rank, False) for rank in range(4)]
    assert found == [2 * 8 * HEAD + n * KV for n in (3, 3, 3, 1)]
    # Ulysses on 4 ranks: 16 tokens of 2 query heads in and out, and of one KV head
    problem = made("ulysses", 16, 4)
    assert [counts.kernel_bytes(problem, SHAPES, rank, False) for rank in range(4)] == [16 * (2 * 2 + 2) * HEAD] * 4
