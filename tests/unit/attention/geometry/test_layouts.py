"""Layouts: every rank's tokens and their order, and what is said of lengths that do not divide."""

import math
import re
from dataclasses import replace

import pytest

from attention.geometry import layouts
from attention.geometry.layouts import Layout, positions, size
from attention.variants.llama3 import PACKED
from attention.variants.stripe import STRIPE
from attention.variants.zigzag import ZIGZAG
from tests.support.coverage import WORLDS, cumulated, divisors, every_layout

LAYOUTS = every_layout()


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


# layouts of groups, as Ulysses has them, with every number of ranks in a group; groups of one are the layout itself
INNER = [
    (layout, world, inner)
    for layout in (layouts.CONTIGUOUS, ZIGZAG, STRIPE)
    for world in (1, 3, 4, 8)
    for inner in divisors(world)
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


def assert_refused(layout: Layout, cu, world: int, value: str, number: int) -> None:
    """With the value, a rule that is true and that it breaks, and a length that works."""
    with pytest.raises(ValueError) as error:
        layout.shards(cu, world)
    rule = (
        rf"{re.escape(value)}={number}: the {layout.name} layout needs a multiple of (.*) = (\d+); (\d+) would work.*"
    )
    match = re.fullmatch(rule, str(error.value))
    assert match, str(error.value)
    assert eval(match[1], {"world_size": world}) == int(match[2]) and number % int(match[2])
    layout.check(cumulated((int(match[3]),) * layout.inner), world)


@every_inner
def test_a_length_that_does_not_divide_is_refused_with_a_true_rule_and_one_that_does(layout, world, inner):
    grouped, chunks = replace(layout, inner=inner), EXPECTED[layout.name][1]
    least = chunks * world // inner
    for length in range(1, 2 * chunks * world + 1):
        if length % (chunks * world):
            assert_refused(grouped, (0, length), world, "seq_len", length)
        else:
            grouped.check((0, length), world)
    if least > 1:
        cu = cumulated((least * inner, least + 1, least * inner))
        assert_refused(grouped, cu, world, "a sequence of the packed batch has length", least + 1)
    if (total := least * (inner + 1)) % world:
        assert_refused(grouped, cumulated((least * inner, least)), world, "the packed batch's total", total)


def test_a_packed_stream_divides_by_its_total_alone_and_replicas_and_decodes_take_every_length():
    PACKED.check(cumulated((1, 2, 9)), 4)
    with pytest.raises(ValueError, match=r"=13: .* 12 would work"):
        PACKED.check(cumulated((4, 8, 1)), 4)
    for layout in (layouts.REPLICATED, layouts.DECODE):
        layout.check(cumulated((1, 13, 0, 7)), 4)
