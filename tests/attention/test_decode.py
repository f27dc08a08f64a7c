"""Tree and ring decode over real gloo worlds: KV really sharded, uneven and empty shards, GQA, speculative queries."""

import pytest

from attention.executors import costs
from attention.geometry.counts import Shapes
from attention.masks.band import Band
from attention.variants.registry import VARIANTS
from tests.jobs import numerics

REDUCTIONS = ("three", "two", "packed", "hierarchical")
BASE = {"batch": 2, "queries": 1, "keys": 48, "heads": 8, "kv_heads": 1, "head_dim": 64}
CASES = [
    BASE,
    BASE | {"scale": 0.3},
    BASE | {"queries": 4, "kv_heads": 8},
    BASE | {"keys": 37, "head_dim": 80, "scale": 0.2},  # the last shard is short
    BASE | {"keys": 5, "kv_heads": 2, "head_dim": 96},  # in larger worlds the last shard is empty
    BASE | {"keys": 1, "batch": 1, "queries": 3},  # all shards but the first are
    BASE | {"window": (9, 0)},  # whose keys lie on the last ranks
    BASE | {"keys": 37, "queries": 5, "kv_heads": 2, "causal": True},  # a shard ends among the last keys
    BASE | {"keys": 38, "queries": 4, "window": (21, 1)},
    BASE | {"keys": 3, "queries": 6, "causal": True, "window": (1, 5)},  # the first queries see no key
]
TREES = [("tree", {"reduce": how}) for how in REDUCTIONS]


@pytest.mark.parametrize("world", (1, 2, 3, 4))
@pytest.mark.parametrize(("name", "options"), [*TREES, ("ring_decode", {})], ids=lambda x: str(x))
def test_decode_matches_fp64(in_world, name, options, world):
    for found in in_world(numerics.decode, world, name=name, options=options, cases=CASES):
        assert found["error"] < 1e-6, found
        assert found["lse"] < 1e-5, found


@pytest.mark.slow
@pytest.mark.parametrize(("name", "options"), [*TREES, ("ring_decode", {})], ids=lambda x: str(x))
def test_decode_matches_fp64_in_a_world_of_eight(in_world, name, options):
    for found in in_world(
        numerics.decode, 8, name=name, options=options, cases=[CASES[-2] | {"queries": 2}, CASES[-1]]
    ):
        assert found["error"] < 1e-6, found
        assert found["lse"] < 1e-5, found


def test_every_rank_allocates_its_own_keys_only(in_world):
    (found,) = in_world(numerics.decode, 4, name="tree", options={}, cases=[BASE | {"keys": 42}])
    assert found["held"] == [11, 11, 11, 9]
    each = BASE["batch"] * BASE["kv_heads"] * BASE["head_dim"]
    assert found["storage"] == [n * each for n in found["held"]]


@pytest.mark.parametrize("world", (1, 2, 4))
@pytest.mark.parametrize(("name", "options"), [*TREES, ("ring_decode", {})], ids=lambda x: str(x))
def test_transports_move_the_bytes_that_the_costs_say(in_world, name, options, world):
    variant = VARIANTS[name]
    for found in in_world(numerics.decode, world, name=name, options=options, cases=CASES[2:]):
        case = found["case"]
        band = Band.of(case.get("causal", False), case.get("window", (-1, -1)))
        problem = variant.problem((0, case["keys"]), world, band, options, case["queries"])
        shapes = Shapes(case["batch"], case["heads"], case["kv_heads"], case["head_dim"], 4)
        for rank, counted in enumerate(found["bytes"]):
            said = costs.of(variant, problem, shapes, options).bytes_received(rank, False)
            assert {k: v for k, v in counted.items() if v} == {k: v for k, v in said.items() if v}, case


def test_the_phases_are_those_of_the_paper(in_world):
    (found,) = in_world(numerics.decode, 2, name="tree", options={"reduce": "three"}, cases=[BASE])
    assert set(found["phases"]) == {
        *("comp_shard_kv", "comp_local_attention", "comp_num_den", "comp_final_output"),
        *("comm_max_lse", "comm_sum_den", "comm_sum_num", "wait_max_lse", "wait_sum_den", "wait_sum_num"),
    }


@pytest.mark.parametrize("world", (1, 3, 4, 8))
@pytest.mark.parametrize(
    ("name", "options", "transport", "window"),
    [
        ("tree", {"reduce": "packed"}, "auto", (5, 0)),
        ("ring_decode", {}, "auto", (-1, -1)),
        ("ring_decode", {}, "symm", (7, 0)),
    ],
    ids=str,
)
def test_a_decode_whose_keys_grow_is_planned_once(in_world, name, options, transport, window, world):
    how = {"name": name, "options": options, "transport": transport, "window": window, "most": 24}
    found = in_world(numerics.growing, world, **how)
    assert found["error"] < 1e-5
    assert found["wrong"] == [[]] * world
    assert found["kept"] == 1
    assert found["built"] <= world


def test_keys_that_no_query_sees_do_not_travel(in_world):
    """A window of 9 keys before the last one: of four ranks with 12 keys each, those of the last one alone."""
    (found,) = in_world(numerics.decode, 4, name="ring_decode", options={}, cases=[BASE | {"window": (9, 0)}])
    each = 2 * BASE["batch"] * BASE["kv_heads"] * BASE["head_dim"] * 4
    assert [x.get("kv", 0) for x in found["bytes"]] == [10 * each] * 3 + [0]


def test_a_decode_refuses_keys_that_did_not_grow_with_the_others():
    import torch

    import attention

    q, k = torch.zeros(1, 1, 2, 8), torch.zeros(1, 4, 2, 8)
    fn = attention.make("tree")
    fn(q, k, k, kv_tokens=4)
    for n in (5, 3):
        with pytest.raises(ValueError, match=f"k has 4 tokens: rank 0 of 1 holds {n} of {n}"):
            fn(q, k, k, kv_tokens=n)
    with pytest.raises(ValueError, match="k has 3 tokens: rank 0 of 1 holds 4 of 4"):
        fn(q, k[:, :3], k[:, :3], kv_tokens=4)
