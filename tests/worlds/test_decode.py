"""Tree and ring decode over real gloo worlds: KV really sharded, uneven and empty shards, GQA, speculative queries."""

from dataclasses import replace

import pytest
import torch

import attention
from attention import masks
from attention.geometry.counts import Shapes
from attention.geometry.decodes import block
from attention.masks.band import Band
from attention.variants.registry import VARIANTS
from runner.costs import dry_run
from tests.jobs import decodes, numerics

REDUCTIONS = ("three", "two", "packed")
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
            said = dry_run(variant, problem, shapes, options, rank=rank)[0].received
            assert {k: v for k, v in counted.items() if v} == {k: v for k, v in said.items() if v}, case


def test_the_phases_are_those_of_the_paper(in_world):
    (found,) = in_world(numerics.decode, 2, name="tree", options={"reduce": "three"}, cases=[BASE])
    assert set(found["phases"]) == {
        *("comp_shard_kv", "comp_local_attention", "comp_num_den", "comp_final_output"),
        *("comm_max_lse", "comm_sum_den", "comm_sum_num", "wait_max_lse", "wait_sum_den", "wait_sum_num"),
    }


LENGTHS = [0, 1, 7, 20, 20, 37, 3]
RAGGED = {"batch": 7, "queries": 1, "keys": 37, "heads": 4, "kv_heads": 2, "lengths": LENGTHS}
COMBINED = [
    RAGGED,
    RAGGED | {"tensor": True, "window": (6, 0)},
    RAGGED | {"queries": 3, "causal": True, "sinks": True},
    RAGGED | {"queries": 3, "window": (9, 1), "sinks": True, "softcap": 1.5, "value_dim": 24},
    RAGGED | {"lengths": [0] * 7, "sinks": True, "value_dim": 8},
    RAGGED | {"batch": 1, "lengths": [9], "queries": 2, "value_dim": 8, "window": (2, 0)},
    RAGGED | {"lengths": None, "sinks": True, "softcap": 0.7, "value_dim": 24},
    RAGGED | {"lengths": None, "sinks": True, "queries": 4, "causal": True, "window": (11, 0), "value_dim": 8},
    RAGGED | {"batch": 64, "lengths": [n % 38 for n in range(64)]},
    RAGGED | {"prefix": 21, "sinks": True, "softcap": 1.5, "value_dim": 24},
    RAGGED | {"prefix": 3, "queries": 3, "causal": True},
]


@pytest.mark.parametrize("world", (1, 2, 4))
def test_lengths_sinks_softcap_and_value_heads_of_another_size_match_fp64(in_world, world):
    found = in_world(decodes.compare, world, settings=[*TREES, ("ring_decode", {})], cases=COMBINED)
    assert len(found) == 4 * len(COMBINED)
    for each in found:
        assert all(out < 1e-6 and lse < 1e-5 for out, lse, _ in each["errors"]), each


def test_new_lengths_need_no_new_plan(in_world):
    cases = [RAGGED | {"lengths": [n % 38 for n in range(i, 7 * i + i, i)]} for i in range(1, 8)]
    cases += [RAGGED | {"keys": 40}]
    for each in in_world(decodes.compare, 2, settings=[("tree", {}), ("ring_decode", {})], cases=cases):
        assert all(out < 1e-6 and plans == 1 for out, _, plans in each["errors"]), each


def test_of_elements_with_different_lengths_only_keys_that_some_may_see_travel():
    """Lengths 20 to 24 with a window of 2 before the last key: keys 17 to 23, of which rank 1 of 4 has 17 to 19."""
    problem = VARIANTS["ring_decode"].problem((0, 40), 4, Band(2, 0), {}, 1)
    assert [b and b.k for b in (block(replace(problem, ends=(20, 24)), rank) for rank in range(4))] == [
        None,
        (7, 10),
        (0, 4),
        None,
    ]


@pytest.mark.parametrize(
    ("name", "lengths", "parts"),
    [
        ("tree", [3, 4], ("kv_lengths has 2 lengths", "one for each of the 3 batch elements")),
        ("tree", [3, 4, 9], ("kv_lengths[2]=9", "from 0 to the 8 keys", "kv_tokens")),
        ("tree", [-1, 4, 8], ("kv_lengths[0]=-1", "from 0 to the 8 keys")),
        ("ring_decode", [1.5, 4, 8], ("kv_lengths=[1.5, 4, 8]", "must be integers")),
        ("ring_decode", 5, ("kv_lengths=5", "must be integers")),
        ("tree", torch.ones(3), ("torch.float32", "integer tensor [3]", "to(torch.int32)")),
        ("tree", torch.ones(3, 1, dtype=torch.int32), ("shape [3, 1]", "integer tensor [3]")),
        ("ring", [1, 4, 8], ("kv_lengths: ring is no decode", "take ring_decode or tree", "cu_seqlens")),
    ],
    ids=str,
)
def test_lengths_that_do_not_fit_are_refused_in_one_line(name, lengths, parts):
    q = torch.zeros(3, 8, 2, 8)
    with pytest.raises(ValueError) as refusal:
        attention.make(name)(q, q, q, kv_lengths=lengths)
    assert "\n" not in str(refusal.value) and all(part in str(refusal.value) for part in parts), refusal.value


Q, K = torch.zeros(3, 1, 4, 8), torch.zeros(3, 8, 2, 8)
P = torch.zeros(5, 2, 8)


@pytest.mark.parametrize(
    ("name", "given", "parts"),
    [
        (
            "tree",
            {"prefix": (P, P), "window": (4, 0)},
            ("window=(4, 0)", "prefix see all of it", "leave the window out"),
        ),
        ("tree", {"prefix": (P, P), "mask": masks.sliding_window(4)}, ("window=(4, 0)", "prefix")),
        ("tree", {"prefix": P}, ("prefix: Tensor given", "a pair (k, v)")),
        ("tree", {"prefix_tokens": 5}, ("no prefix given", "a pair (k, v)")),
        ("tree", {"prefix": (P, P[..., :4])}, ("v of the prefix has shape [1, 5, 2, 4]", "[1, N_p, 2, 8]")),
        (
            "ring_decode",
            {"prefix": (P.expand(3, 5, 2, 8), P)},
            ("k of the prefix has shape [3, 5, 2, 8]", "one sequence"),
        ),
        ("tree", {"prefix": (P, P), "prefix_tokens": 9}, ("k has 5 tokens: rank 0 of 1 holds 9 of 9",)),
        ("ring", {"prefix": (P, P)}, ("prefix: ring is no decode", "ring_decode or tree", "shared_prompt")),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_prefixes_that_do_not_fit_are_refused_in_one_line(name, given, parts):
    with pytest.raises(ValueError) as refusal:
        attention.make(name)(Q, K, K, **given)
    assert "\n" not in str(refusal.value) and all(part in str(refusal.value) for part in parts), refusal.value


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


def test_keys_that_no_query_sees_do_not_travel(in_world):
    """A window of 9 keys before the last one: of four ranks with 12 keys each, those of the last one alone."""
    (found,) = in_world(numerics.decode, 4, name="ring_decode", options={}, cases=[BASE | {"window": (9, 0)}])
    each = 2 * BASE["batch"] * BASE["kv_heads"] * BASE["head_dim"] * 4
    assert [x.get("kv", 0) for x in found["bytes"]] == [10 * each] * 3 + [0]


def test_a_decode_refuses_keys_that_did_not_grow_with_the_others():
    q, k = torch.zeros(1, 1, 2, 8), torch.zeros(1, 4, 2, 8)
    fn = attention.make("tree")
    fn(q, k, k, kv_tokens=4)
    for n in (5, 3):
        with pytest.raises(ValueError, match=f"k has 4 tokens: rank 0 of 1 holds {n} of {n}"):
            fn(q, k, k, kv_tokens=n)
    with pytest.raises(ValueError, match="k has 3 tokens: rank 0 of 1 holds 4 of 4"):
        fn(q, k[:, :3], k[:, :3], kv_tokens=4)
