"""Tree and ring decode over real gloo worlds: KV really sharded, uneven and empty shards, GQA, speculative queries."""

import pytest
import torch

import attention
from attention.geometry.counts import Shapes
from attention.masks.band import Band
from attention.variants.registry import VARIANTS
from runner.costs import dry_run
from tests.jobs import decodes, numerics

REDUCTIONS = ("three", "two", "packed")
BASE = {"batch": 2, "queries": 1, "keys": 48, "heads": 8, "kv_heads": 1, "head_dim": 64}
CASES = [
    BASE | {"queries": 4, "kv_heads": 8, "scale": 0.3},
    BASE | {"keys": 37, "head_dim": 80, "scale": 0.2},  # the last shard is short
    BASE | {"keys": 5, "kv_heads": 2, "head_dim": 96},  # in larger worlds the last shard is empty
    BASE | {"keys": 1, "batch": 1, "queries": 3},  # all shards but the first are
    BASE | {"window": (9, 0)},  # whose keys lie on the last ranks
    BASE | {"keys": 37, "queries": 5, "kv_heads": 2, "causal": True},  # a shard ends among the last keys
    BASE | {"keys": 38, "queries": 4, "window": (21, 1)},
    BASE | {"keys": 3, "queries": 6, "causal": True, "window": (1, 5)},  # the first queries see no key
]
TREES = [("tree", {"reduce": how}) for how in REDUCTIONS]


@pytest.mark.parametrize("world", (1, 2, 4))
@pytest.mark.parametrize(("name", "options"), [*TREES, ("ring_decode", {})], ids=str)
def test_decode_matches_fp64_and_moves_the_bytes_that_the_costs_say(in_world, name, options, world):
    for result in in_world(numerics.decode, world, name=name, options=options, cases=CASES):
        assert result["error"] < 1e-6 and result["lse"] < 1e-5, result
        case = result["case"]
        band = Band.of(case.get("causal", False), case.get("window", (-1, -1)))
        problem = VARIANTS[name].problem((0, case["keys"]), world, band, options, case["queries"])
        shapes = Shapes(case["batch"], case["heads"], case["kv_heads"], case["head_dim"], 4)
        held = [sum(map(len, shard)) for shard in problem.layout.shards(problem.cu_seqlens, world)]
        token = case["batch"] * case["kv_heads"] * case["head_dim"]
        assert result["held"] == held and result["storage"] == [n * token for n in held]
        for rank, counted in enumerate(result["bytes"]):
            received = dry_run(VARIANTS[name], problem, shapes, options, rank=rank)[0].received
            assert {k: v for k, v in counted.items() if v} == {k: v for k, v in received.items() if v}, case


def test_the_phases_are_those_of_the_paper(in_world):
    (found,) = in_world(numerics.decode, 2, name="tree", options={"reduce": "three"}, cases=[BASE])
    assert set(found["phases"]) == {
        *("comp_shard_kv", "comp_local_attention", "comp_num_den", "comp_final_output"),
        *("comm_max_lse", "comm_sum_den", "comm_sum_num", "wait_max_lse", "wait_sum_den", "wait_sum_num"),
    }


LENGTHS = [0, 1, 7, 20, 20, 37, 3]
RAGGED = {"batch": 7, "queries": 1, "keys": 37, "heads": 4, "kv_heads": 2, "lengths": LENGTHS}
COMBINED = [
    RAGGED | {"tensor": True, "window": (6, 0)},
    RAGGED | {"queries": 3, "causal": True, "sinks": True},
    RAGGED | {"queries": 3, "window": (9, 1), "sinks": True, "softcap": 1.5, "value_dim": 24},
    RAGGED | {"lengths": [0] * 7, "sinks": True, "value_dim": 8},
    RAGGED | {"lengths": None, "sinks": True, "queries": 4, "causal": True, "window": (11, 0), "value_dim": 8},
    RAGGED | {"prefix": 21, "sinks": True, "softcap": 1.5, "value_dim": 24},
    RAGGED | {"prefix": 3, "queries": 3, "causal": True},
]


@pytest.mark.parametrize("world", (1, 2))
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


Q, K, P = torch.zeros(3, 1, 4, 8), torch.zeros(3, 8, 2, 8), torch.zeros(5, 2, 8)


@pytest.mark.parametrize(
    ("name", "given", "parts"),
    [
        ("tree", {"kv_lengths": [3, 4]}, ("kv_lengths has 2 lengths", "one for each of the 3 batch elements")),
        ("tree", {"kv_lengths": [3, 4, 9]}, ("kv_lengths[2]=9", "from 0 to the 8 keys", "kv_tokens")),
        ("ring_decode", {"kv_lengths": [1.5, 4, 8]}, ("kv_lengths=[1.5, 4, 8]", "must be integers")),
        ("tree", {"kv_lengths": torch.ones(3)}, ("torch.float32", "integer tensor [3]", "to(torch.int32)")),
        (
            "ring",
            {"kv_lengths": [1, 4, 8]},
            ("kv_lengths: ring is no decode", "take ring_decode or tree", "cu_seqlens"),
        ),
        ("tree", {"kv_tokens": 5}, ("k has 8 tokens: rank 0 of 1 holds 5 of 5",)),
        (
            "tree",
            {"prefix": (P, P), "window": (4, 0)},
            ("window=(4, 0)", "prefix see all of it", "leave the window out"),
        ),
        ("tree", {"prefix": P}, ("prefix: Tensor given", "a pair (k, v)")),
        ("tree", {"prefix": (P, P[..., :4])}, ("v of the prefix has shape [1, 5, 2, 4]", "[1, N_p, 2, 8]")),
        ("tree", {"prefix": (P.expand(3, 5, 2, 8), P)}, ("k of the prefix has shape [3, 5, 2, 8]", "one sequence")),
        ("tree", {"prefix": (P, P), "prefix_tokens": 9}, ("k has 5 tokens: rank 0 of 1 holds 9 of 9",)),
        ("ring", {"prefix": (P, P)}, ("prefix: ring is no decode", "ring_decode or tree", "shared_prompt")),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_lengths_and_prefixes_that_do_not_fit_are_refused_in_one_line(name, given, parts):
    fn = attention.make(name)
    with pytest.raises(ValueError) as refusal:
        fn(K if name == "ring" else Q, K, K, **given)
    assert "\n" not in str(refusal.value) and all(part in str(refusal.value) for part in parts), refusal.value


@pytest.mark.parametrize("world", (1, 3))
@pytest.mark.parametrize(
    ("name", "options", "transport", "window"),
    [
        ("tree", {"reduce": "packed"}, "auto", (5, 0)),
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
