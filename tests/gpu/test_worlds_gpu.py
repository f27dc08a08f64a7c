"""The variants on real GPUs, in bf16: at most twice the error of one GPU's kernel."""

from itertools import accumulate

import pytest

from attention.masks.band import Band
from attention.variants.registry import VARIANTS
from runner.config.variants import PACKED
from tests.jobs import decodes, masks, numerics
from tests.support import coverage as geometry
from tests.support.gpus import need_one, worlds

pytestmark = [pytest.mark.gpu, need_one]
WORLDS = worlds(1, 2, 4, 8)


SELF_ATTENTION = [name for name, v in VARIANTS.items() if not v.decode and name != "grouped"]
OPTIONS = {
    "zigzag_llama3": [{}, {"own_first": False}, {"grouping": "packed"}, {"grouping": "fused"}],
    "usp": [{}, {"ring": "contiguous"}],
}


def cases(name, world, options):
    tokens = 512 * world
    base = {"tokens": tokens, "heads": 8, "kv_heads": 8, "head_dim": 128, "causal": True}
    packs = [0, 64 * world, 320 * world, 512 * world]
    many = [8 * world * n for n in accumulate((1, 3, 2, 1, 1, 2, 1, 4, 1, 2, 1, 45), initial=0)]
    found = [
        base,
        base | {"kv_heads": 1},
        base | {"kv_heads": 2, "packs": packs},
        base | {"kv_heads": 2, "packs": many},
        base | {"head_dim": 80, "batch": 3, "scale": 0.2},
        base | {"causal": False},
        base | {"window": (300, 0)},
        base | {"window": (700, 0), "packs": packs},
    ]
    return [case for case in found if does(name, case, options)]


def does(name, case, options):
    if options.get("grouping") == "fused" and case["head_dim"] == 80:
        return False
    return geometry.does(VARIANTS[name], Band.of(case["causal"], case.get("window", (-1, -1))), options)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("kernel", ("auto", "flash2"))
@pytest.mark.parametrize(
    ("name", "options"), [(name, each) for name in SELF_ATTENTION for each in OPTIONS.get(name, [{}])], ids=str
)
def test_error_stays_within_twice_that_of_one_gpu(in_world, name, options, kernel, world):
    every = cases(name, world, options)
    for found in in_world(
        numerics.compare, world, "cuda", name=name, options=options, cases=every, dtype="bf16", kernel=kernel
    ):
        for ours, local in zip(found["errors"], found["local"], strict=True):
            assert ours < 2 * local + 1e-6, found


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", SELF_ATTENTION)
def test_unshard_inverts_shard(in_world, name, world):
    assert in_world(numerics.round_trip, world, "cuda", name=name, packs=None, tokens=12 * world)


REDUCTIONS = ("three", "two", "packed", "fused", None)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(
    ("name", "options"), [*(("tree", {"reduce": r}) for r in REDUCTIONS), ("ring_decode", {})], ids=str
)
def test_a_decode_stays_within_twice_the_error_of_one_gpu(in_world, name, options, world):
    base = {"batch": 2, "queries": 1, "keys": 8192, "heads": 32, "kv_heads": 8, "head_dim": 128}
    odd = base | {"queries": 4, "keys": 3001, "kv_heads": 1}
    empty = base | {"batch": 1, "keys": 2, "head_dim": 64}
    for _ in range(3):  # the fused reduction's two slots are used in turn
        for found in in_world(
            numerics.decode, world, "cuda", name=name, options=options, cases=[base, odd, empty], dtype="bf16"
        ):
            assert found["error"] < 2 * found["local"] + 1e-6, found
            assert found["lse"] < 1e-2, found


RAGGED = {"batch": 5, "queries": 1, "keys": 3000, "heads": 8, "kv_heads": 2, "lengths": [0, 1, 1499, 3000, 700]}


@pytest.mark.parametrize("world", WORLDS)
def test_decodes_with_lengths_windows_sinks_softcap_and_prefixes_match_fp64(in_world, world):
    """With the lengths on the GPU, which the kernel reads there, and by another kernel."""
    cases = [
        RAGGED | {"tensor": True},
        RAGGED | {"queries": 3, "causal": True, "sinks": True, "tensor": True},
        RAGGED | {"queries": 3, "window": (900, 0), "sinks": True, "softcap": 2.0, "value_dim": 24},
        RAGGED | {"lengths": None, "queries": 4, "causal": True, "value_dim": 8},
        RAGGED | {"prefix": 777, "sinks": True, "tensor": True},
    ]
    settings = [*(("tree", {"reduce": r}) for r in REDUCTIONS), ("ring_decode", {}), ("tree", {"kernel": "math"})]
    for found in in_world(decodes.compare, world, "cuda", settings=settings, cases=cases, dtype="bf16"):
        assert all(out < 3e-2 and lse < 1e-2 for out, lse, _ in found["errors"]), found


MASKS = [
    {"name": "documents", "lengths": [5, 300, 1, 128, 78]},
    {"name": "global_window", "window": 150, "global_tokens": 64, "causal": True},
    {"name": "dca", "window": 256, "global_tokens": 128, "random": 128, "causal": True, "seed": 3},
    {"name": "block_sparse", "pattern": "dilated_sparse", "causal": True},
    {"name": "shared_prompt", "prompt": 200, "answers": [100, 112, 100]},
]


def scaled(mask, world):
    """The same mask for 512 tokens a rank."""
    given = {key: [n * world for n in mask[key]] for key in ("lengths", "answers") if key in mask}
    return mask | given | ({"prompt": mask["prompt"] * world} if "prompt" in mask else {})


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", [name for name in SELF_ATTENTION if VARIANTS[name].any_mask])
def test_masks_match_fp64(in_world, name, world):
    """By the kernel that auto takes, with head dims of which tile lists take one, and by FlashAttention-2's."""
    packs = [0, 256 * world, 512 * world] if name in PACKED else None
    given = [scaled(mask, world) for mask in MASKS]
    for kernel, head_dim in (("auto", 128), ("auto", 80), ("flash2", 64)):
        for found in in_world(
            masks.compare, world, "cuda", name=name, options={}, masks=given, tokens=512 * world, packs=packs,
            heads=(8, 2 if world < 3 else world), head_dim=head_dim, dtype="bf16", kernel=kernel,
        ):  # fmt: skip
            forward, *backward = found["errors"]
            assert forward < 5e-3 and max(backward) < 1e-2 and found["lse"] < 1e-2, (found, kernel, head_dim)


EXTRAS = (
    ({"sinks": True, "head_dim": 64}, "auto"),
    ({"sinks": True, "softcap": 5.0, "head_dim": 128}, "auto"),
    ({"v_head_dim": 128, "head_dim": 192}, "auto"),
    ({"v_head_dim": 64, "head_dim": 128, "sinks": True}, "flash2"),  # values padded
)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", SELF_ATTENTION)
def test_sinks_softcap_and_value_heads_match_fp64(in_world, name, world):
    packs = [0, 256 * world, 512 * world] if name in PACKED else None
    for given, kernel in EXTRAS:
        (found,) = in_world(
            masks.compare, world, "cuda", name=name, options={}, masks=[{"name": "causal"}], tokens=512 * world,
            packs=packs, heads=(8, 2 if world < 3 else world), dtype="bf16", kernel=kernel, **given,
        )  # fmt: skip
        assert "refused" not in found, (found, given, kernel)
        forward, *backward = found["errors"]
        assert forward < 5e-3 and max(backward) < 1e-2 and found["lse"] < 1e-2, (found, given, kernel)
