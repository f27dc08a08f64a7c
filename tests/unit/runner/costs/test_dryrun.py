"""The dry run: FLOPs of every kernel call, bytes worked out by hand, equal steps that run once. That a real world moves these bytes
and holds these tensors is shown by the tests of worlds, of transports and of memory."""

import pytest

from attention.geometry.counts import Shapes, backward_flops, forward_flops, place_flops
from attention.masks.band import CAUSAL, FULL, Band
from attention.variants.registry import VARIANTS
from runner.costs import dry_run, dryrun
from tests.support.coverage import cumulated, problems

# B 2, D 16, bf16: one head of a token is 64 bytes; k and v of a token, 2 KV heads
HEAD = 64
KV = 2 * 2 * HEAD
SHAPES = Shapes(batch=2, heads=8, kv_heads=2, head_dim=16, itemsize=2)


def received(name, lengths, world, backward=False, mask=CAUSAL, q_tokens=None, **options):
    problem = VARIANTS[name].problem(cumulated(lengths), world, mask, options, q_tokens)
    ranks = [
        dry_run(VARIANTS[name], problem, SHAPES, options, rank=rank, backward=q_tokens is None)[backward].received
        for rank in range(problem.ranks)
    ]
    return without_zeros(ranks)


def without_zeros(by_rank):
    return [{what: size for what, size in by.items() if size} for by in by_rank]


@pytest.mark.parametrize(("name", "options"), [*((name, {}) for name in VARIANTS), ("grouped", {"grouping": "fused"})])
@pytest.mark.parametrize("world", (1, 4))
def test_kernel_calls_compute_every_pair_of_the_rank_once(name, options, world):
    shapes, variant = Shapes(batch=1, heads=24, kv_heads=12, head_dim=16, itemsize=2, value_dim=8), VARIANTS[name]
    for problem in problems(variant, world):
        for rank in range(world):
            packed = len(problem.cu_seqlens) > 2
            passes = dry_run(variant, problem, shapes, options, rank=rank, packed=packed, backward=not variant.decode)
            forward = place_flops(problem, shapes, rank // problem.ulysses)
            expected = [forward, forward * backward_flops(shapes, 1) // forward_flops(shapes, 1)]
            assert [x.flops for x in passes] == expected[: len(passes)], (problem, rank)


def test_usp_is_an_all_to_all_inside_and_a_ring_of_fewer_kv_heads_across():
    # 4 tokens a rank, groups of 2. In: of 4 others' tokens 4 query heads and one KV head, k and v; back 4 heads.
    # Across, groups hold 8 tokens: zigzag's first gets all 8 of the later one, the second half of the earlier one's.
    # In a contiguous ring only the later group needs the earlier one's
    border = {"qkv": 4 * (4 + 2) * HEAD, "out": 4 * 4 * HEAD}
    for ring, tokens in (("zigzag", (8, 4)), ("contiguous", (0, 8))):
        first, second = ({**border, "kv": n * 2 * HEAD} for n in tokens)
        expected = without_zeros([first, first, second, second])
        assert received("usp", (16,), 4, ulysses_size=2, ring=ring) == expected


def test_llama3_gathers_all_slices_or_what_is_needed_where_that_is_at_most_half():
    assert received("llama3", (16,), 4) == [{"kv": 12 * KV}] * 4
    # sequences of 6 and 10 in slices of 4: keys needed are [0, 4), [0, 8), [6, 12) and [6, 16)
    assert received("llama3", (6, 10), 4, True) == without_zeros(
        {"kv": n * KV, "dkv": m * KV} for n, m in ((0, 4), (4, 4), (2, 4), (6, 0))
    )


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
    assert received("tree", (1000,), 4, mask=FULL, q_tokens=1, **options) == without_zeros([expected] * 4)


@pytest.mark.parametrize(
    ("name", "options", "mask"),
    [("zigzag", {"head_parts": 2}, CAUSAL), ("usp", {"ulysses_size": 2, "ring": "contiguous"}, Band(500, 0))],
)
def test_equal_steps_run_once_and_count_as_often_as_they_are(monkeypatch, name, options, mask):
    problem = VARIANTS[name].problem((0, 4096), 64, mask, options)
    call = VARIANTS[name], problem, Shapes(1, 16, 16, 128, 2), options

    def found(kept):
        monkeypatch.setattr(dryrun, "KEPT", kept)
        dryrun.dry_run.cache_clear()
        passes = [x for pulls in (False, True) for x in dry_run(*call, rank=21, pulls=pulls, backward=True)]
        return [(x.flops, x.received, x.live, x.slots) for x in passes], len(passes[0].events)

    few, many = found(4), found(64)
    assert few[0] == many[0] and few[1] <= many[1]
