"""Metrics: FLOPs, bytes and rates worked out by hand for problems small enough to draw."""

from dataclasses import replace

import pytest

from attention.geometry import counts
from attention.masks.band import CAUSAL, FULL, Band
from attention.variants.registry import VARIANTS, variant
from runner.costs import dry_run
from runner.measure import metrics
from tests.jobs import traffic
from tests.support.composing import resolved

# B 2, H 4, Hk 2, D 16, bf16: 4 B H D = 512 FLOP a pair; k and v of a token are 2 B Hk D 2 = 256 bytes, and so is q
SHAPES = counts.Shapes(batch=2, heads=4, kv_heads=2, head_dim=16, itemsize=2)
FLOP = 512
KV = 256
Q = 256
SIZES = ("batch=2", "heads=4", "kv_heads=2", "head_dim=16", "seq_len=8")
DECODES = [name for name, v in VARIANTS.items() if v.decode]
SHARDED = [name for name, v in VARIANTS.items() if not v.layout.replicated and not v.decode]


def small(name: str, *more: str):
    """Eight tokens on two ranks."""
    return resolved(f"attention={name}", *SIZES, "world_size=2", *more)


def received(name: str, tokens: int, world: int, mask: Band, backward: bool) -> list[dict[str, int]]:
    chosen = variant(name)
    problem = chosen.problem((0, tokens), world, mask)
    ranks = (dry_run(chosen, problem, SHAPES, rank=rank, backward=not chosen.decode) for rank in range(world))
    return [passes[backward].received for passes in ranks]


def kv(name: str, tokens: int, world: int, mask: Band) -> list[int]:
    """Tokens whose k and v each rank receives in the forward."""
    return [r.get("kv", 0) // KV for r in received(name, tokens, world, mask, False)]


def dkv(name: str, tokens: int, world: int, mask: Band) -> list[int]:
    return [r.get("dkv", 0) // KV for r in received(name, tokens, world, mask, True)]


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


def test_value_heads_of_another_size_count_in_the_products_that_have_them():
    # 2 B H = 16 FLOP a pair and column. Forward: q k over D, p v over Dv. Backward: q k, dq, dk over D, dout v and dv over Dv
    shapes = replace(SHAPES, value_dim=8)
    assert counts.forward_flops(shapes, 36) == 16 * 36 * (16 + 8)
    assert counts.backward_flops(shapes, 36) == 16 * 36 * (3 * 16 + 2 * 8)
    assert (shapes.q_token, shapes.out_token, shapes.kv_token) == (Q, Q // 2, KV // 2 + KV // 4)
    problem = variant("ulysses").problem((0, 8), 2, FULL)
    forward, backward = dry_run(variant("ulysses"), problem, shapes, rank=0, backward=True)
    # half of the heads of the other rank's 4 tokens there, 4 tokens of the others' half back
    assert forward.received == {"qkv": 4 * (Q + 192) // 2, "out": 4 * Q // 2 // 2}
    assert backward.received == {"dout": 4 * Q // 2 // 2, "dqkv": 4 * (Q + 192) // 2}


def test_every_rank_of_dense_does_the_whole_work():
    chosen = variant("dense")
    for mask in (CAUSAL, FULL, Band(5, 0)):
        problem = chosen.problem((0, 48), 3, mask)
        assert counts.rank_flops(problem, SHAPES) == [FLOP * counts.global_pairs((0, 48), mask)] * 3


@pytest.mark.parametrize(
    ("given", "shares"),
    [(["attention=dense"], 1), (["attention=ring"], 4), (["attention=dense", "model=decoder_tiny"], 1)]
    + [([f"attention={name}", "q_len=2", "causal=false"], n) for name, n in (("ring_decode", 1), ("tree", 4))],
)
def test_a_devices_rate_is_of_its_own_work(given, shares):
    found = metrics.compute(resolved(*given, *SIZES, "seq_len=64", "world_size=4"), {"forward": 1.0}, None)
    rate = found["flops"]["forward"] / shares / 1e9
    assert found["passes"]["forward"]["tflops_per_device"] == pytest.approx(rate)


def test_no_sparsity_is_said_of_a_mixture_that_counts_pairs_several_times():
    mixture = ["attention=dilated", "attention.segments=[16,64]", "attention.rates=[1,2]", "seq_len=64", *SIZES]
    once = metrics.sparsity(resolved(*mixture, "heads=2"))
    assert 0 < once["sparsity_ratio"] < 1 and 0 < once["density"] < 1
    often = metrics.sparsity(resolved(*mixture, "heads=2", "attention.mixing=longnet"))
    assert often["sparsity_ratio"] is None and often["density"] is None


def test_causal_work_by_rank():
    # ring: 10 pairs against 10 + 16; zigzag: tokens 0 1 6 7 against 2 3 4 5, 1 + 2 + 7 + 8 = 3 + 4 + 5 + 6
    assert metrics.compute(small("ring"), {"forward": 1.0}, None)["flops_forward_by_rank"] == [10 * FLOP, 26 * FLOP]
    assert metrics.compute(small("zigzag"), {"forward": 1.0}, None)["flops_forward_by_rank"] == [18 * FLOP, 18 * FLOP]


def test_ring_brings_the_shards_that_the_mask_meets():
    # shards of 4 tokens: causal from every earlier rank, otherwise from all, in a window from the neighbour within it
    assert kv("ring", 16, 4, CAUSAL) == [0, 4, 8, 12]
    assert kv("ring", 16, 4, FULL) == [12, 12, 12, 12]
    assert kv("ring", 16, 4, Band(4, 0)) == [0, 4, 4, 4]
    assert kv("ring", 16, 4, Band(1, 0)) == [0, 1, 1, 1]
    assert kv("ring", 16, 4, Band(5, 0)) == [0, 4, 5, 5]
    assert kv("ring", 16, 4, Band(1, 2)) == [2, 3, 3, 1]


def test_zigzag_brings_half_a_shard_from_earlier_ranks_and_a_whole_one_from_later_ranks():
    assert kv("zigzag", 8, 2, CAUSAL) == [4, 2]
    assert kv("zigzag", 16, 4, CAUSAL) == [12, 2 + 8, 4 + 4, 6]


def test_allgather_brings_all_other_shards_but_only_the_neighbours_of_a_window():
    assert kv("ring_allgather", 16, 4, CAUSAL) == [12, 12, 12, 12]
    assert kv("ring_allgather", 16, 4, Band(1, 0)) == [0, 1, 1, 1]


def test_gradients_go_back_to_where_the_keys_came_from():
    assert dkv("ring", 16, 4, CAUSAL) == [12, 8, 4, 0]
    assert dkv("ring", 16, 4, Band(5, 0)) == [5, 5, 4, 0]
    assert dkv("zigzag", 8, 2, CAUSAL) == [2, 4]
    # from earlier ranks come all 4 tokens, from later ones the first 2
    assert dkv("zigzag", 16, 4, CAUSAL) == [6, 4 + 4, 8 + 2, 12]
    # chunk pairs 0 7, 2 5, 4 3, 6 1 need the first 16, 12, 10 and 14 tokens: the last shard's are needed by its own rank
    # and by rank 0, all others by every rank
    assert dkv("ring_allgather", 16, 4, CAUSAL) == [12, 12, 12, 4]


@pytest.mark.parametrize("name", ["ring", "zigzag"])
@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_as_many_gradients_go_home_as_keys_came(name, world):
    for mask in [CAUSAL] if name == "zigzag" else [CAUSAL, FULL, Band(7, 0), Band(2, 9)]:
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
    assert not any(sum(r.values()) for r in received("dense", 16, 4, CAUSAL, True))
    for name in SHARDED:
        assert not any(sum(r.values()) for r in received(name, 16, 1, CAUSAL, True))
    for name in DECODES:
        assert not any(sum(r.values()) for r in received(name, 16, 1, FULL, False))


OTHER_RUNS = {
    "llama3": ("seqlens=[100,28,128]",),
    "zigzag_varlen": ("seqlens=[8,24,64]",),
    "ring_varlen": ("seqlens=[8,24,64]",),
    **dict.fromkeys(DECODES, ("kv_lengths=[40]", "prefix=24")),
}


@pytest.mark.parametrize("world", (2, 4))
@pytest.mark.parametrize("transport", ("gloo", "symm"))
def test_the_bytes_of_the_metrics_are_those_that_the_transport_counts(in_world, transport, world):
    specs = []
    for name in VARIANTS:
        if name == "grouped":  # of one rank
            continue
        sizes = ("batch=1", "heads=4", "kv_heads=2", "head_dim=16", "seq_len=64", "dtype=fp32")
        specs += [
            resolved(
                f"attention={name}", *sizes, f"world_size={world}", f"transport={transport}", "hardware=cpu", *more
            )
            for more in ((), OTHER_RUNS.get(name, ()))
        ]
    counted = in_world(traffic.counted_of_runs, world, experiments=[spec.plain() for spec in specs])
    for spec, found in zip(specs, counted, strict=True):
        assert found["name"] == transport
        passes = dict.fromkeys(found["received"][0], 1.0)
        said = metrics.compute(spec, passes, None, found["pulls"])["passes"]
        for which in passes:
            by_rank = [{what: n for what, n in each[which].items() if n} for each in found["received"]]
            expected = [{k: n for k, n in each.items() if n} for each in said[which]["bytes_received_by_rank"]]
            assert by_rank == expected, (spec.variant, spec.workload.seqlens, which)


def test_a_packed_batch_whose_ranks_need_nothing_of_each_other_receives_nothing_over_a_transport_that_pulls():
    spec = resolved("attention=llama3", *SIZES, "world_size=2", "seqlens=[100,28,128]")
    sent, pulled = (
        metrics.compute(spec, {"forward": 1.0}, None, pulls)["passes"]["forward"] for pulls in (False, True)
    )
    assert sent["received_gb_s"] > 0
    assert pulled["bytes_received_by_rank"] == [{}, {}] and pulled["received_gb_s"] == 0


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


def test_a_decode_counts_its_queries_and_every_key():
    # 10 keys on 4 ranks, 3, 3, 3 and 1, and 2 queries in each of 2 batch elements
    spec = resolved("attention=tree", *SIZES, "seq_len=10", "world_size=4", "q_len=2")
    assert metrics.flops(spec) == {"forward": FLOP * 2 * 10}
    found = metrics.compute(spec, {"forward": 2.0}, None)
    assert found["tokens"] == 2 * 2
    assert found["flops_forward_by_rank"] == [FLOP * 2 * n for n in (3, 3, 3, 1)]
    forward = found["passes"]["forward"]
    assert forward["tokens_per_s"] == pytest.approx(4 / 2e-3)
    assert forward["tflops_per_device"] == pytest.approx(FLOP * 20 / 2e-3 / 4 / 1e12)
    # partial results of 3 others: 2 * 2 * 4 rows of D + 1 fp32
    assert forward["bytes_received_by_rank"] == [{"partials": 3 * 16 * 17 * 4}] * 4
    assert forward["received_gb_s"] == pytest.approx(3 * 16 * 17 * 4 / 2e-3 / 1e9)


def test_a_ring_decode_has_the_trees_flops_and_computes_them_on_every_rank():
    spec = resolved("attention=ring_decode", *SIZES, "seq_len=10", "world_size=4", "q_len=2")
    assert metrics.flops(spec) == {"forward": FLOP * 20}
    found = metrics.compute(spec, {"forward": 1.0}, None)
    assert found["flops_forward_by_rank"] == [FLOP * 20] * 4
    assert found["passes"]["forward"]["bytes_received_by_rank"] == [{"kv": n * KV} for n in (7, 7, 7, 9)]


def test_the_options_of_a_run_are_those_of_its_bytes():
    spec = resolved("attention=tree", *SIZES, "seq_len=10", "world_size=4", "attention.reduce=three")
    (found, *_) = metrics.compute(spec, {"forward": 1.0}, None)["passes"]["forward"]["bytes_received_by_rank"]
    assert set(found) == {"max_lse", "sum_den", "sum_num"}


def test_a_packed_batch_counts_the_pairs_of_its_sequences():
    # 3 pairs of the sequence of two, 21 of that of six; a packed batch has batch 1, which halves the FLOP of a pair
    spec = resolved("attention=llama3", *SIZES, "world_size=2", "seqlens=[2,6]")
    assert metrics.flops(spec)["forward"] == FLOP // 2 * 24
    found = metrics.compute(spec, {"forward": 2.0, "backward": 5.0, "total": 8.0}, None)
    assert found["tokens"] == 8
    # tokens 0 1 and the first two of six see 1 + 2 + 1 + 2 keys, the others 3 + 4 + 5 + 6
    assert found["flops_forward_by_rank"] == [FLOP // 2 * 6, FLOP // 2 * 18]
    assert found["passes"]["total"]["tokens_per_s"] == pytest.approx(8 / 8e-3)


@pytest.mark.parametrize("name", ["ring_varlen", "zigzag_varlen", "llama3"])
def test_a_default_packed_batch_has_as_many_tokens_as_the_batch_it_stands_for(name):
    # 4, 8, 16 and 4 tokens for each of two batch elements: 10 + 36 + 136 + 10 pairs
    spec = resolved(f"attention={name}", *SIZES, "seq_len=32", "world_size=2")
    assert metrics.flops(spec)["forward"] == FLOP // 2 * 2 * 192
    found = metrics.compute(spec, {"forward": 1.0}, None)
    assert found["tokens"] == 64
    assert sum(found["flops_forward_by_rank"]) == metrics.flops(spec)["forward"]


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("world", [1, 2, 4])
def test_every_variant_has_metrics_in_every_world(name, world):
    if name == "grouped":
        world = 1
    spec = resolved(f"attention={name}", f"world_size={world}")
    ceilings = {"matmul_tflops": 1.0, "copy_gb_s": 1.0, "link_gb_s": 1.0}
    passes = dict.fromkeys(metrics.flops(spec), 1.0)
    found = metrics.compute(spec, passes, ceilings)
    for entry in found["passes"].values():
        assert len(entry["bytes_received_by_rank"]) == len(found["flops_forward_by_rank"]) == world
        assert entry["limit_ms"] > 0 and entry["tflops_per_device"] > 0
        assert bool(entry["received_gb_s"]) == (world > 1 and name != "dense")


CEILINGS = {"matmul_tflops": 1e-6, "copy_gb_s": 1e9, "link_gb_s": 1e9}


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


def test_no_share_is_said_of_a_limit_that_a_pass_was_faster_than():
    # the limit is 13.312 ms: 102% may be an error of measurement, 400% is none
    found = metrics.compute(small("ring"), {"forward": 13.05, "backward": 8.32}, CEILINGS)
    assert metrics.exceeds(found)
    passes = found["passes"]
    assert passes["forward"]["sol"] == pytest.approx(1.02, abs=1e-3) and "no_sol" not in passes["forward"]
    assert passes["backward"]["sol"] is None
    assert passes["backward"]["no_sol"].startswith("400% of what the matrix product measured here allows")
    assert not metrics.exceeds(metrics.compute(small("ring"), {"forward": 13.05}, CEILINGS))
    assert not metrics.exceeds(metrics.compute(small("ring"), {"forward": 13.05}, None))


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
