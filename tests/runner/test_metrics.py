"""Metrics: FLOPs, bytes and rates worked out by hand for problems small enough to draw."""

import pytest
from composing import resolved

from attention import costs
from attention.masks import CAUSAL, FULL, Mask
from attention.variants import VARIANTS, variant
from runner import metrics

# B 2, H 4, Hk 2, D 16, bf16: 4 B H D = 512 FLOP a pair; k and v of a token are 2 B Hk D 2 = 256 bytes, and so is q
SHAPES = costs.Shapes(batch=2, heads=4, kv_heads=2, head_dim=16, itemsize=2)
FLOP = 512
KV = 256
Q = 256
SIZES = ("batch=2", "heads=4", "kv_heads=2", "head_dim=16", "seq_len=8")
SHARDED = [name for name, v in VARIANTS.items() if not v.layout.replicated]


def small(name: str, *more: str):
    """Eight tokens on two ranks."""
    return resolved(f"attention={name}", *SIZES, "world_size=2", *more)


def received(name: str, tokens: int, world: int, mask: Mask, backward: bool) -> list[dict[str, int]]:
    chosen = variant(name)
    problem = chosen.problem((0, tokens), world, mask)
    return [costs.bytes_received(chosen, problem, SHAPES, rank, backward) for rank in range(world)]


def kv(name: str, tokens: int, world: int, mask: Mask) -> list[int]:
    """Tokens whose k and v each rank receives in the forward."""
    return [r["kv"] // KV for r in received(name, tokens, world, mask, False)]


def dkv(name: str, tokens: int, world: int, mask: Mask) -> list[int]:
    return [r["dkv"] // KV for r in received(name, tokens, world, mask, True)]


@pytest.mark.parametrize(
    ("mask", "pairs"),
    [
        ((), 36),  # causal: 8 * 9 / 2
        (("causal=false",), 64),
        (("window=[2,0]",), 21),  # 1 + 2 + 6 * 3
        (("causal=false", "window=[1,1]"), 22),  # 2 + 6 * 3 + 2
        (("window=[1,1]",), 15),  # causal cuts the right side: 1 + 7 * 2
    ],
)
def test_flops_are_four_bhd_for_each_pair_of_the_mask(mask, pairs):
    assert metrics.flops(small("ring", "mode=forward", *mask)) == {"forward": FLOP * pairs}


def test_backward_is_two_and_a_half_forwards():
    found = metrics.flops(small("ring"))
    assert found == {"forward": 18_432, "backward": 46_080, "total": 64_512}
    assert found["total"] == 3.5 * found["forward"]


@pytest.mark.parametrize("name", SHARDED)
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_the_ranks_of_a_sharded_variant_share_the_whole_work(name, world):
    chosen = VARIANTS[name]
    for mask in (CAUSAL, FULL, Mask(5, 0), Mask(3, 4)):
        if (chosen.causal_only and not mask.causal) or (mask.windowed and not chosen.windows):
            continue
        problem = chosen.problem((0, 48), world, mask)
        assert sum(costs.rank_pairs(chosen, problem)) == costs.global_pairs((0, 48), mask)


def test_every_rank_of_dense_does_the_whole_work():
    chosen = variant("dense")
    for mask in (CAUSAL, FULL, Mask(5, 0)):
        problem = chosen.problem((0, 48), 3, mask)
        assert costs.rank_pairs(chosen, problem) == [costs.global_pairs((0, 48), mask)] * 3


def test_causal_work_by_rank():
    # ring: 10 pairs against 10 + 16; zigzag: tokens 0 1 6 7 against 2 3 4 5, 1 + 2 + 7 + 8 = 3 + 4 + 5 + 6
    assert metrics.compute(small("ring"), {"forward": 1.0}, None)["flops_forward_by_rank"] == [10 * FLOP, 26 * FLOP]
    assert metrics.compute(small("zigzag"), {"forward": 1.0}, None)["flops_forward_by_rank"] == [18 * FLOP, 18 * FLOP]


def test_ring_brings_the_shards_that_the_mask_meets():
    # shards of 4 tokens: causal from every earlier rank, otherwise from all, in a window from the neighbour within it
    assert kv("ring", 16, 4, CAUSAL) == [0, 4, 8, 12]
    assert kv("ring", 16, 4, FULL) == [12, 12, 12, 12]
    assert kv("ring", 16, 4, Mask(4, 0)) == [0, 4, 4, 4]
    assert kv("ring", 16, 4, Mask(1, 0)) == [0, 1, 1, 1]
    assert kv("ring", 16, 4, Mask(5, 0)) == [0, 4, 5, 5]
    assert kv("ring", 16, 4, Mask(1, 2)) == [2, 3, 3, 1]


def test_zigzag_brings_half_a_shard_from_earlier_ranks_and_a_whole_one_from_later_ranks():
    assert kv("zigzag", 8, 2, CAUSAL) == [4, 2]
    assert kv("zigzag", 16, 4, CAUSAL) == [12, 2 + 8, 4 + 4, 6]


def test_allgather_brings_all_other_shards_but_only_the_neighbours_of_a_window():
    assert kv("ring_allgather", 16, 4, CAUSAL) == [12, 12, 12, 12]
    assert kv("ring_allgather", 16, 4, Mask(1, 0)) == [0, 1, 1, 1]


def test_gradients_go_back_to_where_the_keys_came_from():
    assert dkv("ring", 16, 4, CAUSAL) == [12, 8, 4, 0]
    assert dkv("ring", 16, 4, Mask(5, 0)) == [5, 5, 4, 0]
    assert dkv("zigzag", 8, 2, CAUSAL) == [2, 4]
    # from earlier ranks come all 4 tokens, from later ones the first 2
    assert dkv("zigzag", 16, 4, CAUSAL) == [6, 4 + 4, 8 + 2, 12]
    # chunk pairs 0 7, 2 5, 4 3, 6 1 need the first 16, 12, 10 and 14 tokens: the last shard's are needed by its own rank
    # and by rank 0, all others by every rank
    assert dkv("ring_allgather", 16, 4, CAUSAL) == [12, 12, 12, 4]


@pytest.mark.parametrize("name", ["ring", "zigzag"])
@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_as_many_gradients_go_home_as_keys_came(name, world):
    for mask in [CAUSAL] if name == "zigzag" else [CAUSAL, FULL, Mask(7, 0), Mask(2, 9)]:
        assert sum(dkv(name, 60, world, mask)) == sum(kv(name, 60, world, mask))


def test_backward_brings_the_keys_again():
    for name in SHARDED:
        forward, backward = (received(name, 16, 4, CAUSAL, which) for which in (False, True))
        assert [r["kv"] for r in forward] == [r["kv"] for r in backward]
        assert all("dkv" not in r for r in forward)


def test_allgather_swaps_query_halves_at_the_border_of_causal_calls():
    # chunks of 2: rank 0 holds 0 1 and computes 0 3, rank 1 holds 2 3 and computes 2 1: 2 tokens in, 2 back
    for backward in (False, True):
        assert [r["q"] for r in received("ring_allgather", 8, 2, CAUSAL, backward)] == [4 * Q, 4 * Q]
        assert all("q" not in r for r in received("ring_allgather", 8, 2, FULL, backward))


def test_dense_and_a_world_of_one_receive_nothing():
    assert all(set(r.values()) == {0} for r in received("dense", 16, 4, CAUSAL, True))
    for name in SHARDED:
        assert all(set(r.values()) == {0} for r in received(name, 16, 1, CAUSAL, True))


def test_rates_follow_from_the_slowest_ranks_median():
    found = metrics.compute(small("zigzag"), {"forward": 2.0, "backward": 5.0, "total": 8.0}, None)
    assert found["tokens"] == 16
    forward, backward, total = (found["passes"][which] for which in ("forward", "backward", "total"))
    assert forward["tokens_per_s"] == pytest.approx(16 / 2e-3)
    assert total["tokens_per_s"] == pytest.approx(16 / 8e-3)
    assert forward["tflops_per_device"] == pytest.approx(18_432 / 2e-3 / 2 / 1e12)
    assert backward["tflops_per_device"] == pytest.approx(46_080 / 5e-3 / 2 / 1e12)
    assert total["tflops_per_device"] == pytest.approx(64_512 / 8e-3 / 2 / 1e12)
    assert forward["bytes_received_by_rank"] == [{"kv": 4 * KV}, {"kv": 2 * KV}]
    assert backward["bytes_received_by_rank"] == [{"kv": 4 * KV, "dkv": 2 * KV}, {"kv": 2 * KV, "dkv": 4 * KV}]
    assert total["bytes_received_by_rank"] == [{"kv": 8 * KV, "dkv": 2 * KV}, {"kv": 4 * KV, "dkv": 4 * KV}]
    assert forward["received_gb_s"] == pytest.approx(4 * KV / 2e-3 / 1e9)  # the rank that receives most
    assert "sol" not in forward


def limits(ms: dict[str, float], **ceilings: float) -> dict[str, dict]:
    return metrics.compute(small("ring"), ms, {"matmul_tflops": 1e9, "copy_gb_s": 1e9, "link_gb_s": 1e9, **ceilings})[
        "passes"
    ]


def test_limit_by_compute_is_that_of_the_busiest_rank():
    # 1e-6 TFLOP/s: rank 1's 26 pairs, 13312 FLOP, take 13.312 ms; the backward 2.5 times that
    found = limits({"forward": 26.624, "backward": 33.28, "total": 93.184}, matmul_tflops=1e-6)
    assert {entry["limited_by"] for entry in found.values()} == {"compute"}
    assert [found[p]["limit_ms"] for p in found] == pytest.approx([13.312, 33.28, 46.592])
    assert [found[p]["sol"] for p in found] == pytest.approx([0.5, 1.0, 0.5])


def test_limit_by_memory_counts_each_blocks_inputs_and_outputs_once():
    # rank 1 has two blocks of 4 queries by 4 keys. One moves q and out, k and v: 4 tokens of 2 * Q + KV bytes each;
    # backward q, out, dout, dq, k, v, dk, dv: 4 tokens of 4 * Q + 2 * KV
    forward, backward = 2 * 4 * (2 * Q + KV), 2 * 4 * (4 * Q + 2 * KV)
    found = limits({"forward": forward * 4, "backward": backward, "total": forward + backward}, copy_gb_s=1e-6)
    assert {entry["limited_by"] for entry in found.values()} == {"memory"}  # 1e-6 GB/s: a byte a ms
    assert [found[p]["limit_ms"] for p in found] == pytest.approx([forward, backward, forward + backward])
    assert [found[p]["sol"] for p in found] == pytest.approx([0.25, 1, 1])


def test_limit_by_communication_is_what_the_rank_that_receives_most_receives():
    # forward: rank 1 gets 4 tokens' k, v; backward: it gets them again, and rank 0 as many dk, dv
    found = limits({"forward": 4 * KV, "backward": 8 * KV, "total": 16 * KV}, link_gb_s=1e-6)
    assert {entry["limited_by"] for entry in found.values()} == {"communication"}
    assert [found[p]["limit_ms"] for p in found] == pytest.approx([4 * KV, 4 * KV, 8 * KV])
    assert [found[p]["sol"] for p in found] == pytest.approx([1, 0.5, 0.5])


def test_a_world_of_one_has_no_link_to_be_limited_by():
    spec = resolved("attention=ring", *SIZES, "world_size=1")
    found = metrics.compute(spec, {"forward": 36.864}, {"matmul_tflops": 1e-6, "copy_gb_s": 1e9})
    assert found["passes"]["forward"]["limited_by"] == "compute"
    assert found["passes"]["forward"]["sol"] == pytest.approx(0.5)  # 18432 FLOP at 1e6 a second: 18.432 ms
