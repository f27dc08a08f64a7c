"""Schedules: every pair of the mask exactly once, the balance each promises, and the refusals."""

import re
import subprocess
import sys
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import attention
from attention.executors.plan import plan_steps
from attention.geometry.intervals import joined, union
from attention.geometry.layouts import CONTIGUOUS, positions
from attention.geometry.options import check_heads
from attention.geometry.schedules import GATHER, GATHER_SHARDS, LOCAL_FIRST, RING, SEQUENCE, Problem, masks, steps
from attention.geometry.transfers import gather_move, step_routes
from attention.kernels.interface import Call
from attention.masks.band import CAUSAL, FULL, Band
from attention.masks.mask import Banded
from attention.variants.base import Variant
from attention.variants.registry import VARIANTS, variant
from runner.config.variants import PACKED
from tests.support.coverage import (
    ANY_LENGTHS,
    DECODES,
    MASKS,
    SHARD,
    WINDOWS,
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
    redistributed,
    settings,
)

every_variant = pytest.mark.parametrize("name", VARIANTS)
every_world = pytest.mark.parametrize("world", WORLDS)
SHARDED = [v.name for v in VARIANTS.values() if not v.layout.replicated]
RINGS = [v.name for v in VARIANTS.values() if v.executor == "ring" and not v.layout.replicated]


def covered(problem: Problem, place: int) -> np.ndarray:
    """How often the blocks of a place compute each global pair."""
    q_at = query_positions(problem, place)
    count = np.zeros(global_pairs(problem).shape, dtype=int)
    for step in steps(problem, place):
        k_at = key_positions(problem, place, step)
        for block in step.blocks:
            assert 0 <= block.q[0] <= block.q[1] <= len(q_at) and 0 <= block.k[0] <= block.k[1] <= len(k_at)
            rows, keys = q_at[slice(*block.q)], k_at[slice(*block.k)]
            pairs = band(block.mask, len(rows), len(keys))
            assert block.pairs == pairs.sum()
            count[np.ix_(rows, keys)] += pairs
    return count


def total_pairs(problem: Problem) -> list[int]:
    return [sum(step.pairs for step in steps(problem, place)) for place in range(problem.world)]


@every_variant
@every_world
def test_every_pair_of_the_mask_is_computed_exactly_once(name, world):
    """Of a mask that is cut: see test_cuts."""
    for problem in problems(VARIANTS[name], world):
        if problem.is_cut:
            continue
        expected = global_pairs(problem)
        counts = [covered(problem, place) for place in range(problem.world)]
        if problem.layout.replicated or name == "ring_decode":  # once by every rank
            assert all((count == expected).all() for count in counts), problem
        else:
            assert (sum(counts) == expected).all(), problem


@every_variant
@every_world
def test_all_ranks_have_as_many_steps(name, world):
    for problem in problems(VARIANTS[name], world):
        assert problem.ranks == world
        assert len({len(steps(problem, place)) for place in range(problem.world)}) == 1


@every_variant
@every_world
def test_masks_say_whether_any_block_is_a_window(name, world):
    for problem in problems(VARIANTS[name], world):
        if problem.is_cut:
            continue
        found = {b.mask for place in range(problem.world) for step in steps(problem, place) for b in step.blocks}
        known = set(masks(problem))
        assert {m for m in found if not m.windowed} <= known, problem
        if problem.q_tokens is not None:  # also those for other numbers of keys
            assert known == {FULL} if problem.band.full or problem.q_tokens == 1 else {FULL, CAUSAL} <= known, problem
        windowed = any(m.windowed for m in known)
        assert windowed or not any(m.windowed for m in found), problem
        assert problem.band in known if windowed and problem.band.windowed and problem.q_tokens is None else True


def test_a_window_that_no_sequence_is_longer_than_is_none():
    for window, windowed in ((Band(7, 0), False), (Band(6, 0), True), (Band(-1, 7), False), (Band(-1, 6), True)):
        problem = VARIANTS["ulysses"].problem((0, 8, 12), 2, window)
        assert any(m.windowed for m in masks(problem)) == windowed


@pytest.mark.parametrize("empty", [0, 1, 2])
@pytest.mark.parametrize("name", ["ring_varlen", "zigzag_varlen", "zigzag_llama3", "llama3", "ulysses"])
@pytest.mark.parametrize("n", [2, 12])
def test_every_rank_plans_a_packed_batch_with_an_empty_sequence(name, empty, n):
    world = 4
    lengths = [32] * n
    lengths.insert((0, 1, n)[empty], 0)
    problem = VARIANTS[name].problem(cumulated(lengths), world, CAUSAL)
    without = VARIANTS[name].problem(cumulated([32] * n), world, CAUSAL)
    for rank in range(problem.world):
        found, wanted = (plan_steps(x, rank, Call(1.0), True, torch.device("cpu")) for x in (problem, without))
        assert [step.route for step in found] == [step.route for step in wanted]
        for step, plain in zip(found, wanted, strict=True):
            for call, other in zip(step.calls, plain.calls, strict=True):
                assert (call.q, call.k) == (other.q, other.k)
                assert [x for x in call.call.q_lengths if x] == list(other.call.q_lengths)


@pytest.mark.parametrize("name", ["zigzag", "zigzag_varlen", "zigzag_llama3", "ring_allgather", "usp"])
@every_world
def test_balanced_variants_give_every_rank_the_same_causal_work(name, world):
    for problem in problems(VARIANTS[name], world):
        if problem.band.causal and (name != "usp" or problem.layout.name == "zigzag"):
            assert set(total_pairs(problem)) == {int(global_pairs(problem).sum()) // problem.world}, problem


@every_world
def test_stripe_is_balanced_to_within_a_tokens_worth(world):
    for problem in problems(VARIANTS["stripe"], world):
        if not problem.band.causal:
            continue
        totals = total_pairs(problem)
        n = problem.cu_seqlens[-1] // world
        # each token of rank r sees one key more than its neighbour on rank r - 1
        assert totals == [totals[0] + rank * n for rank in range(world)]
        assert max(totals) - min(totals) == n * (world - 1) < problem.cu_seqlens[-1]


@pytest.mark.parametrize("name", ["zigzag", "zigzag_varlen", "usp"])
@every_world
def test_zigzag_ranks_do_the_same_work_at_every_step(name, world):
    for problem in problems(VARIANTS[name], world):
        if problem.layout.name != "zigzag" or not problem.band.causal:
            continue
        work = [[step.pairs for step in steps(problem, place)] for place in range(problem.world)]
        assert all(places == work[0] for places in work), problem


@every_world
def test_the_causal_ring_is_imbalanced_as_the_table_says(world):
    problem = VARIANTS["ring"].problem((0, SHARD * world), world, CAUSAL)
    for rank in range(world):
        own, full = SHARD * (SHARD + 1) // 2, SHARD * SHARD
        expected = [own] + [full] * rank + [0] * (world - 1 - rank)
        assert [step.pairs for step in steps(problem, rank)] == expected
    totals = total_pairs(problem)
    assert totals == sorted(totals) and len(set(totals)) == world


@pytest.mark.parametrize("name", [*RINGS, "usp"])
@every_world
def test_a_ring_meets_every_owner_once_and_itself_first(name, world):
    for problem in problems(VARIANTS[name], world):
        for place in range(problem.world):
            owners = [step.owner for step in steps(problem, place)]
            assert owners[0] == place
            assert sorted(owners) == list(range(problem.world))


@every_world
def test_stripe_blocks_are_causal_and_shifted_by_a_token_for_later_ranks(world):
    problem = VARIANTS["stripe"].problem((0, SHARD * world), world, CAUSAL)
    for rank in range(world):
        for step in steps(problem, rank):
            (block,) = step.blocks
            expected = ((0, SHARD), (0, SHARD)) if step.owner <= rank else ((1, SHARD), (0, SHARD - 1))
            assert (block.q, block.k, block.mask) == (*expected, CAUSAL)


def test_striped_shards_of_a_single_token_see_nothing_of_later_ranks():
    problem = VARIANTS["stripe"].problem((0, 4), 4, CAUSAL)
    for rank in range(4):
        assert {step.owner for step in steps(problem, rank) if step.blocks} == set(range(rank + 1))


@pytest.mark.parametrize("mask", WINDOWS, ids=Band.describe)
@every_world
def test_a_windowed_ring_computes_only_with_owners_within_the_window(mask, world):
    problem = VARIANTS["ring"].problem((0, SHARD * world), world, mask)
    for rank in range(world):
        for step in steps(problem, rank):
            before = (rank - step.owner - 1) * SHARD + 1  # from the first query to the owner's last key
            after = (step.owner - rank - 1) * SHARD + 1
            near = (mask.left < 0 or before <= mask.left) and (mask.right < 0 or after <= mask.right)
            assert bool(step.blocks) == near, (rank, step)


def test_gathered_queries_make_one_call_a_chunk():
    problem = VARIANTS["ring_allgather"].problem((0, 48), 4, CAUSAL)
    for rank in range(4):
        (step,) = steps(problem, rank)
        early, late = 2 * rank, 7 - 2 * rank
        assert [(b.q, b.k) for b in step.blocks] == [((0, 6), (0, 6 * (early + 1))), ((6, 12), (0, 6 * (late + 1)))]
        assert all(b.mask.causal for b in step.blocks)


@every_world
def test_zigzag_chunks_make_one_call_each_against_their_prefix_of_every_sequence(world):
    lengths = (2 * world, 6 * world)
    problem = VARIANTS["zigzag_llama3"].problem(cumulated(lengths), world, CAUSAL, {"own_first": False})
    for r in range(world):
        (step,) = steps(problem, r)
        assert step.owner == SEQUENCE
        expected, at, start = [], 0, 0
        for n in lengths:
            c = n // (2 * world)
            expected.append(((at, at + c), (start, start + (r + 1) * c), 0))
            expected.append(((at + c, at + 2 * c), (start, start + (2 * world - r) * c), 1))
            at, start = at + 2 * c, start + n
        at = key_positions(problem, r, step)
        assert [(b.q, (at[b.k[0]], at[b.k[1] - 1] + 1), b.group) for b in step.blocks] == expected


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


@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_with_own_first_only_others_keys_are_gathered_and_whole(world):
    for problem in problems(VARIANTS["zigzag_llama3"], world):
        if problem.schedule is not LOCAL_FIRST:
            continue
        for rank, shard in enumerate(problem.layout.shards(problem.cu_seqlens, world)):
            mine, others = steps(problem, rank)
            plain = steps(replace(problem, schedule=RING), rank)[0]
            assert (mine.owner, mine.blocks, mine.keys) == (rank, plain.blocks, plain.keys)
            assert others.owner == SEQUENCE and all(block.mask.full for block in others.blocks)
            assert not set(positions(needed_keys(problem, rank))) & set(positions(shard))


@pytest.mark.parametrize("world", [2, 3, 4])
def test_of_many_sequences_a_rank_takes_each_shard_in_one_stretch(world):
    """Though what its queries see of it are several: nine sequences of one chunk of different lengths each."""
    cu = tuple(accumulate((2 * world * n for n in range(1, 10)), initial=0))
    chosen = VARIANTS["zigzag_llama3"]
    problem = chosen.problem(cu, world, CAUSAL)
    assert problem.schedule is GATHER_SHARDS
    shards = problem.layout.shards(cu, world)
    for rank in range(world):
        (step,), (plain,) = steps(problem, rank), steps(replace(problem, schedule=GATHER), rank)
        at = key_positions(problem, rank, plain)  # the keys of a block are those of the sequence, wherever they lie
        expected = [b._replace(k=(at[b.k[0]], at[b.k[1] - 1] + 1)) for b in plain.blocks]
        assert list(step.blocks) == expected
        held = [t for a, b in step.keys for t in range(a, b)]
        for block in step.blocks:
            assert [t for a, b in step.where([block.k]) for t in held[a:b]] == list(range(*block.k))
        assert positions(needed_keys(problem, rank)) == [t for shard in shards for t in positions(shard)]
        assert gather_move(problem, rank) == redistributed(
            shards, [needed_keys(problem, i) for i in range(world)], rank
        )
        route = gather_move(problem, rank).route
        for pieces in (route.receives, route.sends, route.reversed().receives, route.reversed().sends):
            assert len(pieces) == world - 1
            assert all(len(joined(x)) == 1 for piece in pieces for x in (piece.source, piece.target))
        ring = VARIANTS["zigzag_varlen"].problem(cu, world, CAUSAL)
        for i in range(world):
            for piece in step_routes(ring, rank)[i].receives:
                assert len(joined(piece.source)) == 1 and piece.target == ((0, cu[-1] // world),)
    few = (0, 2 * world, 6 * world)
    for other in (chosen.problem(few, world, CAUSAL), chosen.problem(cu, world, CAUSAL, {"grouping": "fused"})):
        assert other.schedule is GATHER
    assert chosen.problem(cu, world, Band(5, 0)).schedule is GATHER


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


@every_world
@pytest.mark.parametrize("mask", [CAUSAL, FULL], ids=Band.describe)
def test_llama3_needs_the_sequences_that_meet_its_slice_up_to_its_end_or_theirs(mask, world):
    chosen = VARIANTS["llama3"]
    for cu in packs(chosen, world, {}):
        problem = chosen.problem(cu, world, mask)
        for rank, (slice_,) in enumerate(problem.layout.shards(cu, world)):
            meets = [(a, b) for a, b in pairwise(cu) if a < slice_.stop and b > slice_.start and a < b]
            last = slice_.stop if mask.causal else meets[-1][1]
            assert positions(needed_keys(problem, rank)) == list(range(meets[0][0], last)), (cu, rank)
            (step,) = steps(problem, rank)
            clipped = [(max(a, slice_.start), min(b, slice_.stop)) for a, b in meets]
            assert [(b.q[0] + slice_.start, b.q[1] + slice_.start) for b in step.blocks] == clipped


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
def test_ulysses_computes_whole_sequences_and_meets_them_in_contiguous_shards(world):
    chosen, cu = VARIANTS["ulysses"], (0, SHARD * world)
    problem = chosen.problem(cu, world, CAUSAL)
    assert (problem.world, problem.ulysses) == (1, world)
    assert [step.owner for step in steps(problem, 0)] == [0]
    assert chosen.border(world, chosen.parse()).shards(cu, world) == CONTIGUOUS.shards(cu, world)


@every_world
def test_usp_is_as_near_to_a_square_as_it_goes_unless_told(world):
    chosen = VARIANTS["usp"]
    for n in divisors(world):
        problem = chosen.problem((0, 2 * world), world, CAUSAL, {"ulysses_size": n})
        assert (problem.ulysses, problem.world) == (n, world // n)
    problem = chosen.problem((0, 2 * world), world, CAUSAL)
    assert problem.ulysses * problem.world == world
    assert problem.ulysses == min(n for n in divisors(world) if n >= world // n)


@every_world
def test_a_ulysses_size_that_does_not_divide_the_world_is_refused_with_those_that_do(world):
    for wanted in range(-1, 2 * world + 2):
        if wanted in divisors(world):
            continue
        with pytest.raises(ValueError) as error:
            VARIANTS["usp"].problem((0, 2 * world), world, CAUSAL, {"ulysses_size": wanted})
        text = str(error.value)
        assert text.startswith(f"ulysses_size={wanted}:") and f"divide world_size={world}" in text
        assert str(divisors(world)) in text


@every_world
@pytest.mark.parametrize("keys", [1, 2, 7, 40, 41])
def test_a_tree_rank_attends_its_own_keys_only_and_an_empty_shard_has_no_block(keys, world):
    problem = VARIANTS["tree"].problem((0, keys), world, FULL, q_tokens=2)
    for rank, shard in enumerate(problem.layout.shards((0, keys), world)):
        (step,) = steps(problem, rank)
        n = sum(len(r) for r in shard)
        assert step.owner == rank
        assert [(b.q, b.k, b.mask) for b in step.blocks] == ([((0, 2), (0, n), FULL)] if n else [])


@pytest.mark.parametrize("name", sorted(DECODES))
@every_world
def test_a_decode_has_no_balance_to_keep_and_takes_every_number_of_keys(name, world):
    for n in range(1, 30):
        problem = VARIANTS[name].problem((0, n), world, FULL, q_tokens=1)
        assert sum(total_pairs(problem)) == (n if name == "tree" else n * world)


def test_union_merges_what_meets_and_drops_what_is_empty():
    rows = np.array([(4, 6, 0), (0, 2, 0), (6, 9, 0), (3, 3, 0), (1, 2, 0), (0, 10, 2), (2, 3, 2), (20, 21, 2)])
    assert union(*rows.T).tolist() == [[0, 2, 0], [4, 9, 0], [0, 10, 2], [20, 21, 2]]


def refusal(chosen: Variant, cu_seqlens: tuple[int, ...], world: int, mask: Band, options: Any = None) -> str:
    with pytest.raises(ValueError) as error:
        chosen.problem(cu_seqlens, world, mask, options)
    return str(error.value)


@every_variant
def test_masks_that_a_variant_lacks_are_refused_with_a_way_out_that_works(name):
    chosen = VARIANTS[name]
    world = 1 if name == "grouped" else 4
    for options in settings(chosen, world):
        cu = (0, 840)
        for mask in MASKS:
            if does(chosen, mask, options):
                chosen.problem(cu, world, mask, options)
                continue
            text = refusal(chosen, cu, world, mask, options)
            assert name in text
            if chosen.options.from_call:
                assert text.startswith(f"mask={mask.describe()}: ") and "make another" in text
                chosen.problem(cu, world, mask, {**options, "mask": Banded(mask)})
                continue
            if name in DECODES:
                given = "causal=true" if mask.causal else f"window=({mask.left}, {mask.right})"
                assert text.startswith(f"{given}: ") and "causal=false without a window" in text
                continue
            value = f"window=({mask.left}, {mask.right})" if mask.right == 0 else "causal=false"
            assert text.startswith(value)
            if name == "usp":
                assert "ring=contiguous" in text
                chosen.problem(cu, world, mask, {**options, "ring": "contiguous"})
                continue
            if options.get("own_first") and mask.right == 0:
                assert "own_first=null" in text
                chosen.problem(cu, world, mask, {**options, "own_first": None})
                continue
            ways_out = set(re.findall(r"\w+", text.removeprefix(value))) & set(VARIANTS) - {name}
            assert ways_out
            for other in ways_out:
                VARIANTS[other].problem(cu, world, mask)


@pytest.mark.parametrize("name", ["zigzag", "stripe", "zigzag_varlen", "zigzag_llama3", "usp", "grouped"])
def test_variants_that_balance_the_causal_mask_refuse_others(name):
    assert "is for causal masks" in refusal(VARIANTS[name], (0, 48), 1 if name == "grouped" else 4, FULL)


@pytest.mark.parametrize("name", [name for name in VARIANTS if name not in DECODES | {"grouped"}])
@every_world
def test_every_variant_takes_packed_batches_and_those_made_for_them_say_so(name, world):
    chosen = VARIANTS[name]
    if name in PACKED:
        assert re.search(r"\bpack(s|ed)?\b", f"{chosen.summary} {chosen.use}"), name
    cu = cumulated((2 * world, 8 * world, 4 * world))
    assert chosen.problem(cu, world, CAUSAL).cu_seqlens == cu
    if name in ANY_LENGTHS:
        chosen.problem(cumulated((1, 2 * world - 1, world)), world, CAUSAL)


@pytest.mark.parametrize("name", [name for name in SHARDED if name not in DECODES])
@every_world
def test_a_length_that_does_not_divide_is_refused_with_a_true_rule_and_one_that_works(name, world):
    chosen = VARIANTS[name]
    for options in settings(chosen, world):
        for mask in (FULL, CAUSAL):
            if not does(chosen, mask, options):
                continue
            refused = 0
            for n in range(1, 50):
                try:
                    problem = chosen.problem((0, n), world, mask, options)
                    assert n % world == 0 and problem.cu_seqlens == (0, n)
                    continue
                except ValueError as error:
                    text = str(error)
                refused += 1
                found = re.fullmatch(r"seq_len=(\d+): .* needs a multiple of (.*) = (\d+); (\d+) would work", text)
                assert found and int(found[1]) == n, text
                assert eval(found[2], {"world_size": world}) == int(found[3]), text
                assert n % int(found[3])
                chosen.problem((0, int(found[4])), world, mask, options)
            assert refused or world == 1


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


def test_query_heads_must_be_a_multiple_of_kv_heads():
    for heads in range(13):
        for kv_heads in range(13):
            if heads and kv_heads and heads % kv_heads == 0:
                check_heads(heads, kv_heads)
                continue
            if not heads or not kv_heads:
                with pytest.raises(ValueError, match=f"heads={heads}, kv_heads={kv_heads}: both must be at least 1"):
                    check_heads(heads, kv_heads)
                continue
            with pytest.raises(ValueError, match=f"heads={heads}, kv_heads={kv_heads}: heads must be a multiple") as e:
                check_heads(heads, kv_heads)
            offers = re.findall(r"\d+", str(e.value).split("may be")[1])
            for offer in offers:
                check_heads(heads, int(offer))
            assert len(offers) == sum(heads % h == 0 for h in range(1, heads + 1))


@every_world
def test_heads_must_go_into_a_ulysses_group_and_kv_heads_share_or_be_replicated(world):
    usp = VARIANTS["usp"]
    for heads in range(1, 17):
        for kv_heads in divisors(heads):
            for n in divisors(world):
                options = {"ulysses_size": n}
                if heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0):
                    usp.parse(options).check(heads, kv_heads, world)
                    continue
                with pytest.raises(ValueError, match=f"heads={heads}, kv_heads={kv_heads}: ") as error:
                    usp.parse(options).check(heads, kv_heads, world)
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


def test_the_geometry_imports_without_torch():
    code = "import sys, attention.variants.registry, attention.geometry.transfers; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(attention.__file__).parents[1], timeout=60)
