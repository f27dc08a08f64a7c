"""Decodes: a few queries on every rank against sharded keys. The queries are the last tokens of the sequence: query i of
Sq lies at position N - Sq + i of N keys, also where there are fewer keys than queries. A decode is planned anew for each
token, so this is pure Python: one block for an owner, without numpy."""

from __future__ import annotations

from collections.abc import Sequence

from attention.geometry.layouts import ceiled
from attention.geometry.schedules import Problem, Schedule, steps
from attention.geometry.steps import Block, Step
from attention.masks.band import Intervals, tile


def block(problem: Problem, owner: int, end: int | None = None) -> Block | None:
    """All queries that see some key of `owner`, against the keys that they see; None where no query sees one. end: the keys of
    one batch element, by default all. With `problem.ends` the block has all queries, the keys that those of some element may
    see, and the mask of the problem, which is aligned to each element's own end."""
    keys = ceiled(problem.cu_seqlens[-1], problem.world, owner)
    n, ends = problem.q_tokens or 0, problem.ends if end is None else None
    least, most = ends or (problem.cu_seqlens[-1] if end is None else end,) * 2
    part = tile(problem.band, (least - n, most), (keys.start, min(keys.stop, most)))
    if part is None or not n:
        return None
    (a, b), (c, d), band = part
    k = (c - keys.start, d - keys.start)
    return Block((0, n), k, problem.band) if ends else Block((a - most + n, b - most + n), k, band)


class DecodeSchedule(Schedule):
    """The steps of a decode, whose queries are on every rank: one against the local keys, or in a `ring` one for each owner."""

    def __init__(self, ring: bool):
        self.ring = ring

    def steps(self, problem: Problem, rank: int) -> tuple[Step, ...]:
        return tuple(self._step(problem, rank, (rank - i) % problem.world) for i in range(self._owners(problem)))

    def _owners(self, problem: Problem) -> int:
        return problem.world if self.ring else 1

    def _step(self, problem: Problem, rank: int, owner: int) -> Step:
        one = block(problem, owner)
        if one is None:
            return Step(owner, (), ())
        start, stop = one.k
        arrived = one if owner == rank else Block(one.q, (0, stop - start), one.mask)  # from the first needed key on
        return Step(owner, (one.k,), (arrived,))

    def sends(self, problem: Problem, rank: int) -> Sequence[Intervals]:
        return [(), *[steps(problem, rank)[0].keys] * (self._owners(problem) - 1)]

    def most_keys(self, problem: Problem) -> tuple[int, ...]:
        blocks = [block(problem, owner) for owner in range(problem.world)] if self.ring else []
        most = max((one.k[1] - one.k[0] for one in blocks if one), default=0)
        return (0, *[most] * (self._owners(problem) - 1))


TREE = DecodeSchedule(ring=False)
RING = DecodeSchedule(ring=True)
