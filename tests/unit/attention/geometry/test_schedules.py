"""Schedules: every pair of the mask exactly once, the balance each promises, and the refusals."""

import random
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import attention
from attention.executors.plan import plan_steps
from attention.geometry import schedules
from attention.geometry.intervals import length, union
from attention.geometry.layouts import positions
from attention.geometry.options import check_heads
from attention.geometry.schedules import (
    GATHER_SHARDS,
    LOCAL_FIRST,
    RING,
    SEQUENCE,
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
    cumulated,
    divisors,
    does,
    global_pairs,
    key_positions,
    needed_keys,
    packs,
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


def test_a_window_that_no_sequence_is_longer_than_is_none():
    for window, windowed in ((Band(7, 0), False), (Band(6, 0), True), (Band(-1, 7), False), (Band(-1, 6), True)):
        problem = VARIANTS["ulysses"].problem((0, 8, 12), 2, window)
        assert any(m.windowed for m in masks(problem)) == windowed


@pytest.mark.parametrize("name", ["ring_varlen", "zigzag_llama3", "llama3", "ulysses"])
@pytest.mark.parametrize("empty", [0, 1, 12])
def test_an_empty_sequence_changes_no_plan(name, empty):
    lengths = [32] * 12
    problems = [
        VARIANTS[name].problem(cumulated(x), 4, CAUSAL) for x in ([*lengths[:empty], 0, *lengths[empty:]], lengths)
    ]
    for rank in range(problems[0].world):
        found, wanted = (plan_steps(x, rank, Call(1.0), True, torch.device("cpu")) for x in problems)
        for step, plain in zip(found, wanted, strict=True):
            assert step.route == plain.route
            for call, other in zip(step.calls, plain.calls, strict=True):
                assert (call.q, call.k) == (other.q, other.k)
                assert [x for x in call.call.q_lengths if x] == list(other.call.q_lengths)


@every_variant
def test_a_plan_builds_the_steps_of_this_rank_and_of_two_others_at_most(name, monkeypatch):
    chosen, world = VARIANTS[name], 64
    for mask in (x for x in MASKS[:4] if does(chosen, x)):
        if name == "grouped":
            continue
        problem = chosen.problem((0, 8 * world), world, mask, {}, 1 if chosen.decode else None)
        kind, ranks = type(problem.schedule), []
        original = kind.steps

        def counted(self, problem, rank, original=original, ranks=ranks):
            ranks.append(rank)
            return original(self, problem, rank)

        schedules.known.cache_clear()
        with monkeypatch.context() as patched:
            patched.setattr(kind, "steps", counted)
            plan_steps(problem, problem.world // 2, Call(1.0), False, torch.device("cpu"))
            if isinstance(problem.schedule, GatherSchedule):
                gather_move(problem, problem.world // 2)
            masks(problem)
        assert 0 < len(ranks) <= 3, problem


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


def test_gathered_queries_make_one_call_a_chunk():
    problem = VARIANTS["ring_allgather"].problem((0, 48), 4, CAUSAL)
    for rank in range(4):
        (step,) = steps(problem, rank)
        early, late = 2 * rank, 7 - 2 * rank
        assert [(b.q, b.k) for b in step.blocks] == [((0, 6), (0, 6 * (early + 1))), ((6, 12), (0, 6 * (late + 1)))]


@pytest.mark.parametrize("name", ["zigzag_llama3", "grouped"])
@every_world
def test_the_groups_of_a_sequence_attend_nested_prefixes_in_order(name, world):
    for problem in problems(VARIANTS[name], world):
        if not problem.band.causal or problem.schedule is LOCAL_FIRST:
            continue
        for rank in range(world):
            (step,) = steps(problem, rank)
            for start in set(problem.cu_seqlens[:-1]):
                own = [b for b in step.blocks if b.k[0] == start]
                assert [b.group for b in own] == list(range(len(own)))
                ends = [b.k[1] for b in own]
                assert ends == sorted(ends), (problem, rank)


@pytest.mark.parametrize("name", ["ring_varlen", "zigzag_varlen"])
def test_rings_cover_the_pairs_of_many_sequences(name):
    """Sequences whose chunks are one token, and empty ones, among them."""
    world, lengths = 3, [6 * n for n in (1, 4, 0, 2, 7, 1, 3, 5, 1, 9)]
    problem = VARIANTS[name].problem(cumulated(lengths), world, CAUSAL)
    assert problem.moves_shards
    for rank in range(world):
        for step in steps(problem, rank):
            covered = np.zeros((sum(lengths) // world,) * 2, int)
            for block in step.blocks:
                covered[slice(*block.q), slice(*block.k)] += band(block.mask, *(b - a for a, b in (block.q, block.k)))
            at = [np.array(positions(problem.shards[r])) for r in (rank, step.owner)]
            assert (covered == global_pairs(problem)[np.ix_(*at)]).all()


@pytest.mark.parametrize("world", [2, 3, 8])
def test_zigzag_llama3_gathers_only_others_keys_or_each_shard_in_one_stretch(world):
    schedules = set()
    for problem in problems(VARIANTS["zigzag_llama3"], world):
        schedules.add(problem.schedule)
        for rank, shard in enumerate(problem.layout.shards(problem.cu_seqlens, world)):
            if problem.schedule is LOCAL_FIRST:
                mine, others = steps(problem, rank)
                plain = steps(replace(problem, schedule=RING), rank)[0]
                assert (mine.owner, mine.blocks, mine.keys) == (rank, (*plain.blocks,), plain.keys)
                assert others.owner == SEQUENCE and all(block.mask.full for block in others.blocks)
                assert not set(positions(needed_keys(problem, rank))) & set(positions(shard))
            if problem.schedule is GATHER_SHARDS:
                (step,) = steps(problem, rank)
                held = [t for a, b in step.keys for t in range(a, b)]
                for block in step.blocks:
                    assert [t for a, b in step.where([block.k]) for t in held[a:b]] == list(range(*block.k))
                assert all(len(piece.source) == 1 for piece in gather_move(problem, rank).route.receives)
    assert {LOCAL_FIRST, GATHER_SHARDS} <= schedules


@pytest.mark.parametrize(
    ("cu_seqlens", "mask", "options", "expected"),
    [
        ((0, 64), CAUSAL, {}, True),
        ((0, 64), CAUSAL, {"own_first": False}, False),
        ((0, 64), CAUSAL, {"heads_k_stride": 1}, False),
        ((0, 64), CAUSAL, {"heads_k_stride": 1, "own_first": True}, True),
        ((0, 64), CAUSAL, {"grouping": "packed"}, False),
        ((0, 64), Band(9, 0), {}, False),
        ((0, 16, 64), CAUSAL, {}, False),
        ((0, 16, 64), CAUSAL, {"own_first": True}, True),
    ],
)
def test_single_sequences_begin_with_ones_own_keys(cu_seqlens, mask, options, expected):
    problem = VARIANTS["zigzag_llama3"].problem(cu_seqlens, 4, mask, options)
    assert (problem.schedule is LOCAL_FIRST) == expected
    assert VARIANTS["zigzag_llama3"].problem(cu_seqlens, 1, mask, options).schedule is not LOCAL_FIRST


@pytest.mark.parametrize("name", ["ulysses", "usp"])
@every_world
def test_the_border_holds_consecutive_pieces_of_the_shards_that_the_groups_compute_on(name, world):
    chosen = VARIANTS[name]
    for options in settings(chosen, world):
        for cu in packs(chosen, world, options):
            problem = chosen.problem(cu, world, CAUSAL, options)
            held = [positions(s) for s in chosen.border(world, chosen.parse(options)).shards(cu, world)]
            assert len(held) == problem.ranks == world and len({len(x) for x in held}) == 1
            for place, shard in enumerate(problem.q_layout.shards(cu, problem.world)):
                group = held[place * problem.ulysses : (place + 1) * problem.ulysses]
                assert [t for piece in group for t in piece] == positions(shard), (cu, options, place)


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


def test_union_merges_what_meets_and_drops_what_is_empty():
    rows = np.array([(4, 6, 0), (0, 2, 0), (6, 9, 0), (3, 3, 0), (1, 2, 0), (0, 10, 2), (2, 3, 2), (20, 21, 2)])
    assert union(*rows.T).tolist() == [[0, 2, 0], [4, 9, 0], [0, 10, 2], [20, 21, 2]]


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


def test_the_chunks_of_grouped_must_divide_and_stay_on_one_rank():
    chosen = VARIANTS["grouped"]
    text = refusal(chosen, (0, 48), 2, CAUSAL)
    assert text.startswith("world_size=2:") and "use world_size=1" in text
    assert "n_groups=9" in refusal(chosen, (0, 72), 1, CAUSAL, {"n_groups": 9})
    assert "n_groups=0" in refusal(chosen, (0, 72), 1, CAUSAL, {"n_groups": 0})
    assert "n_groups=3" in refusal(chosen, (0, 70), 1, CAUSAL, {"n_groups": 3})


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


def test_heads_must_go_into_a_ulysses_group_and_kv_heads_share_or_be_replicated():
    usp, world = VARIANTS["usp"], 6
    for heads, kv_heads, n in ((h, k, n) for h in (4, 6, 12) for k in divisors(h) for n in divisors(world)):
        if heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0):
            usp.parse({"ulysses_size": n}).check(heads, kv_heads, world)
            continue
        with pytest.raises(ValueError, match=f"heads={heads}, kv_heads={kv_heads}: ") as error:
            usp.parse({"ulysses_size": n}).check(heads, kv_heads, world)
        offers = re.findall(r"\d+", str(error.value).split("ulysses_size ")[1])
        assert offers and str(n) not in offers
        for offer in offers:
            usp.parse({"ulysses_size": int(offer)}).check(heads, kv_heads, world)


@pytest.mark.parametrize(
    ("name", "option", "values"),
    [
        ("zigzag_llama3", "grouping", ("separate", "packed", "fused")),
        ("tree", "reduce", ("three", "two", "packed", "fused")),
        ("usp", "ring", ("zigzag", "contiguous")),
    ],
)
def test_an_option_takes_the_values_of_the_table_and_refuses_others_with_the_nearest(name, option, values):
    chosen = VARIANTS[name]
    for value in values:
        chosen.parse({option: value}).check(8, 8, 2)
        typo = value[:-1] + "_"
        with pytest.raises(ValueError, match=f"{option}={typo}: did you mean .*{value}"):
            chosen.parse({option: typo}).check(8, 8, 2)
    with pytest.raises(ValueError) as error:
        chosen.parse({option: "?"}).check(8, 8, 2)
    assert all(value in str(error.value) for value in values)


def test_a_reduction_left_open_is_fused_where_ranks_can_write_to_each_other():
    tree, ring = VARIANTS["tree"], VARIANTS["ring"]
    assert tree.parse().reduce is None
    tree.parse().check(8, 8, 2)
    assert tree.parse().resolved(writable=True) == tree.parse({"reduce": "fused"})
    assert tree.parse().resolved(writable=False) == tree.parse({"reduce": "packed"})
    assert tree.parse({"reduce": "two"}).resolved(writable=True).reduce == "two"
    assert ring.parse().resolved(writable=True) == ring.parse()
    with pytest.raises(ValueError, match="grouping=None"):
        VARIANTS["zigzag_llama3"].parse({"grouping": None}).check(8, 8, 2)


def test_geometry_and_masks_import_without_torch():
    code = (
        "import sys, attention.variants.registry, attention.geometry.transfers; from attention import masks;"
        "masks.chunked(4).pairs(64); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(attention.__file__).parents[1], timeout=60)
