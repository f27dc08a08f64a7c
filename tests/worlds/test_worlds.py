"""The variants over real gloo worlds, forward and backward, against fp64."""

import itertools

import pytest

from attention.geometry.counts import Shapes
from attention.masks.band import Band
from attention.variants.registry import VARIANTS
from runner.costs import dry_run
from tests.jobs import groups, numerics, traffic, training
from tests.support import coverage as geometry
from tests.support.coverage import ANY_LENGTHS

WORLDS = (1, 2, 3, 4)
WITH_DECODES = [name for name in VARIANTS if name != "grouped"]
SELF_ATTENTION = [name for name in WITH_DECODES if not VARIANTS[name].decode]


def options(name, world):
    """The variant's options, each way that changes what is computed where."""
    return {
        "ring_allgather": [{}, {"heads_k_stride": 1}],
        "llama3": [{}, {"heads_k_stride": 1}],
        "zigzag_llama3": [
            {},
            {"own_first": False},
            {"own_first": True, "heads_k_stride": 1},
            {"heads_k_stride": 1},
            {"grouping": "packed"},
        ],
        "usp": [{}, {"ulysses_size": 1}, {"ulysses_size": world}, {"ring": "contiguous"}],
    }.get(name, [{}])


def cases(name, world, chosen):
    tokens = 24 * world
    shard = tokens // world
    heads, kv_heads = (24, 3) if world == 3 else (16, 2)  # 8:1, and heads that every world divides
    base = {"tokens": tokens, "heads": heads, "kv_heads": kv_heads, "head_dim": 32, "causal": True}
    packs = [0, 2 * world, 12 * world, 24 * world]
    found = [
        base,
        base | {"kv_heads": heads},
        base | {"kv_heads": 1, "packs": packs, "scale": 0.3},
        base | {"packs": [0, tokens]},
        base | {"head_dim": 80, "batch": 3, "scale": 0.2},
        base | {"head_dim": 96, "kv_heads": 1, "batch": 1},
        base | {"causal": False},
        base | {"causal": False, "packs": packs},
        *(base | {"window": (left, 0)} for left in (shard // 2, shard, 2 * shard + 3)),
        base | {"window": (5, 7), "causal": False},
        base | {"window": (shard // 3, 0), "packs": packs},
    ]
    if world == 2 and name in ("zigzag_varlen", "zigzag_llama3"):  # more stretches than are done one by one
        found.append(base | {"packs": list(range(0, tokens + 1, 4))})
    if name in ANY_LENGTHS:  # sequences of one token, and across rank borders
        odd = [0, 1, 2, tokens // 2 + 1, tokens // 2 + 2, tokens]
        found += [
            base | {"packs": odd},
            base | {"packs": odd, "causal": False},
            base | {"packs": odd, "window": (4, 0)},
        ]
    return [case for case in found if does(name, case, chosen)]


def does(name, case, chosen):
    """Whether the variant is for the case's mask; that it refuses others is tested with the schedules."""
    return geometry.does(VARIANTS[name], Band.of(case["causal"], case.get("window", (-1, -1))), chosen)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", SELF_ATTENTION)
def test_variant_matches_fp64(in_world, name, world):
    for chosen in options(name, world):
        for found in in_world(numerics.compare, world, name=name, options=chosen, cases=cases(name, world, chosen)):
            forward, *backward = found["errors"]
            assert forward < 1e-6, found
            assert max(backward) < 1e-5, found
            assert found["lse"] < 1e-5, found


# lengths of a packed batch's sequences in a world of eight: of one token, or with chunks of one token; 16 for the others
SHORTEST = {"dense": 1, "llama3": 1, "ulysses": 1, "usp": 4, "ring": 8, "ring_varlen": 8, "stripe": 8}


@pytest.mark.parametrize("name", SELF_ATTENTION)
def test_variant_matches_fp64_in_a_world_of_eight(in_world, name):
    base = {"tokens": 64, "heads": 8, "kv_heads": 2, "head_dim": 16, "causal": True, "batch": 1}
    short = SHORTEST.get(name, 16)
    packs = [0, short, 64 - short, 64]
    every = [base, base | {"packs": packs}, base | {"packs": packs, "window": (11, 0)}]
    for chosen in [{}, {"own_first": False}, {"own_first": True}] if name == "zigzag_llama3" else [{}]:
        some = [case for case in every if does(name, case, chosen)]
        for found in in_world(numerics.compare, 8, name=name, options=chosen, cases=some):
            assert found["errors"][0] < 1e-6, found
            assert max(found["errors"][1:]) < 1e-5, found
            assert found["lse"] < 1e-5, found


# sequences enough that their tokens are taken, put and summed by number, and gathered keys lie by owner
MANY = [0, *itertools.accumulate((8, 24, 16, 8, 8, 16, 8, 32, 8, 16, 8, 24))]
OF_PACKS = [
    ("ring_varlen", {}),
    ("zigzag_varlen", {}),
    ("stripe", {}),
    ("llama3", {}),
    ("zigzag_llama3", {}),
    ("zigzag_llama3", {"grouping": "packed", "heads_k_stride": 1}),
    ("zigzag_llama3", {"own_first": True}),
    ("ulysses", {}),
    ("usp", {"ulysses_size": 2}),
]


@pytest.mark.parametrize(("name", "options"), OF_PACKS, ids=str)
def test_packed_batches_of_many_sequences_match_fp64(in_world, name, options):
    case = {"tokens": MANY[-1], "heads": 8, "kv_heads": 4, "head_dim": 16, "causal": True, "batch": 1, "packs": MANY}
    windowed = [case | {"window": (9, 0)}] if does(name, case | {"window": (9, 0)}, options) else []
    sent = ["gloo"] if name.startswith("zigzag") and not options else []
    for transport in ("symm", *sent):
        for found in in_world(
            numerics.compare, 4, name=name, options=options, cases=[case, *windowed], transport=transport
        ):
            assert found["errors"][0] < 1e-6, found
            assert max(found["errors"][1:]) < 1e-5, found
            assert found["lse"] < 1e-5, found


@pytest.mark.parametrize("transport", ("gloo", "symm"))
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("ulysses", {}),
        ("usp", {"ulysses_size": 2}),
        ("ring", {}),
        ("zigzag", {}),
        ("stripe", {}),
        ("zigzag_varlen", {}),
    ],
)
def test_heads_in_parts_match_fp64(in_world, name, options, transport):
    base = {"tokens": 64, "heads": 16, "kv_heads": 8, "head_dim": 16, "causal": True}
    every = [base, base | {"packs": [0, 16, 64]}, base | {"batch": 1}]
    for found in in_world(
        numerics.compare, 4, name=name, options=options | {"head_parts": 2}, cases=every, transport=transport
    ):
        assert found["errors"][0] < 1e-6, found
        assert max(found["errors"][1:]) < 1e-5, found
        assert found["lse"] < 1e-5, found


@pytest.mark.parametrize("how", ("separate", "packed", "fused"))
def test_grouped_chunks_match_fp64(in_world, how):
    base = {"tokens": 48, "heads": 4, "kv_heads": 2, "head_dim": 64, "causal": True, "batch": 2, "scale": 0.2}
    for n in (2, 3, 8):
        for found in in_world(
            numerics.compare, 1, name="grouped", options={"n_groups": n, "grouping": how}, cases=[base]
        ):
            assert found["errors"][0] < 1e-6, found
            assert max(found["errors"][1:]) < 1e-5, found


def test_the_fused_grouping_matches_fp64(in_world):
    packs = [0, 8, 40, 48]
    base = {"tokens": 48, "heads": 4, "kv_heads": 2, "head_dim": 64, "causal": True, "batch": 2}
    for found in in_world(numerics.compare, 2, name="zigzag_llama3", options={"grouping": "fused"},
                          cases=[base, base | {"packs": packs, "scale": 0.2}]):  # fmt: skip
        assert found["errors"][0] < 1e-6, found
        assert max(found["errors"][1:]) < 1e-5, found


@pytest.mark.parametrize("world", (1, 2, 4))
@pytest.mark.parametrize("name", SELF_ATTENTION)
def test_bf16_error_stays_near_that_of_one_local_call(in_world, name, world):
    case = {"tokens": 64 * world, "heads": 8, "kv_heads": 2, "head_dim": 64, "causal": True}
    (found,) = in_world(numerics.compare, world, name=name, options={}, cases=[case], dtype="bf16")
    for ours, local in zip(found["errors"], found["local"], strict=True):
        assert ours < 2 * local, found


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", SELF_ATTENTION)
def test_unshard_inverts_shard(in_world, name, world):
    assert in_world(numerics.round_trip, world, name=name, packs=None, tokens=12 * world)
    assert in_world(numerics.round_trip, world, name=name, packs=[0, 2 * world, 8 * world], tokens=8 * world)


@pytest.mark.parametrize("name", SELF_ATTENTION)
def test_activation_checkpointing_gives_the_same_gradients(in_world, name):
    assert in_world(training.checkpointed, 2, name=name) < 1e-6


@pytest.mark.parametrize("name", ["zigzag", "zigzag_llama3", "ulysses"])
def test_a_rank_without_a_gradient_does_its_share_of_the_others(in_world, name):
    assert in_world(training.without_a_gradient, 2, name=name) < 1e-6


@pytest.mark.parametrize("name", WITH_DECODES)
def test_works_inside_a_subgroup(in_world, name):
    assert in_world(groups.subgroup, 4, name=name) < 1e-6


@pytest.mark.parametrize("name", WITH_DECODES)
def test_works_inside_each_dimension_of_a_device_mesh(in_world, name):
    assert max(in_world(groups.mesh, 4, name=name)) < 1e-6


# a ring, a gather and an all-to-all; the compiler sees no more of the others
WITH_AOT = {"zigzag", "ring_allgather", "ulysses"}


@pytest.mark.parametrize("name", WITH_DECODES)
def test_a_compiled_model_around_it_gives_the_same_with_one_break_and_no_warning(in_world, name):
    found = in_world(training.compiled, 2, name=name, backend="aot_eager" if name in WITH_AOT else "eager")
    assert found["error"] < 1e-5
    assert found["graphs"] == [["mul", "tanh"], ["relu", "add"]]
    assert found["warnings"] == []


def test_a_compiled_model_may_shard_and_unshard_within(in_world):
    found = in_world(training.compiled, 2, name="zigzag", inside=True)
    assert found["error"] < 1e-5
    assert [name for names in found["graphs"] for name in names] == ["mul", "tanh", "relu", "add"]
    assert found["warnings"] == []


def test_dropout_is_refused_with_the_way_out():
    import torch

    import attention

    x = torch.zeros(1, 4, 2, 8)
    with pytest.raises(ValueError, match=r"dropout=0.1: not supported; use dropout=0"):
        attention.make("ring")(x, x, x, dropout=0.1)
    with pytest.raises(ValueError, match=r"dropout_p=0.1: dropout is not supported by any variant; leave it out"):
        attention.make("ring", dropout_p=0.1)


MASKS = ((True, (-1, -1)), (False, (-1, -1)), (True, (9, 0)), (False, (3, 11)))


@pytest.mark.slow
@pytest.mark.parametrize("name", SELF_ATTENTION)
def test_transports_move_the_bytes_that_the_costs_say(in_world, name):
    assert_bytes(in_world, name, 1, {}, True, (-1, -1))
    for world, transport in ((3, "gloo"), (4, "symm")):  # packed batches; test_symmetric.py has single sequences
        packs = [[0, 2 * world, 8 * world]]
        if name in ANY_LENGTHS:
            packs.append([0, 1, 5, 5 * world + 1, 8 * world])
        for chosen, (causal, window) in itertools.product(options(name, world), MASKS):
            if not does(name, {"causal": causal, "window": window}, chosen):
                continue
            assert_bytes(in_world, name, world, chosen, causal, window)
            for pack in packs if causal else []:
                assert_bytes(in_world, name, world, chosen, causal, window, pack, transport)
    if VARIANTS[name].packs:
        assert_bytes(in_world, name, 4, {}, True, (-1, -1), MANY, "symm")


def assert_bytes(in_world, name, world, chosen, causal, window, packs=None, transport="gloo"):
    variant, tokens, heads = (
        VARIANTS[name],
        packs[-1] if packs else 8 * world,
        {"heads": 12, "kv_heads": 2 if world == 4 else 3},
    )
    counted = in_world(traffic.counted, world, name=name, options=chosen, causal=causal, window=list(window), tokens=tokens,
                       batch=2, packs=packs, transport=transport, **heads)  # fmt: skip
    problem = variant.problem(tuple(packs or (0, tokens)), world, Band.of(causal, window), chosen)
    shapes = Shapes(batch=1 if packs else 2, head_dim=16, itemsize=4, **heads)
    for rank, found in enumerate(counted):
        passes = dry_run(
            variant, problem, shapes, chosen, rank=rank, pulls=transport == "symm", packed=bool(packs), backward=True
        )
        for which, said in zip(("forward", "backward"), (x.received for x in passes), strict=True):
            case = world, chosen, causal, window, packs, transport, rank, which
            assert {k: v for k, v in found[which].items() if v} == {k: v for k, v in said.items() if v}, case


def test_phases_name_transfers_and_waits_apart(in_world):
    assert {"comp_block", "comp_merge", "comm_kv", "wait_kv", "comm_dkv", "wait_dkv"} <= set(
        in_world(training.phase_names, 2, name="zigzag")
    )


def test_parts_that_do_not_divide_a_ranks_heads_are_refused():
    with pytest.raises(ValueError, match=r"head_parts=3: must divide a rank's 4 KV heads; it may be \[1, 2, 4\]"):
        VARIANTS["ulysses"].parse({"head_parts": 3}).check(8, 8, 2)
