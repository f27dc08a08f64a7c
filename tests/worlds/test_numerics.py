"""Every variant in real gloo worlds, forward and backward, against fp64. `tests.support.cases` has the calls and the reference."""

from typing import Any

import pytest

from attention.masks.band import Band
from attention.variants.registry import VARIANTS
from runner.config.rules.attention import PACKED
from tests.support import coverage
from tests.support.cases import Case, assert_right

SELF_ATTENTION = [name for name, variant in VARIANTS.items() if not variant.decode and name != "grouped"]
MASKS: list[dict[str, Any]] = [
    {"name": "documents", "lengths": [5, 1, 30, 12], "inner": [-1, 0]},
    {"name": "block_sparse", "pattern": "dilated_sparse", "block": 4, "causal": True},
    {"name": "global_window", "window": 9, "global_tokens": 6},  # two-sided
    {"name": "prefix_lm", "prefix": 20},
]


def options(name: str, world: int) -> list[dict[str, Any]]:
    """The variant's options, each way that changes what is computed where."""
    return {
        "ring_allgather": [{}, {"heads_k_stride": 1}],
        "llama3": [{}, {"heads_k_stride": 1}],
        "zigzag_llama3": [
            {},
            {"own_first": False},
            {"own_first": True, "heads_k_stride": 1},
            {"grouping": "packed", "heads_k_stride": 1},
        ],
        "ulysses": [{}, {"head_parts": 2}],
        "ring": [{}, {"head_parts": 2}],
        "usp": [{"ulysses_size": world, "head_parts": 2}, {"ulysses_size": world // 2 or 1}, {"ring": "contiguous"}],
    }.get(name, [{}])


def cases(name: str, world: int, chosen: dict[str, Any], transport: str) -> list[Case]:
    """Calls that differ in what the library does: lengths, heads, masks, extras, strides, dtypes, gradients."""
    variant, tokens = VARIANTS[name], 24 * world
    parts = "head_parts" in chosen
    heads = {"heads": 4 * world, "kv_heads": 2 * world} if parts else {"heads": 12, "kv_heads": 6}
    packs, odd = (2 * world, 10 * world, 12 * world), (1, 1, tokens // 2 - 1, 1, tokens // 2 - 2)
    many = [2 * world * n for n in (1, 3, 2, 1, 1, 2, 1, 4, 1, 2, 1, 3)]
    shard, strided = tokens // world, ("strided_dim", "heads_first", "expanded_heads", "offset")
    calls: list[dict[str, Any]] = [
        {"layouts": strided, "batch": 2},
        {"causal": False, "head_dim": 40, "batch": 3, "scale": -0.2, "gradients": "kv"},
        {"lengths": packs, "sinks": "fp32", "softcap": 2.0, "value_dim": 8, "gradients": "qkvs"},
        {"lengths": packs, "causal": False, "dtype": "bf16"},
        {"lengths": (tokens,), "sinks": "fp32", "gradients": "qs"},
        *({"window": (left, 0)} for left in (shard // 2, 2 * shard + 3)),
        {"window": (5, 7), "causal": False, "value_dim": 24, "scale": 0},
        {"lengths": packs, "window": (shard // 3, 0)},
        {"lengths": many, "tokens": sum(many)},  # by number, and gathered keys lie by owner
        {"lengths": many, "tokens": sum(many), "window": (9, 0)},
        {"tokens": 13, "pad": True, "dtype": "fp64", "kv_heads": heads["kv_heads"] if parts else 1},
    ]
    if name in coverage.ANY_LENGTHS:  # sequences of one token, and across rank borders
        calls += [{"lengths": odd}, {"lengths": odd, "window": (4, 0)}]
    if (
        name in ("ulysses", "usp") and not parts
    ):  # heads that the ranks do not divide, KV heads among fewer and more ranks
        odd_heads = [(5, 5), (7, 1), (9, 3), (10, 2)]
        calls += [
            {"heads": h, "kv_heads": n, "lengths": packs, "sinks": "fp32", "gradients": "qkvs"} for h, n in odd_heads
        ]
        calls.append({"heads": 5, "kv_heads": 5, "tokens": 13, "pad": True, "scale": -0.3, "batch": 2})
    if variant.any_mask and not {"head_parts", "own_first", "grouping"} & chosen.keys():
        calls.append({"tokens": 13, "pad": True, "lengths": (3, 0, 8, 2), "dtype": "fp64"})
        masks = MASKS[:2] if variant.causal_only or "contiguous" not in chosen.get("ring", "contiguous") else MASKS
        calls += [
            {"masks": (mask,), "causal": variant.causal_only, "batch": 2, "tokens": 48, "sinks": "fp32"}
            for mask in masks
            if 48 % (2 * world) == 0
        ]
    common = {"head_dim": 16, "options": chosen, "transport": transport, **heads}
    if name in PACKED:
        calls = [{"lengths": (call.get("tokens", tokens),), **call, "batch": 1} for call in calls]
    made = [Case(name, world, **{"tokens": tokens, "seed": i, **common, **call}) for i, call in enumerate(calls)]
    return [case for case in made if does(case)]


def does(case: Case) -> bool:
    """Whether the variant is for the case's mask; that it refuses others is tested with the schedules."""
    return coverage.does(VARIANTS[case.variant], Band.of(case.causal, case.window), case.options)


# 2: every option; 3: rings of several steps, lengths that divide by no power of two; 4: all-to-all within a ring
WORLDS = [(1, "auto"), (2, "gloo"), (2, "symm"), (3, "gloo"), (3, "symm"), (4, "symm")]


@pytest.mark.parametrize(("world", "transport"), WORLDS)
@pytest.mark.parametrize("name", SELF_ATTENTION)
def test_variant_matches_fp64(pool, name, world, transport):
    every = options(name, world)
    if world == 4:
        every = [{"ulysses_size": 2}] if name == "usp" else []
    elif (world, transport) != (2, "gloo"):
        every = [x for x in every if "ulysses_size" not in x][:1]
    elif name == "usp":
        every = every[:1] + every[2:]
    assert_right(pool, [x for chosen in every for x in cases(name, world, chosen, transport)])


@pytest.mark.parametrize("how", ("separate", "packed", "fused"))
def test_grouped_chunks_match_fp64(pool, how):
    base = {"head_dim": 64, "seed": 1, "batch": 2, "scale": 0.2, "transport": "auto"}
    every = [Case("grouped", 1, 48, 4, 2, options={"n_groups": n, "grouping": how}, **base) for n in (2, 3, 8)]
    if how == "fused":
        fused = {"options": {"grouping": "fused"}, "head_dim": 64, "seed": 1}
        every += [Case("zigzag_llama3", 2, 48, 4, 2, lengths=x, **fused) for x in (None, (8, 32, 8))]
    assert_right(pool, every)


DECODES = [("tree", {"reduce": how}) for how in ("three", "two", "packed")] + [("ring_decode", {})]
LENGTHS = (0, 1, 7, 20, 20, 37, 3)
DECODED: list[dict[str, Any]] = [
    {"tokens": 37, "queries": 1, "head_dim": 40, "scale": 0.2},  # the last shard is short
    {"tokens": 5, "queries": 1, "kv_heads": 2},  # in larger worlds the last shard is empty
    {"tokens": 1, "queries": 3, "batch": 1},  # all shards but the first are
    {"tokens": 48, "queries": 1, "window": (9, 0)},  # whose keys lie on the last ranks
    {"tokens": 37, "queries": 5, "kv_heads": 2, "causal": True},  # a shard ends among the last keys
    {"tokens": 3, "queries": 6, "causal": True, "window": (1, 5)},  # the first queries see no key
    {"tokens": 37, "queries": 1, "batch": 7, "kv_lengths": LENGTHS, "window": (6, 0)},
    {"tokens": 37, "queries": 3, "batch": 7, "kv_lengths": LENGTHS, "causal": True, "sinks": "fp32"},
    {"tokens": 37, "queries": 1, "batch": 7, "kv_lengths": (0,) * 7, "sinks": "fp32", "value_dim": 8},
    {"tokens": 37, "queries": 4, "sinks": "fp32", "causal": True, "window": (11, 0), "softcap": 1.5, "value_dim": 24},
    {"tokens": 37, "queries": 1, "batch": 7, "kv_lengths": LENGTHS, "prefix": 21, "sinks": "fp32"},
    {"tokens": 37, "queries": 3, "prefix": 3, "causal": True, "dtype": "bf16"},
]


@pytest.mark.parametrize(("world", "transport"), [(1, "auto"), (2, "gloo"), (3, "symm")])
def test_decode_matches_fp64(pool, world, transport):
    common = {"heads": 4, "kv_heads": 1, "head_dim": 16, "causal": False, "gradients": "", "transport": transport}
    every = [
        Case(name, world, seed=i, options=chosen, **{**common, **call})
        for name, chosen in DECODES
        for i, call in enumerate(DECODED)
    ]
    assert_right(pool, every)
