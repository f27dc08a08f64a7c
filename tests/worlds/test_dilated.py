"""Dilated attention against its dense definition, alone and in worlds; its counts, refusals and switches."""

import pytest
import torch

import attention
from attention.geometry import counts
from attention.geometry.counts import Shapes
from attention.masks.band import CAUSAL, FULL
from attention.variants.registry import MIXTURES
from runner.costs import dry_run
from tests.support.cases import Case, assert_right
from tests.support.dilated import pairs_of_head, seen

SEGMENTS, RATES = [8, 16, 32], [1, 2, 4]
WAYS = [("head_groups", "joint"), ("longnet", "joint"), ("longnet", "detached")]
NAMES = ["dilated", "dilated_improved"]
PACKED = {"lengths": (16, 24, 20, 4)}


def case(name, world, way=WAYS[1], segments=SEGMENTS, rates=RATES, options=None, **more):
    options = {"segments": segments, "rates": rates, "mixing": way[0], "weights": way[1]} | (options or {})
    sizes = {
        "tokens": 64,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 8,
        "dtype": "fp64",
        "kernel": "math",
        "transport": "auto",
    }
    return Case(name, world, seed=1, options=options, **sizes | more)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_head_groups_are_divided_under_large_scores_too(dtype):
    k = torch.eye(16, dtype=dtype).view(1, 16, 1, 16).expand(-1, -1, 4, -1)
    v = torch.randn_like(k).requires_grad_()
    out = attention.make("dilated_improved", segments=[4, 8, 16, 16], rates=[1] * 4)(
        1e4 * k, k, v, causal=True, scale=1.0
    )
    (dv,) = torch.autograd.grad(out, v, k)
    torch.testing.assert_close(dv, k / 4, rtol=1e-6, atol=0)  # a query sees its own key alone


@pytest.mark.parametrize("way", WAYS)
def test_dilated_is_its_definition_forward_and_backward(pool, way):
    extras = {"softcap": 2.0, "value_dim": 4, "heads": 8}
    extras |= {"sinks": "fp64", "gradients": "qkvs"} if way[1] == "joint" else {}
    forms = [
        extras,
        {"heads": 6, "tokens": 23, "batch": 2, "causal": False},  # the last segment is shorter
        {"segments": [12, 12], "rates": [3, 4], "tokens": 48, "heads": 8, "kv_heads": 4},  # no pair has all tokens
        PACKED,
        {"options": {"pattern_cache": False, "memory_pool": True}},
        {"kernel": "auto", "dtype": "fp32", "tokens": 72, "batch": 2, "options": {"memory_pool": True}},
    ]
    assert_right(pool, [case(name, 1, way, **form) for name in NAMES for form in forms])


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_ring_dilated_is_its_definition_in_worlds(pool, world):
    cases = [case("ring_dilated", world, way, [8, 64], [2, 4], heads=6) for way in WAYS]
    # padded, within ranks and across
    cases += [case("ring_dilated", world, way, tokens=59, causal=False, pad=True) for way in WAYS[:2]]
    extras = {"heads": 8, "sinks": "fp64", "gradients": "qkvs", "softcap": 3.0, "value_dim": 4}
    cases += [case("ring_dilated", world, **PACKED, **extras)]
    assert_right(pool, cases + [case(name, world) for name in NAMES])


def test_the_bytes_that_ring_dilated_receives_do_not_grow_with_the_sequence():
    """That they are those of the dry run is tested with the metrics."""
    options = {"segments": [16, 64], "rates": [1, 4], "mixing": "longnet"}
    most = 2 * 2 * (16 + 64) * 4 * 8 * 4  # keys and values and their gradients, fp32
    variant, shapes = MIXTURES["ring_dilated"], Shapes(1, 4, 4, 8, 4)
    for tokens in (48, 192, 3072):
        problem = variant.problem((0, tokens), 2, CAUSAL, options)
        for rank in range(2):
            passes = dry_run(variant, problem, shapes, options, rank=rank, pulls=True, backward=True)
            received = sum(sum(x.received.values()) for x in passes)
            assert received <= most and (received > 0 or tokens > 64), (tokens, rank)  # ranks share a segment of 64


@pytest.mark.parametrize("mixing, mask", [("head_groups", CAUSAL), ("longnet", FULL)])
def test_pairs_and_flops_are_those_of_the_definition(mixing, mask):
    heads, cu = 6, (0, 24, 64)
    options = {"segments": SEGMENTS, "rates": RATES, "mixing": mixing}
    expected = sum(
        int(seen(cu, *pair, mask is CAUSAL).sum())
        for h in range(heads)
        for pair in pairs_of_head(h, heads, SEGMENTS, RATES, mixing)
    )
    shapes = Shapes(2, heads, 2, 8, 4)
    for name, world in (("dilated", 1), ("dilated_improved", 3), ("ring_dilated", 1), ("ring_dilated", 4)):
        problem = MIXTURES[name].problem(cu, world, mask, options)
        assert counts.head_pairs(problem, heads, 2) == expected
        by_rank = counts.rank_flops(problem, shapes)
        assert sum(by_rank) == 2 * 4 * 8 * expected * (world if name != "ring_dilated" else 1), (name, world)
        assert all(counts.kernel_bytes(problem, shapes, rank, True) > 0 for rank in range(world))


@pytest.mark.parametrize(
    "tokens, options, pairs",
    [
        (20, {"segments": [8, 32], "rates": [1, 2]}, "((8, 1), (20, 2))"),
        (65536, {}, "((2048, 1), (4096, 2), (8192, 4), (65536, 8))"),
    ],
)
def test_what_was_made_of_segments_is_noted(tokens, options, pairs):
    problem = MIXTURES["dilated"].problem((0, tokens), 1, CAUSAL, options)
    assert problem.schedule.note(problem) == f"pairs of segment and rate: {pairs}"


OPTIONS = {"segments": [8, 16], "rates": [1, 2]}


@pytest.mark.parametrize(
    "given, call, message",
    [
        ({"rates": [1, 16], "segments": [8, 8]}, {}, "segments=(8, 8): 8 is no multiple of its rate 16; 16 would work"),
        ({"segments": [], "rates": []}, {}, "segments=(), rates=(): give lists of one length, or neither"),
        ({"segments": 8}, {}, "segments=8: must be a list of whole numbers; give for instance segments=[100,900,24]"),
        ({"mixing": "sum"}, {}, "mixing=sum: known are head_groups, longnet"),
        ({"weights": "detached"}, {}, "weights=detached: mixing=head_groups has no weights; use mixing=longnet, or weights=joint"),
        ({}, {"heads": 1}, "heads=1: mixing=head_groups gives each of 2 segment lengths a group of heads; use at least 2 heads, or mixing=longnet"),
        ({}, {"window": (3, 0)}, "window=(3, 0): ring_dilated has no sliding window; llama3, ring, ring_allgather, stripe, ulysses, usp, zigzag and zigzag_llama3 do"),
        ({}, {"mask": attention.masks.chunked(8)}, "mask=chunked(chunk=8): ring_dilated takes full and causal attention only; balanced, llama3, ring, ring_allgather, stripe, ulysses, usp, zigzag and zigzag_llama3 take this"),
        ({}, {"cu_seqlens": [0, 3, 16]}, "cu_seqlens: a sequence begins at 3, between selected tokens; pad sequences to multiples of 2"),
        ({"mixing": "longnet", "weights": "detached"}, {"sinks": torch.zeros(4)},
         "sinks: with weights=detached they have no gradient of their own; use weights=joint"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_in_a_line(given, call, message):
    call = dict(call)
    heads = call.pop("heads", 4)
    shape = (16, heads, 8) if "cu_seqlens" in call else (1, 16, heads, 8)
    with pytest.raises(ValueError) as error:
        attention.make("ring_dilated", **(OPTIONS | given))(*(torch.randn(shape) for _ in range(3)), **call)
    assert str(error.value) == message


def test_a_world_of_one_takes_any_length():
    x = torch.randn(1, 13, 4, 8)
    fn, other = (attention.make(name, **(OPTIONS | {"rates": [2, 4]})) for name in ("ring_dilated", "dilated_improved"))
    assert torch.equal(fn(fn.shard(x), x, x, causal=True), other(x, x, x, causal=True))


def test_three_head_groups_do_not_bias_gradients_in_bf16():
    """The elements of dout are equal, so rounding dout / 3 would change all gradients by the same 0.1%."""
    fn = attention.make("dilated_improved", segments=SEGMENTS, rates=RATES)
    generator = torch.Generator().manual_seed(0)
    found = []
    for dtype in (torch.bfloat16, torch.float64):
        x = torch.randn(2, 128, 6, 16, generator=generator.manual_seed(0)).to(torch.bfloat16)
        q, k, v = (x.to(dtype, copy=True).requires_grad_() for _ in range(3))
        found.append(torch.autograd.grad(fn(q, k, v, causal=True).sum(), v)[0].double())
    ours, exact = found
    assert abs((ours * exact).sum() / (exact * exact).sum() - 1) < 4e-4
