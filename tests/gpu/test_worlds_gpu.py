"""The variants on real GPUs, in bf16, forward and backward, against fp64 (`tests.support.cases`)."""

import pytest

from attention.masks.band import Band
from attention.variants.registry import VARIANTS
from tests.support import coverage
from tests.support.cases import Case, assert_right
from tests.support.gpus import need_one, worlds

pytestmark = [pytest.mark.gpu, need_one]
WORLDS = worlds(1, 2, 4, 8)
SHARDED = [name for name, v in VARIANTS.items() if v.unsuitable(2, decode=False) is None and not v.alias_of]
OPTIONS = {
    "zigzag_llama3": [{}, {"own_first": False}, {"grouping": "packed"}, {"grouping": "fused"}],
}
MANY = (*[5] * 12, 4)


def masks(world):
    return [
        {"name": "documents", "lengths": [n * world for n in (5, 300, 1, 128, 78)]},
        {"name": "global_window", "window": 150, "global_tokens": 64, "causal": True},
        {"name": "dca", "window": 256, "global_tokens": 128, "random": 128, "causal": True, "seed": 3},
        {"name": "block_sparse", "pattern": "dilated_sparse", "causal": True},
        {"name": "shared_prompt", "prompt": 200 * world, "answers": [n * world for n in (100, 112, 100)]},
    ]


def cases(name, world, chosen):
    variant = VARIANTS[name]
    packs = tuple(n * world for n in (64, 256, 192))
    calls = [
        {"kv_heads": 8},
        {"kv_heads": world if world > 2 else 1, "batch": 2},
        {"lengths": packs},
        {"lengths": tuple(8 * world * n for n in MANY)},
        {"head_dim": 80, "batch": 3, "scale": 0.2},
        {"causal": False},
        {"window": (300, 0)},
        {"window": (700, 0), "lengths": packs},
        {"kernel": "flash2", "lengths": packs},
        {"sinks": "fp32", "head_dim": 64, "gradients": "qkvs"},
        {"sinks": "fp32", "softcap": 5.0, "gradients": "qkvs"},
        {"head_dim": 192, "value_dim": 128},
        {"head_dim": 128, "value_dim": 64, "sinks": "fp32", "kernel": "flash2"},  # values padded
    ]
    if variant.any_mask and not chosen:
        calls += [{"masks": (mask,), "head_dim": dim} for mask in masks(world)[1:4] for dim in (128, 80)]
        calls += [{"masks": (mask,), "causal": variant.causal_only} for mask in masks(world)[::4]]
    common = {"heads": 8, "kv_heads": 2 if world < 3 else world, "head_dim": 128, "dtype": "bf16", "transport": "auto"}
    made = [
        Case(name, world, 512 * world, seed=i, options=chosen, **{**common, **call}) for i, call in enumerate(calls)
    ]
    return [
        case
        for case in made
        if coverage.does(variant, Band.of(case.causal, case.window), chosen)
        and not (chosen.get("grouping") == "fused" and (case.head_dim != 128 or case.sinks or case.value_dim))
    ]


def test_dense_matches_fp64(pool):
    assert_right(pool, cases("dense", 1, {}), "cuda")


@pytest.mark.parametrize("world", WORLDS[1:])
@pytest.mark.parametrize(
    ("name", "options"), [(name, each) for name in SHARDED for each in OPTIONS.get(name, [{}])], ids=str
)
def test_variant_matches_fp64(pool, name, options, world):
    assert_right(pool, cases(name, world, options), "cuda")


REDUCTIONS = ("three", "two", "packed", "fused", None)
LENGTHS = (0, 1, 1499, 3000, 700)
DECODES = [
    {"tokens": 8192, "heads": 32, "kv_heads": 8, "head_dim": 128, "batch": 2},
    {"tokens": 3001, "queries": 4, "batch": 2},
    {"tokens": 2, "kv_heads": 8},
    *[{"kv_lengths": LENGTHS}] * 3,  # on the GPU and on the host; the fused reduction's two slots are used in turn
    {"kv_lengths": LENGTHS, "queries": 3, "causal": True, "sinks": "fp32"},
    {"kv_lengths": LENGTHS, "queries": 3, "window": (900, 0), "sinks": "fp32", "softcap": 2.0, "value_dim": 24},
    {"kv_lengths": LENGTHS, "prefix": 777, "sinks": "fp32"},
]


@pytest.mark.gpu_smoke
@pytest.mark.parametrize("world", WORLDS)
def test_decode_matches_fp64(pool, world):
    common = {"heads": 8, "kv_heads": 2, "head_dim": 64, "dtype": "bf16", "transport": "auto", "causal": False}
    common |= {"gradients": "", "tokens": 3000, "queries": 1}
    every = [
        Case(name, world, seed=i, options=chosen, **{**common, **call, "batch": 5 if "kv_lengths" in call else 1})
        for name, chosen in [*(("tree", {"reduce": r}) for r in REDUCTIONS), ("ring_decode", {})]
        for i, call in enumerate(DECODES)
    ]
    assert_right(pool, every, "cuda")
