"""In which order ranks that all pull at once best turn to their peers. A peer that several read from serves each of them
more slowly, so what counts is who meets whom when: with equal pieces each rank starts with the next one, which nobody
else does; pieces of several sizes get out of that step and need an order of their own. Pure Python."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import gcd

Sizes = tuple[tuple[int, ...], ...]  # by rank, what it gets from each peer
Orders = tuple[tuple[int, ...], ...]  # by rank, its peers
MOST_RANKS = 16
MOST_UNITS = 64  # pieces of many sizes, as of a pack, come in too many kinds to look for each


def orders(sizes: Sizes) -> Orders:
    """For each rank its peers in the order in which to pull from them; those that it gets nothing from last."""
    unit = gcd(*(n for row in sizes for n in row)) or 1
    if len(sizes) > MOST_RANKS or max(map(max, sizes)) > MOST_UNITS * unit:
        return rotated(len(sizes))
    return _best(tuple(tuple(n // unit for n in row) for row in sizes))


def rotated(world: int) -> Orders:
    return tuple(tuple((rank + i) % world for i in range(1, world)) for rank in range(world))


@lru_cache(maxsize=256)
def _best(sizes: Sizes) -> Orders:
    """From two starts, whatever exchange of two peers of a rank ends the pulls earlier."""
    found = rotated(len(sizes))
    least = max(*map(sum, sizes), *map(sum, zip(*sizes, strict=True)))
    shortest = duration(sizes, found)
    for start in (found, _free_first(sizes)):
        order = [list(peers) for peers in start]
        now = duration(sizes, order)
        better = True
        while better and now > least:
            better = False
            for peers in order:
                for i in range(len(peers)):
                    for j in range(i + 1, len(peers)):
                        peers[i], peers[j] = peers[j], peers[i]
                        changed = duration(sizes, order)
                        if changed < now - 1e-9:
                            now, better = changed, True
                        else:
                            peers[i], peers[j] = peers[j], peers[i]
        if now < shortest - 1e-9:
            found, shortest = tuple(map(tuple, order)), now
    return found


def _free_first(sizes: Sizes) -> list[list[int]]:
    """Whoever has most left to get takes, of the peers that nobody reads from, the one with most left to give."""
    everyone = range(len(sizes))
    left = [{peer for peer in everyone if peer != rank} for rank in everyone]
    to_give = [sum(column) for column in zip(*sizes, strict=True)]
    order: list[list[int]] = [[] for _ in sizes]
    until = dict.fromkeys(everyone, 0)
    busy: dict[int, int] = {}  # a peer, until when
    while any(left):
        now = min(until[rank] for rank in everyone if left[rank])
        idle = [rank for rank in everyone if left[rank] and until[rank] == now]
        for rank in sorted(idle, key=lambda r: -sum(sizes[r][peer] for peer in left[r])):
            free = [peer for peer in left[rank] if busy.get(peer, 0) <= now]
            if not free:
                until[rank] = min(max(busy[peer], now + 1) for peer in left[rank])
                continue
            peer = max(free, key=lambda p, r=rank: (to_give[p], sizes[r][p], -((p - r) % len(sizes))))  # type: ignore[misc]
            left[rank].remove(peer)
            order[rank].append(peer)
            to_give[peer] -= sizes[rank][peer]
            until[rank] = busy[peer] = now + sizes[rank][peer]
    return order


def duration(sizes: Sizes, orders: Sequence[Sequence[int]]) -> float:
    """When the last rank has everything, in the time that a unit takes alone, where the readers of a peer share it."""
    left = [[[peer, float(row[peer])] for peer in peers if row[peer]] for row, peers in zip(sizes, orders, strict=True)]
    now = 0.0
    while any(left):
        read = [pieces[0][0] for pieces in left if pieces]
        speed = {peer: 1 / read.count(peer) for peer in read}
        step = min(pieces[0][1] / speed[int(pieces[0][0])] for pieces in left if pieces)
        now += step
        for pieces in left:
            if pieces:
                pieces[0][1] -= step * speed[int(pieces[0][0])]
                if pieces[0][1] < 1e-9:
                    pieces.pop(0)
    return now
