"""Costs: FLOPs that sum to the whole, bytes worked out by hand, and a memory model that orders the variants."""

import pytest

from attention.executors import costs
from attention.executors.gather_costs import kv_bytes_read
from attention.geometry import counts
from attention.geometry.counts import Shapes
from attention.geometry.schedules import Problem
from attention.masks.band import CAUSAL, FULL
from attention.variants.registry import VARIANTS
from tests.support.coverage import WORLDS, cumulated, problems, settings

every_world = pytest.mark.parametrize("world", WORLDS)

# B 2, D 16, bf16: one head of a token is 64 bytes
HEAD = 64
SHAPES = Shapes(batch=2, heads=8, kv_heads=2, head_dim=16, itemsize=2)


def made(name: str, lengths, world: int, mask=CAUSAL, q_tokens: int | None = None, **options) -> Problem:
    cu = cumulated(lengths if isinstance(lengths, tuple) else (lengths,))
    return VARIANTS[name].problem(cu, world, mask, options, q_tokens)


def received(name: str, lengths, world: int, backward: bool = False, shapes=SHAPES, **more) -> list[dict[str, int]]:
    problem = made(name, lengths, world, **more)
    options = {key: value for key, value in more.items() if key not in ("mask", "q_tokens")}
    each = costs.of(VARIANTS[name], problem, shapes, options)
    return [each.bytes_received(rank, backward) for rank in range(problem.ranks)]


@pytest.mark.parametrize("name", VARIANTS)
@every_world
def test_the_flops_of_the_ranks_sum_to_the_whole(name, world):
    shapes = Shapes(batch=3, heads=840, kv_heads=840, head_dim=4, itemsize=2)  # 840: divides for every world
    for problem in problems(VARIANTS[name], world):
        by_rank = counts.rank_flops(problem, shapes)
        assert len(by_rank) == world
        times = world if name in ("dense", "ring_decode") else 1  # there every rank computes everything
        assert sum(by_rank) == times * counts.forward_flops(shapes, counts.problem_pairs(problem)), problem


def test_the_pairs_of_packed_batches_and_decodes_by_hand():
    assert counts.problem_pairs(made("llama3", (2, 3, 1), 1)) == 3 + 6 + 1
    assert counts.problem_pairs(made("llama3", (2, 3, 1), 1, mask=FULL)) == 4 + 9 + 1
    assert counts.problem_pairs(made("tree", 10, 4, mask=FULL, q_tokens=3)) == 30


def test_the_flops_of_a_decode_follow_its_shards():
    # 10 keys on 4 ranks: 3, 3, 3 and 1; 4 B H D = 1024 FLOP a pair, two queries
    assert counts.rank_flops(made("tree", 10, 4, mask=FULL, q_tokens=2), SHAPES) == [6 * 1024] * 3 + [2 * 1024]
    assert counts.rank_flops(made("ring_decode", 10, 4, mask=FULL, q_tokens=2), SHAPES) == [20 * 1024] * 4


def test_ulysses_exchanges_heads_for_sequence_with_kv_heads_replicated():
    # 4 tokens a rank. In: of 12 others' tokens 2 of 8 query heads and one of the 2 KV heads, k and v;
    # back: its 4 tokens of the 6 other heads
    inwards, back = 12 * (2 + 2) * HEAD, 4 * 6 * HEAD
    assert received("ulysses", 16, 4) == [{"qkv": inwards, "out": back, "kv": 0}] * 4
    # backward: dout of the 12 tokens; dq of the 6 other heads and each of 3 others' dk and dv of its one KV head
    gradients = 4 * (6 + 3 * 2) * HEAD
    assert received("ulysses", 16, 4, True) == [{"dout": 12 * 2 * HEAD, "dqkv": gradients, "kv": 0, "dkv": 0}] * 4


def test_ulysses_with_enough_kv_heads_moves_each_once():
    # world 2: of 8 others' tokens 4 query heads and one of 2 KV heads
    assert received("ulysses", 16, 2) == [{"qkv": 8 * (4 + 2) * HEAD, "out": 8 * 4 * HEAD, "kv": 0}] * 2


def test_ulysses_bytes_do_not_depend_on_the_mask_or_the_packed_batch():
    single = received("ulysses", 16, 4)
    assert received("ulysses", 16, 4, mask=FULL) == single
    assert received("ulysses", (4, 12), 4) == received("ulysses", (1, 14, 1), 4) == single


def test_usp_is_an_all_to_all_inside_and_a_ring_of_fewer_kv_heads_across():
    # 4 tokens a rank, groups of 2. In: of 4 others' tokens 4 query heads and one KV head, k and v; back 4 heads.
    # Across, groups hold 8 tokens: zigzag's first gets all 8 of the later one, the second half of the earlier one's
    border = {"qkv": 4 * (4 + 2) * HEAD, "out": 4 * 4 * HEAD}
    first, second = {**border, "kv": 8 * 2 * HEAD}, {**border, "kv": 4 * 2 * HEAD}
    assert received("usp", 16, 4, ulysses_size=2, ring="zigzag") == [first, first, second, second]
    # a contiguous ring: only the later group needs the earlier one's
    first, second = {**border, "kv": 0}, {**border, "kv": 8 * 2 * HEAD}
    assert received("usp", 16, 4, ulysses_size=2, ring="contiguous") == [first, first, second, second]


def test_usp_gradients_go_home_across_and_inside():
    found = received("usp", 16, 4, True, ulysses_size=2, ring="zigzag")
    border = {"dout": 4 * 4 * HEAD, "dqkv": 4 * (4 + 2) * HEAD}
    first = {**border, "kv": 8 * 2 * HEAD, "dkv": 4 * 2 * HEAD}  # the later group needed the first half of its keys
    second = {**border, "kv": 4 * 2 * HEAD, "dkv": 8 * 2 * HEAD}
    assert found == [first, first, second, second]


@every_world
def test_usp_ends_in_ulysses_and_in_zigzag(world):
    shapes = Shapes(batch=1, heads=840, kv_heads=840, head_dim=4, itemsize=2)
    n = 12 * world
    for backward in (False, True):
        assert received("usp", n, world, backward, shapes, ulysses_size=world) == received(
            "ulysses", n, world, backward, shapes
        )
        ring = received("zigzag", n, world, backward, shapes)
        across = received("usp", n, world, backward, shapes, ulysses_size=1)
        assert [{key: x for key, x in r.items() if key in ("kv", "dkv")} for r in across] == ring
        assert all(x == 0 for r in across for key, x in r.items() if key not in ("kv", "dkv"))


KV = 2 * 2 * HEAD  # k and v of a token, 2 KV heads


def test_llama3_gathers_all_other_slices_and_brings_home_what_was_needed():
    # sequences of 6 and 10 in slices of 4: keys needed are [0, 4), [0, 8), [6, 12) and [6, 16)
    assert received("llama3", (6, 10), 4) == [{"kv": 12 * KV}] * 4
    home = [4, 2 + 2, 4, 0]
    assert received("llama3", (6, 10), 4, True) == [{"kv": 12 * KV, "dkv": n * KV} for n in home]


def test_zigzag_llama3_gathers_everything_and_moves_no_queries():
    # chunks of 2; the late chunks' prefixes end at 16, 14, 12 and 10
    assert received("zigzag_llama3", 16, 4) == [{"kv": 12 * KV}] * 4
    home = [2 + 2 + 2, 4 + 2 + 2, 4 + 4 + 2, 4 + 4 + 4]
    assert received("zigzag_llama3", 16, 4, True) == [{"kv": 12 * KV, "dkv": n * KV} for n in home]


def test_stripe_brings_every_shard_but_for_the_last_token_of_later_ranks():
    # shards of 4: from earlier ranks all, from later ranks all but the last
    assert [r["kv"] // KV for r in received("stripe", 16, 4)] == [9, 4 + 6, 8 + 3, 12]
    assert [r["dkv"] // KV for r in received("stripe", 16, 4, True)] == [12, 8 + 3, 4 + 6, 9]


def test_ring_decode_receives_all_keys_but_its_own():
    # shards of 3, 3, 3 and 1, and of 2, 2, 1 and none
    assert received("ring_decode", 10, 4, mask=FULL, q_tokens=1) == [{"kv": n * KV} for n in (7, 7, 7, 9)]
    assert received("ring_decode", 5, 4, mask=FULL, q_tokens=1) == [{"kv": n * KV} for n in (3, 3, 4, 5)]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        # B H = 16 rows of fp32: lse 64 bytes, out 1024, together 1088; an all-reduce on 4 ranks is 2 * 3 / 4 of them
        ({"reduce": "three"}, {"max_lse": 96, "sum_den": 96, "sum_num": 1536}),
        ({"reduce": "two"}, {"max_lse": 96, "sum_num_den": 1632}),
        ({"reduce": "packed"}, {"partials": 3 * 1088}),
        ({"reduce": "fused"}, {"partials": 3 * 1088}),  # rows of 16: a piece each
    ],
    ids=str,
)
def test_a_tree_reduction_moves_partial_results_in_fp32_and_no_keys(options, expected):
    assert received("tree", 1000, 4, mask=FULL, q_tokens=1, **options) == [expected] * 4
    # as many for each query, and however many keys there are
    tripled = {key: 3 * n for key, n in expected.items()}
    assert received("tree", 10, 4, mask=FULL, q_tokens=3, **options) == [tripled] * 4


@pytest.mark.parametrize("reduce", ["three", "two", "packed", "fused"])
def test_a_tree_on_one_rank_moves_nothing(reduce):
    (found,) = received("tree", 100, 1, mask=FULL, q_tokens=1, reduce=reduce)
    assert set(found.values()) == {0}


@every_world
def test_over_many_keys_a_tree_moves_far_less_than_a_ring(world):
    tree = sum(received("tree", 4096, world, mask=FULL, q_tokens=1)[0].values())
    ring = sum(received("ring_decode", 4096, world, mask=FULL, q_tokens=1)[0].values())
    assert tree < ring / 50 or tree == ring == 0


def peak(name: str, seq_len: int, world: int, shapes=SHAPES, **options) -> int:
    decode = VARIANTS[name].decode
    problem = made(name, seq_len, world, FULL if decode else CAUSAL, 1 if decode else None, **options)
    each = costs.of(VARIANTS[name], problem, shapes, options)
    return max(each.peak_bytes(rank, False) for rank in range(problem.ranks))


@pytest.mark.parametrize(
    ("name", "world"), [(name, world) for name in VARIANTS for world in (1, 2, 4, 8) if settings(VARIANTS[name], world)]
)
def test_peak_memory_grows_with_the_sequence_but_for_a_tree(name, world):
    found = [peak(name, n, world) for n in (64, 128, 1024, 4096)]
    if name == "tree" or (name == "ring_decode" and world == 1):
        assert len(set(found)) == 1
    else:
        assert found == sorted(set(found))
    assert found[0] > 0


@pytest.mark.parametrize("world", [8, 16])
def test_a_gather_holds_the_others_keys_and_a_ring_two_shards(world):
    n = 1024
    shapes = Shapes(batch=2, heads=8, kv_heads=8, head_dim=16, itemsize=2)
    whole = n * 4 * KV
    for name in ("ring_allgather", "zigzag_llama3"):
        assert peak(name, n, world, shapes) > whole * (world - 1) // world > 2 * whole // world
        for ring in ("ring", "zigzag", "stripe"):
            assert peak(name, n, world, shapes) > peak(ring, n, world, shapes) >= 2 * (whole // world)


def test_a_ring_merges_in_fp32_only_what_three_parts_meet_in():
    row = 8 * HEAD  # a query's 8 heads, beside an lse of 4 bytes for each in a batch of two
    keys = {2: 512 * KV, 4: 2 * 256 * KV}  # of the steps in flight
    offered = {world: 1024 // world * KV for world in (2, 4)}
    for name in ("ring", "stripe"):
        # the result and the part at hand
        assert peak(name, 1024, 2) == 2 * 512 * (row + 64) + keys[2] + offered[2]
        # rank 3 has three parts and more of every query, in fp32 twice the bytes of a result
        assert peak(name, 1024, 4) == 2 * 256 * (row + 64) + 256 * 2 * row + keys[4] + offered[4]
    # in fp32 the parts are merged in the result itself
    shapes = Shapes(2, 8, 2, 16, 4)
    assert peak("ring", 1024, 4, shapes) == 2 * 256 * (2 * row + 64) + 2 * (keys[4] + offered[4])


def test_fewer_heads_in_flight_need_less_memory():
    shapes = Shapes(batch=1, heads=8, kv_heads=8, head_dim=16, itemsize=2)
    found = [peak("zigzag_llama3", 1024, 4, shapes, heads_k_stride=n) for n in (1, 2, None)]
    assert found == sorted(set(found))
    assert peak("llama3", 1024, 4, shapes, heads_k_stride=1) < peak("llama3", 1024, 4, shapes)


def test_keys_that_come_along_are_not_moved_by_kernels():
    """Of nine sequences others' shards come whole, of eight what is seen; a kernel reads what it sees either way."""
    for name in ("zigzag_varlen", "zigzag_llama3"):
        eight, nine = (VARIANTS[name].problem(tuple(8 * i for i in range(n + 1)), 4, CAUSAL) for n in (8, 9))
        for rank in range(4):
            few, many = (counts.kernel_bytes(problem, SHAPES, rank, False) for problem in (eight, nine))
            assert 9 * few == 8 * many


def test_a_block_moves_its_inputs_and_outputs_once():
    # 3, 3, 3 and 1 keys of 2 heads, k and v; q and out of one token, 8 heads
    problem = made("tree", 10, 4, FULL, 1)
    found = [counts.kernel_bytes(problem, SHAPES, rank, False) for rank in range(4)]
    assert found == [2 * 8 * HEAD + n * KV for n in (3, 3, 3, 1)]
    # Ulysses on 4 ranks: 16 tokens of 2 query heads in and out, and of one KV head
    problem = made("ulysses", 16, 4)
    assert [counts.kernel_bytes(problem, SHAPES, rank, False) for rank in range(4)] == [16 * (2 * 2 + 2) * HEAD] * 4


def test_an_empty_shard_of_a_decode_moves_and_computes_nothing():
    problem = made("tree", 5, 4, FULL, 1)
    assert counts.kernel_bytes(problem, SHAPES, 3, False) == 0
    assert counts.rank_flops(problem, SHAPES)[3] == 0


def test_fused_chunks_read_each_prefix_once_and_separate_ones_as_often_as_it_is_attended():
    # 4 chunks of 32 tokens read prefixes of 32, 64, 96 and 128: 320 tokens against 128, a saving of 1 - 2 / (4 + 1)
    problem = VARIANTS["grouped"].problem((0, 128), 1, CAUSAL, {"n_groups": 4})
    shapes = Shapes(3, 8, 2, 64, 2)
    token = 3 * 2 * 64 * 2 * 2  # batch, KV heads, head dim, bytes, k and v
    assert kv_bytes_read(problem, shapes, 0, "separate") == 320 * token
    assert kv_bytes_read(problem, shapes, 0, "packed") == 320 * token
    assert kv_bytes_read(problem, shapes, 0, "fused") == 128 * token
