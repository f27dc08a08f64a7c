"""Transfers carried out on plain lists of positions: senders and receivers agree, and no token moves needlessly."""

from itertools import product

import numpy as np
import pytest

from attention.geometry.intervals import length
from attention.geometry.layouts import Shard, positions, size
from attention.geometry.schedules import GATHER_SHARDS, Problem, steps
from attention.geometry.transfers import Move, Piece, Route, gather_move, step_routes
from attention.variants.registry import VARIANTS
from attention.variants.stripe import STRIPE
from tests.support.coverage import (
    WORLDS,
    cumulated,
    every_layout,
    global_pairs,
    key_positions,
    needed_keys,
    problems,
    query_positions,
    redistributed,
)

# an all-to-all has a ring across its groups
RINGS = [v.name for v in VARIANTS.values() if v.executor in ("ring", "all_to_all")]
GATHERS = [v.name for v in VARIANTS.values() if v.executor == "gather"]
UNIT_STEPS = [x for x in every_layout().values() if x is not STRIPE and not x.uneven]
every_world = pytest.mark.parametrize("world", WORLDS)


def assert_agreed(routes: list[Route]) -> None:
    """Whoever sends is waited for, whoever waits is sent to, once each, and both ends say the same."""
    for rank, route in enumerate(routes):
        for piece in route.sends:
            (waited,) = [x for x in routes[piece.remote].receives if x.remote == rank]
            assert (waited.source, waited.target) == (piece.source, piece.target)
            assert [b - a for a, b in piece.source] == [b - a for a, b in piece.target]
        for piece in route.receives:
            assert piece.remote != rank and [x.remote for x in routes[piece.remote].sends].count(rank) == 1
        assert len({piece.remote for piece in route.receives}) == len(route.receives)


def taken(held: list[int], intervals) -> list[int]:
    return [t for a, b in intervals for t in held[a:b]]


def needed(problem: Problem, rank: int, keys: np.ndarray) -> list[int]:
    """Those of `keys` that some query of the rank sees, in their order."""
    seen = global_pairs(problem)[query_positions(problem, rank)].any(0)
    return [int(t) for t in keys if seen[t]]


@pytest.mark.parametrize("name", RINGS)
@every_world
def test_each_ring_step_brings_exactly_the_keys_that_it_needs_and_takes_their_gradients_back(name, world):
    for problem in problems(VARIANTS[name], world):
        shards = [positions(shard) for shard in problem.layout.shards(problem.cu_seqlens, problem.world)]
        for i in range(len(steps(problem, 0))):
            routes = [step_routes(problem, place)[i] for place in range(problem.world)]
            assert_agreed(routes)
            for rank, route in enumerate(routes):
                step, back = steps(problem, rank)[i], route.reversed
                wanted = needed(problem, rank, key_positions(problem, rank, step))
                wanted = shards[step.owner] if wanted and problem.moves_shards else wanted
                sent = [taken(shards[step.owner], x.source) for x in routes[step.owner].sends if x.remote == rank]
                assert sent == ([wanted] if wanted and step.owner != rank else []), (problem, rank, i)
                assert sum(length(x.target) for x in route.receives) == sum(map(len, sent))
                for there, again in zip(route.receives, back.sends, strict=True):
                    assert again == Piece(there.remote, there.target, there.source)
                assert back.reversed == route


def carried_out(sources: tuple[Shard, ...], moves: list[Move], sizes: list[int]) -> list[list[int]]:
    """What every rank holds after its moves; each place must be written once."""
    held = [positions(shard) for shard in sources]
    result = []
    for rank, mine in enumerate(moves):
        local: list[int | None] = [None] * sizes[rank]

        def put(places, values: list[int], local=local) -> None:
            targets = [t for a, b in places for t in range(a, b)]
            for at, value in zip(targets, values, strict=True):
                assert local[at] is None
                local[at] = value

        for here, there in mine.local:
            put((there,), taken(held[rank], (here,)))
        for piece in mine.route.receives:
            put(piece.target, taken(held[piece.remote], piece.source))
        result.append(local)
    return result


@pytest.mark.parametrize("source", [x for x in UNIT_STEPS if not x.replicated], ids=lambda x: x.name)
@pytest.mark.parametrize("target", UNIT_STEPS, ids=lambda x: x.name)
def test_a_move_redistributes_between_any_two_layouts(source, target):
    for world, lengths in product(WORLDS, [(1,), (5,), (3, 1, 2), (1, 0, 4)]):
        cu = cumulated(2 * world * n for n in lengths)
        sources, targets = source.shards(cu, world), target.shards(cu, world)
        moves = [redistributed(sources, targets, rank) for rank in range(world)]
        assert_agreed([m.route for m in moves])
        assert carried_out(sources, moves, [size(t) for t in targets]) == [positions(t) for t in targets]
        if source is target:
            assert all(m.route == Route((), ()) for m in moves)
        if not target.replicated:
            back = [redistributed(targets, sources, rank) for rank in range(world)]
            assert [m.reversed().route for m in moves] == [m.route for m in back]


@pytest.mark.parametrize("name", GATHERS)
@every_world
def test_a_gather_brings_exactly_the_needed_keys_in_sequence_order(name, world):
    for problem in problems(VARIANTS[name], world):
        sources = problem.layout.shards(problem.cu_seqlens, world)
        moves = [gather_move(problem, rank) for rank in range(world)]
        assert_agreed([m.route for m in moves])
        wanted = [needed(problem, rank, np.arange(problem.cu_seqlens[-1])) for rank in range(world)]
        if problem.schedule is GATHER_SHARDS:
            wanted = [[t for shard in sources for t in positions(shard)]] * world
            assert all(len(piece.source) == 1 for m in moves for piece in m.route.receives)  # in one stretch
        if len(steps(problem, 0)) > 1:  # one's own keys are there
            others = [[t for t in keys if t not in positions(own)] for keys, own in zip(wanted, sources, strict=True)]
            wanted = [positions(needed_keys(problem, rank)) for rank in range(world)]  # as they come
            assert [sorted(keys) for keys in wanted] == others
        assert [positions(needed_keys(problem, rank)) for rank in range(world)] == wanted, problem
        assert carried_out(sources, moves, [len(keys) for keys in wanted]) == wanted, problem
