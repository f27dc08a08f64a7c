"""Schedules: every pair of the mask exactly once, the balance each promises, and the refusals."""

import random
import re
import subprocess
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import attention
from attention.executors.plan import plan_steps
from attention.geometry import schedules
from attention.geometry.intervals import length
from attention.geometry.options import HeadCount, check_heads
from attention.geometry.schedules import (
    RING,
    GatherSchedule,
    Problem,
    masks,
    rank_pairs,
    steps,
)
from attention.geometry.transfers import gather_move
from attention.kernels.interface import Call
from attention.masks.band import CAUSAL, Band
from attention.masks.mask import Banded
from attention.masks.pattern import Pattern
from attention.variants.base import Variant
from attention.variants.registry import VARIANTS, variant
from tests.support.coverage import (
    DECODES,
    MASKS,
    WORLDS,
    band,
    divisors,
    does,
    global_pairs,
    key_positions,
    problems,
    query_positions,
    settings,
)
from tests.support.mask_definitions import DEFINITIONS, random_parameters
from tests.support.masks import built
from tests.support.patterns import kept

every_variant = pytest.mark.parametrize("name", VARIANTS)
every_world = pytest.mark.parametrize("world", WORLDS)


def covered(problem: Problem, place: int) -> np.ndarray:
    """How often the blocks of a place compute each global pair."""
    q_at = query_positions(problem, place)
    count = np.zeros(global_pairs(problem).shape, dtype=int)
    for step in steps(problem, place):
        k_at = key_positions(problem, place, step)
        for block in step.blocks:
            assert 0 <= block.q[0] <= block.q[1] <= len(q_at) and 0 <= block.k[0] <= block.k[1] <= len(k_at)
            rows, keys = q_at[slice(*block.q)], k_at[slice(*block.k)]
            cut = isinstance(block.mask, Pattern)
            pairs = kept(block.mask) if cut else band(block.mask, len(rows), len(keys))
            assert block.pairs == pairs.sum() > 0
            count[np.ix_(rows, keys)] += pairs
    return count


@every_variant
@every_world
def test_the_steps_of_all_ranks_compute_every_pair_of_the_mask_once(name, world):
    for problem in (*problems(VARIANTS[name], world), *cut_problems(VARIANTS[name], world)):
        assert problem.ranks == world
        counts = [covered(problem, place) for place in range(problem.world)]
        if problem.layout.replicated or name == "ring_decode":  # once by every rank
            assert all((count == global_pairs(problem)).all() for count in counts), problem
        else:
            assert (sum(counts) == global_pairs(problem)).all(), problem
        everyones = [steps(problem, place) for place in range(problem.world)]
        assert len({*map(len, everyones)}) == 1
        for place, mine in enumerate(everyones):
            assert rank_pairs(problem, place) == counts[place].sum() == sum(step.pairs for step in mine)
            owners = [step.owner for step in mine]
            if len(mine) == problem.world and problem.schedule is RING:
                assert owners[0] == place and sorted(owners) == list(range(problem.world))
        for i, most in enumerate(problem.schedule.most_keys(problem)):
            received = [length(x[i].keys) for place, x in enumerate(everyones) if x[i].owner != place]
            assert most == max(received, default=0), (problem, i)
        if not problem.is_cut:
            bands = {block.mask for mine in everyones for step in mine for block in step.blocks}
            known = set(masks(problem))
            assert {m for m in bands if not m.windowed} <= known, problem
            assert any(m.windowed for m in known) or not any(m.windowed for m in bands), problem


def cut_problems(variant: Variant, world: int) -> Iterator[Problem]:
    """Random masks that a variant cuts into patterns."""
    draw, tokens = random.Random(world), 12 * world
    for name in DEFINITIONS if variant.any_mask else ():
        mask = built({"name": name, **random_parameters(name, tokens, draw)})
        mask = mask & attention.masks.causal() if variant.causal_only else mask
        options = {"usp": {"ring": "contiguous"}, "balanced": {"mask": mask}}.get(variant.name, {})
        problem = variant.problem((0, tokens), 1 if variant.name == "dense" else world, mask, options)
        if problem.is_cut and problem.ranks == world:
            yield problem


@pytest.mark.parametrize("name", sorted({*VARIANTS} - {"grouped"}))
def test_a_plan_builds_the_steps_of_this_rank_and_of_two_others_at_most(name):
    chosen, world = VARIANTS[name], 64
    for mask in (x for x in MASKS[:4] if does(chosen, x)):
        schedules.known.cache_clear()
        problem = chosen.problem((0, 8 * world), world, mask, {}, 1 if chosen.decode else None)
        plan_steps(problem, problem.world // 2, Call(1.0), False, torch.device("cpu"))
        if isinstance(problem.schedule, GatherSchedule):
            gather_move(problem, problem.world // 2)
        masks(problem)
        assert 0 < len(problem.steps) <= 3, problem


@pytest.mark.parametrize("name", ["zigzag", "zigzag_varlen", "zigzag_llama3", "ring_allgather", "usp", "stripe"])
@every_world
def test_balanced_variants_give_every_rank_the_same_causal_work(name, world):
    for problem in problems(VARIANTS[name], world):
        if not problem.band.causal or (name == "usp" and problem.layout.name != "zigzag"):
            continue
        work = [[step.pairs for step in steps(problem, place)] for place in range(problem.world)]
        totals = [*map(sum, work)]
        if name == "stripe":  # each token sees one key more than its neighbour on the rank before
            n = problem.cu_seqlens[-1] // world
            assert totals == [totals[0] + rank * n for rank in range(world)]
        else:
            assert set(totals) == {int(global_pairs(problem).sum()) // problem.world}, problem
        if problem.schedule is RING and problem.layout.name == "zigzag":  # at every step
            assert all(places == work[0] for places in work), problem


@every_world
def test_usp_is_as_near_to_a_square_as_it_goes_unless_told(world):
    for n in divisors(world):
        problem = VARIANTS["usp"].problem((0, 2 * world), world, CAUSAL, {"ulysses_size": n})
        assert (problem.ulysses, problem.world) == (n, world // n)
    problem = VARIANTS["usp"].problem((0, 2 * world), world, CAUSAL)
    assert problem.ulysses * problem.world == world
    assert problem.ulysses == min(n for n in divisors(world) if n >= world // n)


@pytest.mark.parametrize("size", [-1, 0, 4, 7])
def test_a_ulysses_size_that_does_not_divide_the_world_is_refused_with_those_that_do(size):
    text = refusal(VARIANTS["usp"], (0, 12), 6, CAUSAL, {"ulysses_size": size})
    assert text.startswith(f"ulysses_size={size}:") and "divide world_size=6" in text and "[1, 2, 3, 6]" in text


def refusal(chosen: Variant, cu_seqlens: tuple[int, ...], world: int, mask: Band, options: Any = None) -> str:
    with pytest.raises(ValueError) as error:
        chosen.problem(cu_seqlens, world, mask, options)
    return str(error.value)


@every_variant
def test_masks_that_a_variant_lacks_are_refused_with_a_way_out_that_works(name):
    chosen, cu, world = VARIANTS[name], (0, 840), 1 if name == "grouped" else 4
    for options in settings(chosen, world):
        for mask in MASKS:
            if does(chosen, mask, options):
                continue
            text = refusal(chosen, cu, world, mask, options)
            window = f"window=({mask.left}, {mask.right})"
            if chosen.options.from_call:
                assert text.startswith(f"mask={mask.describe()}: ") and "make another" in text
                chosen.problem(cu, world, mask, {**options, "mask": Banded(mask)})
            elif name in DECODES:
                assert text.startswith("causal=true: " if mask.causal else f"{window}: ")
                assert "causal=false without a window" in text
            elif name == "usp":
                assert "ring=contiguous" in text
                chosen.problem(cu, world, mask, {**options, "ring": "contiguous"})
            elif options.get("own_first") and mask.right == 0:
                assert "own_first=null" in text
                chosen.problem(cu, world, mask, {**options, "own_first": None})
            else:
                value = window if mask.right == 0 else "causal=false"
                assert text.startswith(value)
                ways_out = set(re.findall(r"\w+", text.removeprefix(value))) & set(VARIANTS) - {name}
                assert ways_out
                for other in ways_out:
                    VARIANTS[other].problem(cu, world, mask)


@pytest.mark.parametrize(
    ("tokens", "world", "options", "message"),
    [
        (48, 2, {}, "world_size=2:.*use world_size=1"),
        (72, 1, {"n_groups": 0}, "n_groups=0"),
        (70, 1, {"n_groups": 3}, "n_groups=3"),
    ],
)
def test_the_chunks_of_grouped_must_divide_and_stay_on_one_rank(tokens, world, options, message):
    assert re.search(message, refusal(VARIANTS["grouped"], (0, tokens), world, CAUSAL, options))


def test_an_unknown_variant_is_refused_with_the_nearest_or_all():
    with pytest.raises(ValueError, match=r"attention='zigzg' is not a variant; did you mean .*zigzag"):
        variant("zigzg")
    with pytest.raises(ValueError) as error:
        variant("?")
    assert all(name in str(error.value) for name in VARIANTS)
    assert all(variant(name) is VARIANTS[name] for name in VARIANTS)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "rule"),
    [(12, 5, "may be [1, 2, 3, 4, 6, 12]"), (0, 1, "both must be at least 1"), (4, 0, "both must be at least 1")],
)
def test_query_heads_must_be_a_multiple_of_kv_heads(heads, kv_heads, rule):
    check_heads(12, 12)
    check_heads(12, 4)
    with pytest.raises(ValueError, match=f"heads={heads}, kv_heads={kv_heads}: .*{re.escape(rule)}"):
        check_heads(heads, kv_heads)


def _divide(heads: HeadCount, ranks: int) -> bool:
    """Each rank has as many query heads, and KV heads or one that others have, too."""
    return heads.kv * heads.ratio % ranks == 0 and (heads.kv % ranks == 0 or ranks % heads.kv == 0)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6, 8])
def test_the_fewest_heads_that_a_ulysses_group_divides_are_computed(ranks):
    for heads in product(range(1, 10), range(1, 8)):
        computed = VARIANTS["ulysses"].parse({}).computed(HeadCount(*heads), ranks)
        more = [HeadCount(*x) for x in product(range(heads[0], 17), range(heads[1], 57))]
        assert computed in more and _divide(computed, ranks)
        assert computed.kv * computed.ratio == min(x.kv * x.ratio for x in more if _divide(x, ranks))


@pytest.mark.parametrize(
    ("name", "option", "values"),
    [
        ("zigzag_llama3", "grouping", ("separate", "packed", "fused")),
        ("tree", "reduce", ("three", "two", "packed", "fused")),
        ("usp", "ring", ("zigzag", "contiguous")),
    ],
)
def test_an_option_takes_the_values_of_the_table_and_refuses_others_with_the_nearest(name, option, values):
    for value in values:
        VARIANTS[name].parse({option: value}).check(8, 8, 2)
        with pytest.raises(ValueError, match=f"{option}={value[:-1]}_: did you mean .*{value}"):
            VARIANTS[name].parse({option: f"{value[:-1]}_"}).check(8, 8, 2)


@pytest.mark.parametrize(
    ("options", "writable", "reduce"), [({}, True, "fused"), ({}, False, "packed"), ({"reduce": "two"}, True, "two")]
)
def test_a_reduction_left_open_is_fused_where_ranks_can_write_to_each_other(options, writable, reduce):
    assert VARIANTS["tree"].parse(options).resolved(writable).reduce == reduce


def test_geometry_and_masks_import_without_torch():
    code = (
        "import sys, attention.variants.registry, attention.geometry.transfers; from attention import masks;"
        "masks.chunked(4).pairs(64); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(attention.__file__).parents[1], timeout=60)
