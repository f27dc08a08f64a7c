"""The variants over real gloo worlds, forward and backward, against fp64."""

import pytest

from attention import costs
from attention.masks import Mask
from attention.variants import VARIANTS

WORLDS = (1, 2, 3, 4)


def cases(world, causal_only):
    tokens = 24 * world
    shard = tokens // world
    base = {"tokens": tokens, "heads": 8, "kv_heads": 8, "head_dim": 32, "causal": True}
    packs = [0, 2 * world, 12 * world, 24 * world]
    found = [
        base,
        base | {"kv_heads": 1},
        base | {"kv_heads": 1, "packs": packs},
        base | {"head_dim": 80, "kv_heads": 2, "batch": 3},
        base | {"head_dim": 96, "batch": 1},
    ]
    if not causal_only:
        found += [
            base | {"causal": False},
            base | {"causal": False, "kv_heads": 2, "packs": packs},
            base | {"window": (shard // 2, 0)},
            base | {"window": (shard, 0), "kv_heads": 2},
            base | {"window": (2 * shard + 3, 0)},
            base | {"window": (5, 7), "causal": False},
            base | {"window": (shard // 3, 0), "packs": packs},
        ]
    return found


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", VARIANTS)
def test_variant_matches_fp64(in_world, name, world):
    options = [{}, {"heads_k_stride": 1}] if "heads_k_stride" in VARIANTS[name].options else [{}]
    for chosen in options:
        for found in in_world("compare", world, name=name, options=chosen,
                              cases=cases(world, VARIANTS[name].causal_only)):  # fmt: skip
            forward, *backward = found["errors"]
            assert forward < 1e-6, found
            assert max(backward) < 1e-5, found
            assert found["lse_wide"], found


@pytest.mark.parametrize("world", (1, 2, 4))
@pytest.mark.parametrize("name", VARIANTS)
def test_bf16_error_stays_near_that_of_one_local_call(in_world, name, world):
    case = {"tokens": 64 * world, "heads": 8, "kv_heads": 2, "head_dim": 64, "causal": True}
    (found,) = in_world("compare", world, name=name, options={}, cases=[case], dtype="bf16")
    for ours, local in zip(found["errors"], found["local"], strict=True):
        assert ours < 2 * local, found


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", VARIANTS)
def test_unshard_inverts_shard(in_world, name, world):
    assert in_world("round_trip", world, name=name, packs=None, tokens=12 * world)
    assert in_world("round_trip", world, name=name, packs=[0, 2 * world, 8 * world], tokens=8 * world)


@pytest.mark.parametrize("name", VARIANTS)
def test_activation_checkpointing_gives_the_same_gradients(in_world, name):
    assert in_world("checkpointed", 2, name=name) < 1e-6


@pytest.mark.parametrize("name", VARIANTS)
def test_works_inside_a_subgroup(in_world, name):
    assert in_world("subgroup", 4, name=name) < 1e-6


MASKS = ((True, (-1, -1)), (False, (-1, -1)), (True, (9, 0)), (False, (3, 11)))


@pytest.mark.parametrize(
    ("name", "causal", "window"),
    [(n, *m) for n, v in VARIANTS.items() for m in MASKS if m == MASKS[0] or not v.causal_only],
)
def test_transports_move_the_bytes_that_the_costs_say(in_world, name, causal, window):
    variant, mask = VARIANTS[name], Mask.of(causal, window)
    for world in (1, 3, 4):
        tokens, batch = 8 * world, 2
        counted = in_world("counted", world, name=name, causal=causal, window=list(window), tokens=tokens, batch=batch)
        problem = variant.problem((0, tokens), world, mask)
        shapes = costs.Shapes(batch, 4, 2, 16, 4)
        for rank, found in enumerate(counted):
            for which in ("forward", "backward"):
                said = costs.bytes_received(variant, problem, shapes, rank, which == "backward")
                assert {k: v for k, v in found[which].items() if v} == {k: v for k, v in said.items() if v}


def test_phases_name_transfers_and_waits_apart(in_world):
    assert {"comp_block", "comp_merge", "comm_kv", "wait_kv", "comm_dkv", "wait_dkv"} <= set(
        in_world("phase_names", 2, name="zigzag")
    )
