"""The order of pulls: every rank turns to every peer once, and pieces of unequal sizes come as soon as the links allow."""

import pytest

from attention.layouts import ZIGZAG
from attention.masks import CAUSAL
from attention.pulls import duration, orders, rotated
from attention.transfers import gather_move
from attention.variants import VARIANTS


def zigzag(world):
    """What a zigzag rank needs: one chunk of earlier ranks, two of later ones."""
    return tuple(tuple(0 if p == r else 1 + (p > r) for p in range(world)) for r in range(world))


def turned(sizes):
    return tuple(zip(*sizes, strict=True))


@pytest.mark.parametrize("world", range(2, 9))
def test_every_rank_turns_to_every_peer_once(world):
    for sizes in (zigzag(world), turned(zigzag(world)), tuple((1,) * world for _ in range(world))):
        for rank, peers in enumerate(orders(sizes)):
            assert sorted(peers) == [p for p in range(world) if p != rank]


@pytest.mark.parametrize("world", range(2, 9))
def test_equal_pieces_are_pulled_in_turn_without_meeting(world):
    sizes = tuple(tuple(int(p != r) for p in range(world)) for r in range(world))
    assert orders(sizes) == rotated(world)
    assert duration(sizes, rotated(world)) == world - 1


def test_readers_of_one_peer_share_it():
    sizes = ((0, 0, 4), (0, 0, 2), (0, 0, 0))
    assert duration(sizes, ((2,), (2,), ())) == 6  # 2 each in 4, and the other 2
    assert duration(((0, 1, 1), (1, 0, 1), (1, 1, 0)), ((1, 2), (0, 2), (0, 1))) > 2


@pytest.mark.parametrize(("world", "rotation", "found"), [(4, 8, 6), (8, 19.75, 15)])
def test_the_uneven_pieces_of_zigzag_take_little_more_than_the_busiest_rank_needs(world, rotation, found):
    sizes = zigzag(world)
    assert duration(sizes, rotated(world)) == pytest.approx(rotation)
    assert duration(sizes, orders(sizes)) <= found + 1e-9
    assert duration(turned(sizes), orders(turned(sizes))) <= found + 1e-9


def test_lengths_of_many_kinds_are_pulled_in_turn():
    sizes = ((0, 101, 7), (13, 0, 5), (1, 2, 0))
    assert orders(sizes) == rotated(3)


def test_a_gather_and_its_way_back_are_in_that_order():
    chosen = VARIANTS["zigzag_llama3"].problem((0, 64), 4, CAUSAL, {"own_first": True})
    assert chosen.layout == ZIGZAG
    for rank in range(4):
        route = gather_move(chosen, rank).route
        assert tuple(piece.peer for piece in route.receives) == orders(zigzag(4))[rank]
        back = route.reversed().receives
        assert tuple(piece.peer for piece in back) == orders(turned(zigzag(4)))[rank]
