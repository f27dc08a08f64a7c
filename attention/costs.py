"""What a call costs before it runs: FLOPs, bytes received and memory, read off the schedules. Pure Python."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from attention.masks import Mask
from attention.schedules import Problem, length, steps
from attention.transfers import gather_move, move, step_route
from attention.variants import Variant

BACKWARD = 2.5  # backward FLOPs over forward FLOPs: five matrix products for two


@dataclass(frozen=True)
class Shapes:
    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    itemsize: int  # bytes an element of q, k, v


def forward_flops(shapes: Shapes, pairs: int) -> int:
    """4 B H D pairs: two matrix products, two FLOPs a multiply-add."""
    return 4 * shapes.batch * shapes.heads * shapes.head_dim * pairs


def global_pairs(cu_seqlens: tuple[int, ...], mask: Mask) -> int:
    """(query, key) pairs under the mask, all sequences."""
    return sum(mask.pairs(b - a, b - a) for a, b in itertools.pairwise(cu_seqlens))


def rank_pairs(variant: Variant, problem: Problem) -> list[int]:
    """The pairs that each rank computes."""
    return [sum(step.pairs for step in steps(variant.schedule, problem, rank)) for rank in range(problem.world)]


def bytes_received(variant: Variant, problem: Problem, shapes: Shapes, rank: int, backward: bool) -> dict[str, int]:
    """Bytes that a rank receives in one forward (or backward alone), by what moves: `kv`, `dkv`, `q`."""
    kv_token = 2 * shapes.batch * shapes.kv_heads * shapes.head_dim * shapes.itemsize  # k and v
    q_token = shapes.batch * shapes.heads * shapes.head_dim * shapes.itemsize
    found = {"kv": 0}
    if variant.exchange == "ring":
        count = len(steps(variant.schedule, problem, rank))
        routes = [step_route(variant.schedule, problem, rank, i) for i in range(count)]
        found["kv"] = sum(r.received_tokens for r in routes) * kv_token
        home = sum(r.reversed().received_tokens for r in routes)
    else:
        moving = gather_move(variant.schedule, problem, rank).route
        shard = problem.cu_seqlens[-1] // problem.world
        everything = (problem.world - 1) * shard
        found["kv"] = (moving.received_tokens if problem.mask.windowed else everything) * kv_token
        home = moving.reversed().received_tokens
        if problem.layout != problem.q_layout:
            border, inner = (x.shards(problem.cu_seqlens, problem.world) for x in (problem.layout, problem.q_layout))
            into = move(border, inner, rank).route.received_tokens
            back = move(inner, border, rank).route.received_tokens
            found["q"] = (into + back) * q_token  # q and out; in the backward dout and dq
    if backward:
        found["dkv"] = home * kv_token
    return found


def kernel_bytes(variant: Variant, problem: Problem, shapes: Shapes, rank: int, backward: bool) -> int:
    """The fewest bytes of device memory that a rank's kernels move: each block's inputs and outputs once."""
    total = 0
    for step in steps(variant.schedule, problem, rank):
        q_tokens = sum(b.q[1] - b.q[0] for b in step.blocks)
        k_tokens = length(step.keys)
        q_bytes = q_tokens * shapes.heads * shapes.head_dim
        k_bytes = 2 * k_tokens * shapes.kv_heads * shapes.head_dim
        # forward reads q, k, v and writes out; backward reads q, k, v, out, dout and writes dq, dk, dv
        total += (4 * q_bytes + 2 * k_bytes) if backward else (2 * q_bytes + k_bytes)
    return total * shapes.batch * shapes.itemsize
