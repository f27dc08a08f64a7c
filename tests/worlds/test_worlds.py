"""How functions are used: in groups and meshes, compiled, with gradients that some ranks lack."""

import pytest

from attention.variants.registry import VARIANTS
from tests.jobs import groups, numerics, training

SELF_ATTENTION = [name for name, v in VARIANTS.items() if not v.decode and name != "grouped"]
EACH_EXCHANGE = ["zigzag", "zigzag_llama3", "ulysses"]
WITH_A_DECODE = [*EACH_EXCHANGE, "tree"]


def test_unshard_inverts_shard_for_token_ids_and_in_its_gradient(in_world):
    assert all(in_world(numerics.round_trip, 3, names=SELF_ATTENTION, tokens=36))


@pytest.mark.parametrize("name", EACH_EXCHANGE)
def test_a_rank_without_a_gradient_does_its_share_of_the_others(in_world, name):
    assert in_world(training.without_a_gradient, 2, name=name) < 1e-6


@pytest.mark.parametrize("name", WITH_A_DECODE)
def test_works_inside_each_dimension_of_a_device_mesh(in_world, name):
    assert in_world(groups.mesh, 4, name=name) == [[None, None]] * 4


def test_two_groups_pull_at_once(in_world):
    assert in_world(groups.two_groups, 4, transport="symm") < 1e-6


COMPILED = [  # what a call may have
    {}, {"window": (5, 0), "scale": 0.3}, {"chunk": 4}, {"recompute": True, "with_sinks": True, "softcap": 5.0}, {"padding": 3}
]  # fmt: skip


def test_a_call_is_an_operator_of_a_compiled_graph_which_keeps_nothing_after_its_backward(in_world):
    forms = [*COMPILED, {"documents": 2}]
    for form, result in zip(forms, in_world(training.compiled, 2, name="llama3", forms=forms), strict=True):
        assert result["error"] < 1e-5, form
        assert result["graphs"] == 4, form  # a shape, and all others; with gradients and without
        assert result["kept"] == 0, form
        assert result["warnings"] == [], form


@pytest.mark.nightly
def test_the_compiler_does_not_reuse_the_memory_of_what_a_backward_needs(in_world):
    (result,) = in_world(training.compiled, 2, name="zigzag", forms=[{"backend": "inductor"}], timeout_s=300.0)
    assert result["error"] < 1e-5


@pytest.mark.parametrize("name, form", [("tree", {}), ("zigzag", {"inside": True})])
def test_a_decode_and_sharding_break_the_graph_without_a_warning(in_world, name, form):
    (result,) = in_world(training.compiled, 2, name=name, forms=[form])
    assert result["error"] < 1e-5
    assert result["warnings"] == []


def test_parts_that_do_not_divide_a_ranks_heads_are_refused():
    with pytest.raises(ValueError, match=r"head_parts=3: must divide a rank's 4 KV heads; it may be \[1, 2, 4\]"):
        VARIANTS["ulysses"].parse({"head_parts": 3}).check(8, 8, 2)
