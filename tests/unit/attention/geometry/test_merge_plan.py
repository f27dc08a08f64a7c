"""Passes over parts that come one by one: followed literally, they give every token its first, its middle and its last
part in order, and neighbours are done together."""

import random

import pytest

from attention.geometry.merge_plan import Sweep, merge_plan


def tokens_of(intervals):
    return [t for start, stop in intervals for t in range(start, stop)]


def follow(n, parts):
    """The parts of every token, in the order in which the passes combine them."""
    plan = merge_plan(n, parts)
    running, final = [None] * n, [None] * n
    kept = {}
    for number, (intervals, mine) in enumerate(zip(parts, plan.of, strict=True)):
        tokens = tokens_of(intervals)
        assert sorted(t for p in mine for t in tokens_of(p.rows)) == sorted(tokens)
        kept[number] = [[number]] * len(tokens)
        for p in mine:
            assert not (p.first and p.kept)
            places = tokens_of(p.kept[1]) if p.kept else [None] * n
            for t, at, place in zip(tokens_of(p.rows), tokens_of(p.at), places, strict=False):
                assert tokens[at] == t
                before = [] if p.first else kept[p.kept[0]][place] if p.kept else running[t]
                if p.last:
                    assert final[t] is None
                    final[t] = [*before, number]
                elif not p.first:
                    assert plan.running[0] <= t < plan.running[1]
                    running[t] = [*before, number]
        kept = {i: x for i, x in kept.items() if plan.until[i] > number}
    assert not kept
    for t in tokens_of(plan.bare):
        assert final[t] is None
        final[t] = []
    return final


def stretches(draw, n):
    cuts = sorted(draw.sample(range(n + 1), 2 * draw.randint(0, 3)))
    return tuple(zip(cuts[::2], cuts[1::2], strict=True))


@pytest.mark.parametrize("seed", range(20))
def test_every_token_gets_all_its_parts_in_order(seed):
    draw = random.Random(seed)
    n = draw.randint(6, 30)
    parts = tuple(((0, n),) if draw.random() < 0.3 else stretches(draw, n) for _ in range(draw.randint(0, 6)))
    expected = [[i for i, x in enumerate(parts) if any(a <= t < b for a, b in x)] for t in range(n)]
    assert follow(n, parts) == expected


def test_a_zigzag_ring_makes_one_pass_a_part_where_it_can():
    whole, late = ((0, 8),), ((4, 8),)
    # rank 0 of 2: the early half has one part, which stays where it is
    assert merge_plan(8, (whole, late)).of == (
        (Sweep(((0, 4),), ((0, 4),), True, True), Sweep(late, late, True, False)),
        (Sweep(late, ((0, 4),), False, True, (0, late)),),
    )
    # rank 0 of 4: only the late half is ever wide
    plan = merge_plan(8, (whole, late, late, late))
    assert plan.running == (4, 8) and plan.until[0] == 1
