"""Softcap and value heads of another size on a CPU, against plain fp64 attention with gradients."""

import pytest
import torch

from attention.kernels import KERNELS, Call, Kernel, Shape
from attention.kernels.patterns import ForPatterns
from attention.masks.band import CAUSAL, FULL, Band
from tests.support.naive import assert_matches, assert_split_matches, inputs
from tests.support.patterns import PATTERNS

torch.set_num_threads(1)

MASKS = [FULL, CAUSAL, Band(7, 0), Band(5, 9)]
SIZES = [(33, 33), (17, 50), (50, 17)]
PACK = ((1, 19, 8, 4, 0, 1), (1, 7, 23, 0, 5, 12))
FORMS = [(16, 16, 0.7), (24, 16, None), (16, 24, None), (24, 8, 0.7)]  # (D, Dv, softcap)

every_form = pytest.mark.parametrize("head_dim, v_head_dim, softcap", FORMS, ids=str)
every_mask = pytest.mark.parametrize("mask", MASKS, ids=Band.describe)


def given(mask: Band, sizes, head_dim: int, v_head_dim: int, softcap: float | None, dtype=torch.float64):
    """(q, k, v, dout, call) with scores of the order of 1, so that the softcap bends them."""

    def call_of(q_lengths=None, k_lengths=None) -> Call:
        call = Call(0.6, mask, softcap=softcap)
        return call if q_lengths is None else call.of_packed(mask, q_lengths, k_lengths, torch.device("cpu"))

    return inputs(call_of, sizes, 4, 2, head_dim, dtype, v_head_dim=v_head_dim)


def on_cpu(head_dim: int, v_head_dim: int, softcap: float | None) -> list[Kernel]:
    """The kernels that can do the form."""
    return [KERNELS["math"]]


@every_form
@every_mask
def test_softcap_and_value_heads_of_another_size_match_plain_attention(head_dim, v_head_dim, softcap, mask):
    for kernel in on_cpu(head_dim, v_head_dim, softcap):
        for sizes in (*SIZES, PACK):
            assert_matches(kernel, *given(mask, sizes, head_dim, v_head_dim, softcap))


@every_form
@every_mask
def test_parts_over_split_keys_sum_to_the_whole(head_dim, v_head_dim, softcap, mask):
    for kernel in on_cpu(head_dim, v_head_dim, softcap):
        q, k, v, dout, call = given(mask, (20, 60), head_dim, v_head_dim, softcap)
        assert_split_matches(kernel, q, k, v, dout, call, [0, 13, 40, 60])


@every_form
@pytest.mark.parametrize("sizes", [(30, 12), (5, 0), (0, 5), PACK], ids=str)
def test_results_are_written_into_the_tensors_given(head_dim, v_head_dim, softcap, sizes):
    for kernel in on_cpu(head_dim, v_head_dim, softcap):
        q, k, v, dout, call = given(CAUSAL, sizes, head_dim, v_head_dim, softcap)
        result = kernel.forward(q, k, v, call)
        grads = kernel.backward(dout, q, k, v, *result, call)
        assert [x.shape for x in (result[0], *grads)] == [x.shape for x in (dout, q, k, v)]
        into = tuple(torch.full_like(x, torch.nan) for x in result)
        into_grads = tuple(torch.full_like(x, torch.nan) for x in grads)
        written = kernel.forward(q, k, v, call, into=into)
        written_grads = kernel.backward(dout, q, k, v, *result, call, into=into_grads)
        expected = (*result, *grads)
        for x, target, value in zip((*written, *written_grads), (*into, *into_grads), expected, strict=True):
            assert x is target and torch.equal(x, value)


@every_form
@pytest.mark.parametrize("name", ["documents", "rows_without_keys", "prefix_documents"])
def test_patterns_have_softcap_and_value_heads_of_another_size(head_dim, v_head_dim, softcap, name):
    pattern = PATTERNS[name]

    def call_of() -> Call:
        return Call(0.6, pattern=pattern, softcap=softcap)

    q, k, v, dout, call = inputs(
        call_of, (pattern.n_q, pattern.n_k), 2, 1, head_dim, torch.float64, v_head_dim=v_head_dim
    )
    shape = Shape.of(q, k, v, backward=True, softcap=softcap is not None)
    for kernel in on_cpu(head_dim, v_head_dim, softcap):
        assert_matches(ForPatterns(kernel, shape), q, k, v, dout, call)
