"""Decisions that executors take by the length of a shard, and the thresholds behind them. Costs read the same functions. Pure
Python."""

from __future__ import annotations

from attention.geometry.schedules import Problem, steps

RING_HALVED = (
    8192  # a rank's tokens from which a ring's backward takes half of the heads at a time: saves memory, costs launches
)
OVERLAPPED = 16384  # gathered tokens from which a transfer takes longer than the launches of another head group
# a group's tokens from which an exchange of heads takes half of the heads at a time: on 4 H200 13.04 ms instead of 13.25
# (results/h200-x4/path_3_parts); with half as many tokens launches make it 5.51 instead of 3.66 (h200-x4/short_training)
EXCHANGED_BY_PARTS = 32768
# a rank's tokens up to which a backward computes on local KV beside the other steps: that costs memory, and longer shards fill the
# GPU anyway
APART = 8192


def ring_parts(head_parts: int | None, kv_heads: int, tokens: int) -> int:
    """Parts of the heads that a ring's backward over a shard of `tokens` takes in turn; by default two for a long shard."""
    return head_parts or (2 if kv_heads % 2 == 0 and tokens >= RING_HALVED else 1)


def exchange_parts(head_parts: int | None, kv_heads: int, ulysses: int, tokens: int) -> int:
    """Parts of its heads that a rank computes in turn over its group's `tokens`; by default two where the heads are even in number
    and the tokens many enough to hide the launches."""
    each, rest = divmod(kv_heads, ulysses)
    if rest or not each:
        return 1
    return head_parts or (2 if each % 2 == 0 and tokens >= EXCHANGED_BY_PARTS else 1)


def group_sizes(
    kv_heads: int, stride: int | None, small_first: bool = False, small_last: bool = False, tokens: int = OVERLAPPED
) -> list[int]:
    """KV heads of each head group that is gathered at a time: `stride`, or for None all. Of many `tokens` a quarter of the heads
    comes first where `small_first`, since compute waits for the first keys, and last where `small_last`, since the last gradients
    are waited for."""
    if stride is not None:
        return [stride] * (kv_heads // stride)
    if kv_heads < 4 or tokens < OVERLAPPED:
        return [kv_heads]
    first, last = [kv_heads // 4] * small_first, [kv_heads // 4] * small_last
    return [*first, kv_heads - sum(first) - sum(last), *last]


REPLAY = ("none", "graphs", "auto")  # the option `replay` of `attention.make`


def replay_error(value: object) -> str | None:
    """Why the value is none of REPLAY, or None."""
    if value == "launches":
        return "is gone, since a training step is as fast without it; use none, or graphs for short calls"
    return None if value in REPLAY else f"must be one of {', '.join(REPLAY)}"


def local_kv_apart(problem: Problem, place: int) -> bool:
    """Whether a backward computes its first step, on local KV, beside the others: for a short shard, where the others compute
    anything. Not where the heads are taken in parts, which is for memory."""
    first, *others = steps(problem, place)
    short = problem.cu_seqlens[-1] // problem.world <= APART
    return short and first.owner == place and any(step.blocks for step in others)
