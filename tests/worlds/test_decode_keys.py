"""Decodes whose batch elements have different numbers of keys, or share a prefix: their pairs, FLOPs and bytes."""

import pytest

from runner.measure import metrics
from tests.support.composing import resolved

SIZES = ("config=tiny", "batch=3", "heads=4", "kv_heads=2", "head_dim=16", "seq_len=64", "dtype=fp32")
KEYS = ("kv_lengths=[64,20,1]", "prefix=24")
KV = 2 * 2 * 16 * 4  # bytes of one token's k and v of one batch element


def computed(name: str, world: int, *more: str):
    run = resolved(f"attention={name}", *SIZES, *KEYS, "q_len=3", f"world_size={world}", *more)
    return run, metrics.compute(run, {"forward": 1.0}, None)


@pytest.mark.parametrize("world", [1, 4])
def test_pairs_flops_and_bytes_are_those_of_each_element_and_the_prefix(world):
    # causal: 64 and 20 keys less the 3 pairs beyond the ends; of 1 key only the last query sees it; and 3 x 3 x 24 of the prefix
    pairs = (3 * 64 - 3) + (3 * 20 - 3) + 1 + 3 * 3 * 24
    flops = 4 * 4 * 16 * pairs
    run, tree = computed("tree", world, "causal=true")
    assert run.workload.batch_pairs == pairs
    assert tree.flops["forward"] == sum(tree.flops_forward_by_rank) == flops
    _, ring = computed("ring_decode", world, "causal=true")
    assert ring.flops_forward_by_rank == [flops] * world  # each rank computes everything
    received = [each.get("kv", 0) for each in ring.passes["forward"].bytes_received_by_rank]
    assert received == [(64 - 64 // world) * 3 * KV + (24 - 24 // world) * KV] * world


def test_a_ring_brings_the_keys_that_some_element_sees():
    run = resolved("attention=ring_decode", *SIZES, "kv_lengths=[20,3,0]", "causal=false", "world_size=4")
    received = metrics.compute(run, {"forward": 1.0}, None).passes["forward"].bytes_received_by_rank
    assert [each["kv"] // (3 * KV) for each in received] == [4, 16, 20, 20]
