"""Layouts: every rank's tokens and their order, and what is said of lengths that do not divide."""

import re
from itertools import accumulate

import pytest

from attention import layouts
from attention.layouts import Layout, positions, size

LAYOUTS = {x.name: x for x in vars(layouts).values() if isinstance(x, Layout)}
WORLDS = range(1, 9)


def chunk(n: int, chunks: int, i: int) -> list[int]:
    return list(range(n // chunks * i, n // chunks * (i + 1)))


def contiguous(n: int, world: int, r: int) -> list[int]:
    return chunk(n, world, r)


def zigzag(n: int, world: int, r: int) -> list[int]:
    return chunk(n, 2 * world, r) + chunk(n, 2 * world, 2 * world - 1 - r)


def stripe(n: int, world: int, r: int) -> list[int]:
    return [t for t in range(n) if t % world == r]


def paired(n: int, world: int, r: int) -> list[int]:
    """Contiguous, with the second half swapped with rank W-1-r."""
    half = n // world // 2
    return contiguous(n, world, r)[:half] + contiguous(n, world, world - 1 - r)[half:]


def replicated(n: int, world: int, r: int) -> list[int]:
    return list(range(n))


# by name: the tokens of rank r, and the number of chunks a rank for which the length must divide
EXPECTED = {
    "contiguous": (contiguous, 1),
    "packed contiguous": (contiguous, 1),
    "zigzag": (zigzag, 2),
    "stripe": (stripe, 1),
    "paired": (paired, 2),
    "replicated": (replicated, None),
}


def cumulated(lengths) -> tuple[int, ...]:
    return tuple(accumulate(lengths, initial=0))


def packs(layout: Layout, world: int) -> list[tuple[int, ...]]:
    """Lengths that divide: single sequences and packs, also of single chunks, of nothing, and across borders."""
    _, chunks = EXPECTED[layout.name]
    unit = world * (chunks or 1)
    found = [(unit,), (5 * unit,), (unit, 4 * unit, 3 * unit), (2 * unit, 0, unit)]
    if not layout.per_sequence or chunks is None:
        found += [(1, 7 * unit - 4, 3), (1,) * unit]
    return found


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("world", WORLDS)
def test_a_rank_holds_the_tokens_of_the_table_in_its_order(name, world):
    layout, expected = LAYOUTS[name], EXPECTED[name][0]
    for lengths in packs(layout, world):
        cu = cumulated(lengths)
        for r, shard in enumerate(layout.shards(cu, world)):
            if layout.per_sequence:
                held = [start + t for start, n in zip(cu, lengths, strict=False) for t in expected(n, world, r)]
            else:
                held = expected(cu[-1], world, r)
            assert positions(shard) == held, (lengths, r)
            assert size(shard) == len(held)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("world", WORLDS)
def test_the_shards_partition_or_replicate_all_positions(name, world):
    layout = LAYOUTS[name]
    for lengths in packs(layout, world):
        held = [positions(shard) for shard in layout.shards(cumulated(lengths), world)]
        everything = list(range(sum(lengths)))
        assert len(held) == world
        if layout.replicated:
            assert all(tokens == everything for tokens in held)
        else:
            assert sorted(t for tokens in held for t in tokens) == everything
            assert {len(tokens) for tokens in held} == {sum(lengths) // world}


@pytest.mark.parametrize("name", [name for name, (_, chunks) in EXPECTED.items() if chunks])
@pytest.mark.parametrize("world", WORLDS)
def test_a_length_that_does_not_divide_is_refused_with_one_that_does(name, world):
    layout, divisor = LAYOUTS[name], EXPECTED[name][1] * world
    for length in range(1, 4 * divisor + 1):
        if length % divisor == 0:
            layout.check((0, length), world)
            continue
        with pytest.raises(ValueError) as error:
            layout.shards((0, length), world)
        text = str(error.value)
        assert f"={length}:" in text and f"{name} layout" in text and f"= {divisor};" in text
        (offer,) = re.findall(r"(\d+) would work", text)
        layout.check((0, int(offer)), world)
        assert size(layout.shards((0, int(offer)), world)[0]) == int(offer) // world > 0


@pytest.mark.parametrize("name", [name for name, x in LAYOUTS.items() if x.per_sequence and not x.replicated])
def test_the_sequence_of_a_pack_that_does_not_divide_is_named(name):
    layout, world = LAYOUTS[name], 4
    with pytest.raises(ValueError, match=r"a sequence of the pack has length=17: .* 16 would work"):
        layout.check(cumulated((16, 32, 17, 16)), world)
    layout.check(cumulated((16, 32, 16, 16)), world)


def test_a_packed_stream_divides_by_its_total_alone():
    layouts.PACKED.check(cumulated((1, 2, 9)), 4)
    with pytest.raises(ValueError, match=r"=13: .* 12 would work"):
        layouts.PACKED.check(cumulated((4, 8, 1)), 4)


def test_replication_takes_every_length():
    for world in WORLDS:
        layouts.REPLICATED.check(cumulated((1, 13, 0, 7)), world)
