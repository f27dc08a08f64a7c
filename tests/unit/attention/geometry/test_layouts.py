"""Layouts: every rank's tokens and their order, and what is said of lengths that do not divide."""

import math
import re
from dataclasses import replace
from itertools import accumulate

import pytest

from attention.geometry import layouts
from attention.geometry.layouts import Layout, positions, size
from attention.variants.grouped import chunked
from attention.variants.llama3 import PACKED
from attention.variants.stripe import STRIPE
from attention.variants.zigzag import ZIGZAG
from tests.support.coverage import every_layout

LAYOUTS = every_layout()
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


def decode(n: int, world: int, r: int) -> list[int]:
    each = math.ceil(n / world)
    return list(range(n))[r * each : (r + 1) * each]


# by name: the tokens of rank r, and the number of chunks a rank for which the length must divide, if any
EXPECTED = {
    "contiguous": (contiguous, 1),
    "packed contiguous": (contiguous, 1),
    "zigzag": (zigzag, 2),
    "stripe": (stripe, 1),
    "paired": (paired, 2),
    "replicated": (replicated, None),
    "decode": (decode, None),
}


def cumulated(lengths) -> tuple[int, ...]:
    return tuple(accumulate(lengths, initial=0))


def packs(layout: Layout, world: int) -> list[tuple[int, ...]]:
    """Lengths that divide: single sequences and packed batches, also of single chunks, of nothing, and across ranks' borders."""
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
            assert layout.uneven or {len(tokens) for tokens in held} == {sum(lengths) // world}


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


@pytest.mark.parametrize(
    "name", [name for name, (_, chunks) in EXPECTED.items() if chunks and LAYOUTS[name].per_sequence]
)
def test_the_sequence_of_a_packed_batch_that_does_not_divide_is_named(name):
    layout, world = LAYOUTS[name], 4
    with pytest.raises(ValueError, match=r"a sequence of the packed batch has length=17: .* 16 would work"):
        layout.check(cumulated((16, 32, 17, 16)), world)
    layout.check(cumulated((16, 32, 16, 16)), world)


def test_a_packed_stream_divides_by_its_total_alone():
    PACKED.check(cumulated((1, 2, 9)), 4)
    with pytest.raises(ValueError, match=r"=13: .* 12 would work"):
        PACKED.check(cumulated((4, 8, 1)), 4)


def test_replication_and_decodes_take_every_length():
    for world in WORLDS:
        layouts.REPLICATED.check(cumulated((1, 13, 0, 7)), world)
        layouts.DECODE.check(cumulated((1, 13, 0, 7)), world)


@pytest.mark.parametrize("world", WORLDS)
def test_the_shards_of_a_decode_are_equal_but_for_the_last_which_are_short_or_empty(world):
    for n in range(5 * world + 2):
        sizes = [size(shard) for shard in layouts.DECODE.shards((0, n), world)]
        each = -(-n // world)
        assert sum(sizes) == n and sizes == sorted(sizes, reverse=True)
        assert [x for x in sizes if x not in (0, each)] == ([n % each] if each and n % each else [])
    # 9 keys on 8 ranks: two each, so that the fifth has one and the last three none
    assert [size(shard) for shard in layouts.DECODE.shards((0, 9), 8)] == [2, 2, 2, 2, 1, 0, 0, 0]


@pytest.mark.parametrize("n", range(1, 9))
@pytest.mark.parametrize("world", [1, 3])
def test_a_chunked_replica_is_everything_in_equal_consecutive_chunks_of_every_sequence(n, world):
    layout = chunked(n)
    for lengths in ((2 * n,), (n, 0, 3 * n)):
        for shard in layout.shards(cumulated(lengths), world):
            assert positions(shard) == list(range(sum(lengths)))
            assert [len(r) for r in shard] == [length // n for length in lengths for _ in range(n)]


# layouts of groups, as Ulysses has them, with every number of ranks in a group
INNER = [
    (layout, world, inner)
    for layout in (layouts.CONTIGUOUS, ZIGZAG, STRIPE)
    for world in WORLDS
    for inner in range(1, world + 1)
    if world % inner == 0
]
every_inner = pytest.mark.parametrize(
    ("layout", "world", "inner"), INNER, ids=lambda x: x.name if isinstance(x, Layout) else str(x)
)


@every_inner
def test_a_group_holds_its_shard_in_consecutive_pieces_of_equal_size(layout, world, inner):
    chunks = EXPECTED[layout.name][1]
    unit, least = chunks * world, chunks * (world // inner)
    # single sequences, packed batches, and packed batches whose sequences are too short for each rank to have a piece of each
    for lengths in ((unit,), (5 * unit,), (unit, 4 * unit, 3 * unit), (2 * unit, 0, unit), (least,) * inner):
        cu = cumulated(lengths)
        held = [positions(shard) for shard in replace(layout, inner=inner).shards(cu, world)]
        assert [len(tokens) for tokens in held] == [cu[-1] // world] * world
        for g, shard in enumerate(layout.shards(cu, world // inner)):
            assert [t for tokens in held[g * inner : (g + 1) * inner] for t in tokens] == positions(shard)
        assert sorted(t for tokens in held for t in tokens) == list(range(cu[-1]))


@pytest.mark.parametrize("world", WORLDS)
def test_groups_of_one_are_the_layout_itself_and_contiguous_groups_are_contiguous(world):
    cu = (0, 6 * world)
    for inner in range(1, world + 1):
        if world % inner == 0:
            assert replace(layouts.CONTIGUOUS, inner=inner).shards(cu, world) == layouts.CONTIGUOUS.shards(cu, world)
    for layout in (ZIGZAG, STRIPE):
        assert replace(layout, inner=1).shards(cu, world) == layout.shards(cu, world)


def test_zigzag_groups_by_hand():
    # two groups of two ranks: chunks 0 3 and 1 2 of four, cut in two
    shards = replace(ZIGZAG, inner=2).shards((0, 16), 4)
    assert [positions(s) for s in shards] == [[0, 1, 2, 3], [12, 13, 14, 15], [4, 5, 6, 7], [8, 9, 10, 11]]


@every_inner
def test_a_length_that_does_not_divide_among_groups_is_refused_with_a_true_rule_and_one_that_does(layout, world, inner):
    grouped = replace(layout, inner=inner)
    for length in range(1, 4 * EXPECTED[layout.name][1] * world + 1):
        try:
            grouped.shards((0, length), world)
            assert length % world == 0
        except ValueError as error:
            assert_explains(str(error), f"seq_len={length}", layout, world, length)
            offer = int(re.findall(r"(\d+) would work", str(error))[0])
            assert size(grouped.shards((0, offer), world)[0]) == offer // world > 0, str(error)


def assert_explains(text: str, value: str, layout: Layout, world: int, number: int) -> None:
    """The value, and a rule that is true and that the value breaks."""
    found = re.fullmatch(rf"{re.escape(value)}: the {layout.name} layout needs a multiple of (.*) = (\d+); .*", text)
    assert found, text
    assert eval(found[1], {"world_size": world}) == int(found[2]) and number % int(found[2]), text


@every_inner
def test_what_does_not_divide_in_a_grouped_packed_batch_is_named_with_what_would(layout, world, inner):
    grouped, chunks = replace(layout, inner=inner), EXPECTED[layout.name][1]
    least = chunks * world // inner
    if least > 1:
        cu = cumulated((least * inner, least + 1, least * inner))
        with pytest.raises(ValueError) as error:
            grouped.check(cu, world)
        assert_explains(
            str(error.value), f"a sequence of the packed batch has length={least + 1}", layout, world, least + 1
        )
        assert "would work" in str(error.value)
    total = least * (inner + 1)
    if inner > 1 and total % world:
        with pytest.raises(ValueError) as error:
            grouped.check(cumulated((least * inner, least)), world)
        assert_explains(str(error.value), f"the packed batch's total={total}", layout, world, total)
        offer = int(re.findall(r"(\d+) would work", str(error.value))[0])
        grouped.check(cumulated((offer, 0)), world)  # some packed batch of this total
