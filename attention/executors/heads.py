"""Groups of heads. Executors work on one group at a time, so that one group travels while another computes, or to hold less."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

OVERLAPPED = 16384  # remote tokens from which a transfer takes longer than the launches of another head group


class HeadGroup(NamedTuple):
    """Query heads `q` and the KV heads `k` that serve them."""

    q: slice
    k: slice


def head_groups(heads: int, sizes: Sequence[int]) -> list[HeadGroup]:
    """The groups with so many KV heads each, of `heads` query heads in all."""
    ratio, groups, start = heads // sum(sizes), list[HeadGroup](), 0
    for n in sizes:
        groups.append(HeadGroup(slice(start * ratio, (start + n) * ratio), slice(start, start + n)))
        start += n
    return groups


def halves(head_parts: int | None, kv_heads: int, tokens: int, threshold: int) -> int:
    """Parts of the KV heads that are taken in turn: by default two halves, from `threshold` tokens on."""
    return head_parts or (2 if kv_heads and kv_heads % 2 == 0 and tokens >= threshold else 1)


def gathered_sizes(kv_heads: int, stride: int | None, small_first: bool, small_last: bool, tokens: int) -> list[int]:
    """KV heads of each group that is gathered at a time: `stride`, or for None all. Of many remote `tokens` a quarter of the heads
    comes first where `small_first`, since compute waits for the first keys, and last where `small_last`, since the last gradients
    are waited for."""
    if stride is not None:
        return [stride] * (kv_heads // stride)
    if kv_heads < 4 or tokens < OVERLAPPED:
        return [kv_heads]
    first, last = [kv_heads // 4] * small_first, [kv_heads // 4] * small_last
    return [*first, kv_heads - sum(first) - sum(last), *last]
