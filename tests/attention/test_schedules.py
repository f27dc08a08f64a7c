"""Schedules: every pair of the mask exactly once, the balance each promises, and the refusals."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from geometry import MASKS, SHARD, WINDOWS, WORLDS, band, does, global_pairs, key_positions, problems, query_positions

import attention
from attention.masks import CAUSAL, FULL, Mask
from attention.schedules import Problem, length, steps, union
from attention.variants import VARIANTS, Variant, check_heads, variant

every_variant = pytest.mark.parametrize("name", VARIANTS)
every_world = pytest.mark.parametrize("world", WORLDS)


def covered(chosen: Variant, problem: Problem, rank: int) -> np.ndarray:
    """How often a rank's blocks compute each global pair, `[T, T]`."""
    count = np.zeros((problem.cu_seqlens[-1],) * 2, dtype=int)
    q_at = query_positions(problem, rank)
    for step in steps(chosen.schedule, problem, rank):
        k_at = key_positions(problem, step)
        for block in step.blocks:
            assert 0 <= block.q[0] <= block.q[1] <= len(q_at) and 0 <= block.k[0] <= block.k[1] <= len(k_at)
            rows, keys = q_at[slice(*block.q)], k_at[slice(*block.k)]
            pairs = band(block.mask, len(rows), len(keys))
            assert block.pairs == pairs.sum()
            count[np.ix_(rows, keys)] += pairs
    return count


def total_pairs(chosen: Variant, problem: Problem) -> list[int]:
    return [sum(step.pairs for step in steps(chosen.schedule, problem, r)) for r in range(problem.world)]


@every_variant
@every_world
def test_every_pair_of_the_mask_is_computed_exactly_once(name, world):
    chosen = VARIANTS[name]
    for problem in problems(chosen, world):
        expected = global_pairs(problem)
        counts = [covered(chosen, problem, rank) for rank in range(world)]
        if problem.layout.replicated:
            assert all((count == expected).all() for count in counts), problem
        else:
            assert (sum(counts) == expected).all(), problem


@every_variant
@every_world
def test_all_ranks_have_as_many_steps(name, world):
    chosen = VARIANTS[name]
    for problem in problems(chosen, world):
        assert len({len(steps(chosen.schedule, problem, rank)) for rank in range(world)}) == 1


@pytest.mark.parametrize("name", ["zigzag", "ring_allgather"])
@every_world
def test_balanced_variants_give_every_rank_the_same_causal_work(name, world):
    chosen = VARIANTS[name]
    for problem in problems(chosen, world):
        if problem.mask.causal:
            assert set(total_pairs(chosen, problem)) == {int(global_pairs(problem).sum()) // world}, problem


@every_world
def test_zigzag_ranks_do_the_same_work_at_every_step(world):
    chosen = VARIANTS["zigzag"]
    for problem in problems(chosen, world):
        work = [[step.pairs for step in steps(chosen.schedule, problem, rank)] for rank in range(world)]
        assert all(ranks == work[0] for ranks in work), problem


@every_world
def test_the_causal_ring_is_imbalanced_as_the_table_says(world):
    problem = VARIANTS["ring"].problem((0, SHARD * world), world, CAUSAL)
    for rank in range(world):
        own, full = SHARD * (SHARD + 1) // 2, SHARD * SHARD
        expected = [own] + [full] * rank + [0] * (world - 1 - rank)
        assert [step.pairs for step in steps(VARIANTS["ring"].schedule, problem, rank)] == expected
    totals = total_pairs(VARIANTS["ring"], problem)
    assert totals == sorted(totals) and len(set(totals)) == world


@pytest.mark.parametrize(
    "name", [v.name for v in VARIANTS.values() if v.exchange == "ring" and not v.layout.replicated]
)
@every_world
def test_the_ring_walks_all_owners_backwards_from_itself(name, world):
    chosen = VARIANTS[name]
    problem = chosen.problem((0, SHARD * world), world, CAUSAL)
    for rank in range(world):
        owners = [step.owner for step in steps(chosen.schedule, problem, rank)]
        assert owners == [(rank - i) % world for i in range(world)]


@pytest.mark.parametrize("mask", WINDOWS, ids=Mask.describe)
@every_world
def test_a_windowed_ring_computes_only_with_owners_within_the_window(mask, world):
    problem = VARIANTS["ring"].problem((0, SHARD * world), world, mask)
    for rank in range(world):
        for step in steps(VARIANTS["ring"].schedule, problem, rank):
            before = (rank - step.owner - 1) * SHARD + 1  # from the first query to the owner's last key
            after = (step.owner - rank - 1) * SHARD + 1
            near = (mask.left < 0 or before <= mask.left) and (mask.right < 0 or after <= mask.right)
            assert bool(step.blocks) == near, (rank, step)


def test_gathered_queries_make_one_call_a_chunk():
    chosen = VARIANTS["ring_allgather"]
    problem = chosen.problem((0, 48), 4, CAUSAL)
    for rank in range(4):
        (step,) = steps(chosen.schedule, problem, rank)
        early, late = 2 * rank, 7 - 2 * rank
        assert [(b.q, b.k) for b in step.blocks] == [((0, 6), (0, 6 * (early + 1))), ((6, 12), (0, 6 * (late + 1)))]
        assert all(b.mask.causal for b in step.blocks)


def test_union_merges_what_meets_and_drops_what_is_empty():
    assert union([(4, 6), (0, 2), (6, 9), (3, 3), (1, 2)]) == ((0, 2), (4, 9))
    assert union([(0, 10), (2, 3), (20, 21)]) == ((0, 10), (20, 21))
    assert length(union([(0, 10), (2, 3), (20, 21)])) == 11


def refusal(chosen: Variant, cu_seqlens: tuple[int, ...], world: int, mask: Mask) -> str:
    with pytest.raises(ValueError) as error:
        chosen.problem(cu_seqlens, world, mask)
    return str(error.value)


@every_variant
def test_masks_that_a_variant_lacks_are_refused_with_variants_that_have_them(name):
    chosen = VARIANTS[name]
    for mask in MASKS:
        if does(chosen, mask):
            chosen.problem((0, 48), 4, mask)
            continue
        text = refusal(chosen, (0, 48), 4, mask)
        value = f"window=({mask.left}, {mask.right})" if mask.right == 0 else "causal=false"
        assert text.startswith(value) and name in text
        ways_out = set(re.findall(r"\w+", text.removeprefix(value))) & set(VARIANTS) - {name}
        assert ways_out
        for other in ways_out:
            VARIANTS[other].problem((0, 48), 4, mask)


@every_variant
def test_packs_that_a_variant_lacks_are_refused_with_variants_that_take_them(name):
    chosen, cu = VARIANTS[name], (0, 16, 48)
    if chosen.packs:
        chosen.problem(cu, 4, CAUSAL)
        return
    text = refusal(chosen, cu, 4, CAUSAL)
    assert "cu_seqlens of 2 sequences" in text and name in text
    ways_out = set(re.findall(r"\w+", text)) & set(VARIANTS) - {name}
    assert ways_out and all(VARIANTS[other].packs for other in ways_out)


@pytest.mark.parametrize("name", sorted(VARIANTS.keys() & {"zigzag", "stripe", "zigzag_varlen", "zigzag_llama3"}))
def test_variants_that_balance_the_causal_mask_refuse_others(name):
    assert "causal=true only" in refusal(VARIANTS[name], (0, 48), 4, FULL)


@pytest.mark.parametrize("name", [v.name for v in VARIANTS.values() if not v.layout.replicated])
@every_world
def test_a_length_that_does_not_divide_is_refused_with_one_that_works(name, world):
    chosen = VARIANTS[name]
    for mask in (FULL, CAUSAL):
        if not does(chosen, mask):
            continue
        refused = 0
        for n in range(1, 50):
            try:
                problem = chosen.problem((0, n), world, mask)
                assert n % world == 0 and problem.cu_seqlens == (0, n)
                continue
            except ValueError as error:
                text = str(error)
            refused += 1
            assert f"seq_len={n}:" in text and "needs a multiple of" in text
            (offer,) = re.findall(r"(\d+) would work", text)
            chosen.problem((0, int(offer)), world, mask)
        assert refused or world == 1


def test_an_unknown_variant_is_refused_with_the_nearest_or_all():
    with pytest.raises(ValueError, match=r"attention='zigzg' is not a variant; did you mean .*zigzag"):
        variant("zigzg")
    with pytest.raises(ValueError) as error:
        variant("?")
    assert all(name in str(error.value) for name in VARIANTS)
    assert all(variant(name) is VARIANTS[name] for name in VARIANTS)


def test_query_heads_must_be_a_multiple_of_kv_heads():
    for heads in range(13):
        for kv_heads in range(13):
            if heads and kv_heads and heads % kv_heads == 0:
                check_heads(heads, kv_heads)
                continue
            with pytest.raises(ValueError, match=f"heads={heads}, kv_heads={kv_heads}: heads must be a multiple") as e:
                check_heads(heads, kv_heads)
            offers = re.findall(r"\d+", str(e.value).split("may be")[1])
            for offer in offers:
                check_heads(heads, int(offer))
            assert len(offers) == sum(heads % h == 0 for h in range(1, heads + 1))


def test_the_geometry_imports_without_torch():
    code = "import sys, attention.variants, attention.transfers; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(attention.__file__).parents[1], timeout=60)
