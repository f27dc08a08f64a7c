"""What is counted on a problem and its schedule, whichever executor runs it: pairs, FLOPs and the bytes that kernels move. Without
torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from attention.geometry.intervals import length, union
from attention.geometry.layouts import CuSeqlens
from attention.geometry.schedules import Problem, Subproblem, rank_pairs, steps
from attention.masks.band import Band

ALL_PLACES = 8  # a world with more places in the schedule is sampled
SAMPLED = 4


@dataclass(frozen=True)
class Shapes:
    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    itemsize: int  # bytes of an element of q, k and v
    value_dim: int | None = None  # of v and out; None: head_dim

    @property
    def v_head_dim(self) -> int:
        return self.value_dim or self.head_dim

    @property
    def q_token(self) -> int:
        """Bytes of one token's queries."""
        return self.batch * self.heads * self.head_dim * self.itemsize

    @property
    def out_token(self) -> int:
        """Bytes of one token's out."""
        return self.batch * self.heads * self.v_head_dim * self.itemsize

    @property
    def kv_token(self) -> int:
        """Bytes of one token's keys and values."""
        return self.batch * self.kv_heads * (self.head_dim + self.v_head_dim) * self.itemsize

    @property
    def backward_ratio(self) -> float:
        """Backward FLOPs over forward FLOPs: five matrix products for two, 2.5 where Dv = D."""
        return backward_flops(self, 1) / forward_flops(self, 1)


def forward_flops(shapes: Shapes, pairs: int) -> int:
    """2 B H (D + Dv) pairs: the products q k and p v, two FLOPs a multiply-add."""
    return 2 * shapes.batch * shapes.heads * (shapes.head_dim + shapes.v_head_dim) * pairs


def backward_flops(shapes: Shapes, pairs: int) -> int:
    """2 B H (3 D + 2 Dv) pairs: q k again, dq and dk over D; dout v and dv over Dv."""
    return 2 * shapes.batch * shapes.heads * (3 * shapes.head_dim + 2 * shapes.v_head_dim) * pairs


def global_pairs(cu_seqlens: CuSeqlens, mask: Band) -> int:
    """(query, key) pairs under the mask, all sequences."""
    return sum(mask.pairs(b - a, b - a) for a, b in pairwise(cu_seqlens))


def problem_pairs(problem: Problem) -> int:
    """(query, key) pairs of a head that the whole problem needs, each once. Of several parts see `head_pairs`."""
    assert not problem.schedule.parts(problem, 1, 1), "the heads have different pairs"
    if problem.q_tokens is not None:
        return problem.band.pairs(problem.q_tokens, problem.cu_seqlens[-1])
    if isinstance(problem.form, Band):
        return global_pairs(problem.cu_seqlens, problem.form)
    return problem.form.pairs(problem.cu_seqlens[-1])


def parts(problem: Problem, shapes: Shapes) -> list[tuple[Subproblem, Shapes]]:
    """The problems that a call consists of, each with its own shapes: usually this one."""
    subproblems = problem.schedule.parts(problem, shapes.heads, shapes.kv_heads)
    if not subproblems:
        return [(Subproblem(shapes.heads, shapes.kv_heads, problem, 1, 1), shapes)]
    return [(c, replace(shapes, batch=shapes.batch * c.fold, heads=c.heads, kv_heads=c.kv_heads)) for c in subproblems]


def head_pairs(problem: Problem, heads: int, kv_heads: int) -> int:
    """(query, key) pairs of all heads together that the whole problem needs; of several parts as often as parts have them."""
    subproblems = parts(problem, Shapes(1, heads, kv_heads, 1, 1))
    return sum(c.copies * c.fold * c.heads * problem_pairs(c.problem) for c, _ in subproblems)


def place_flops(problem: Problem, shapes: Shapes, place: int) -> int:
    """Forward FLOPs of a rank at this place in the schedule, which all ranks of a Ulysses group share."""
    flops = (forward_flops(of, rank_pairs(c.problem, place % c.problem.world)) for c, of in parts(problem, shapes))
    return sum(flops) // problem.ulysses


def rank_flops(problem: Problem, shapes: Shapes) -> list[int]:
    """The forward FLOPs of each rank."""
    by_place = [place_flops(problem, shapes, place) for place in range(problem.world)]
    return [by_place[rank // problem.ulysses] for rank in range(problem.ranks)]


def sampled_places(problem: Problem) -> list[int]:
    """All places in the schedule, or in a large world a few spread over it. Both ends are among them, where the busiest ranks lie."""
    n = problem.world if problem.world <= ALL_PLACES else SAMPLED
    return [i * (problem.world - 1) // max(n - 1, 1) for i in range(n)]


def kernel_bytes(problem: Problem, shapes: Shapes, rank: int, backward: bool) -> int:
    """The fewest bytes of device memory that a rank's kernels move: each block's inputs and outputs once."""
    total = 0
    for part, of in parts(problem, shapes):
        kv_heads = max(1, of.kv_heads // problem.ulysses)  # its share, or one that several ranks have
        for step in steps(part.problem, rank // problem.ulysses % part.problem.world):
            start, stop = np.array([block.k for block in step.blocks], np.int64).reshape(-1, 2).T
            seen = union(start, stop, np.zeros_like(start))
            q_rows = sum(block.q[1] - block.q[0] for block in step.blocks) * of.heads // problem.ulysses
            kv_rows = int((seen[:, 1] - seen[:, 0]).sum()) * kv_heads
            # forward reads q, k, v and writes out; backward reads q, k, v, out, dout and writes dq, dk, dv
            size = of.batch * (of.head_dim + of.v_head_dim) * of.itemsize
            total += (q_rows + kv_rows) * size * (2 if backward else 1)
    return total


def kv_bytes_read(problem: Problem, shapes: Shapes, rank: int, grouping: str) -> int:
    """Bytes of keys and values that the kernels of a gather's forward read: a prefix once for each query chunk that attends it, or
    with grouping=fused once for all of them."""
    read = [
        step.keys if grouping == "fused" else tuple(block.k for block in step.blocks) for step in steps(problem, rank)
    ]
    return sum(map(length, read)) * shapes.kv_token
