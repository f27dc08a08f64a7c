"""A rank plans with its own steps and those of the ranks that read its shard; what that leaves out is compared with all steps."""

import pytest
import torch

from attention.executors.plan import plan_steps
from attention.geometry import schedules
from attention.geometry.intervals import length, side_by_side
from attention.geometry.schedules import SEQUENCE, GatherSchedule, Problem, rank_pairs, steps
from attention.geometry.transfers import Piece, Route, gather_move, step_routes
from attention.kernels.interface import Call
from attention.variants.registry import VARIANTS
from tests.support.coverage import MASKS, WORLDS, does, needed_keys, problems, redistributed, settings

every_variant = pytest.mark.parametrize("name", VARIANTS)
every_world = pytest.mark.parametrize("world", WORLDS)
LARGE = 64


def piece(rank: int, keys) -> Piece:
    return Piece(rank, keys, side_by_side(keys))


def route_by_all_steps(problem: Problem, rank: int, i: int) -> Route:
    """What moves before step `i`, read off the steps of every rank."""
    everyones = [steps(problem, other)[i] for other in range(problem.world)]
    step = everyones[rank]
    receives = [piece(step.owner, step.keys)] if step.owner not in (rank, SEQUENCE) and step.keys else []
    sends = [piece(other, x.keys) for other, x in enumerate(everyones) if other != rank and x.owner == rank and x.keys]
    return Route(tuple(sends), tuple(receives))


@every_variant
@every_world
def test_routes_are_those_that_the_steps_of_all_ranks_give(name, world):
    for problem in problems(VARIANTS[name], world):
        for rank in range(problem.world):
            expected = [route_by_all_steps(problem, rank, i) for i in range(len(steps(problem, rank)))]
            assert list(step_routes(problem, rank)) == expected, (problem, rank)


@every_variant
@every_world
def test_the_most_keys_of_a_step_are_those_of_the_rank_that_receives_most(name, world):
    for problem in problems(VARIANTS[name], world):
        everyones = [steps(problem, rank) for rank in range(problem.world)]
        for i, most in enumerate(problem.schedule.most_keys(problem)):
            assert most == max(length(x[i].keys) if x[i].owner != rank else 0 for rank, x in enumerate(everyones))


@pytest.mark.parametrize("name", [v.name for v in VARIANTS.values() if v.executor == "gather"])
@every_world
def test_a_gather_moves_where_shards_and_needed_keys_overlap(name, world):
    for problem in problems(VARIANTS[name], world):
        shards = problem.layout.shards(problem.cu_seqlens, problem.world)
        needs = tuple(needed_keys(problem, rank) for rank in range(problem.world))
        for rank in range(problem.world):
            assert gather_move(problem, rank) == redistributed(shards, needs, rank), (problem, rank)


def large_problems(name: str) -> list[Problem]:
    v = VARIANTS[name]
    found = []
    for options in settings(v, LARGE):
        for mask in (x for x in MASKS if does(v, x, options)):
            found.append(v.problem((0, 8 * LARGE), LARGE, mask, options, 1 if v.decode else None))
    return found


@every_variant
def test_a_plan_builds_the_steps_of_this_rank_and_of_two_others_at_most(name, monkeypatch):
    for problem in large_problems(name):
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
            schedules.masks(problem)
        assert 0 < len(ranks) <= 3, problem


@every_variant
@every_world
def test_a_ranks_pairs_are_those_of_its_steps(name, world):
    for problem in problems(VARIANTS[name], world):
        for rank in range(problem.world):
            assert rank_pairs(problem, rank) == sum(step.pairs for step in steps(problem, rank)), (problem, rank)
