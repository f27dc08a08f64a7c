"""Softcap and value heads of another size on a CPU, against plain fp64 attention with gradients."""

from dataclasses import replace

import pytest
import torch

from attention import kernels
from attention.kernels import KERNELS, Call, Kernel, Shape, UnsupportedCall, select
from attention.kernels.padded_values import PaddedValues
from attention.kernels.patterns import ForPatterns
from attention.masks.band import CAUSAL, FULL, Band
from tests.support.naive import assert_lse, assert_matches, assert_split_matches, inputs, reference, relative
from tests.support.patterns import PATTERNS

torch.set_num_threads(1)

MASKS = [CAUSAL, Band(5, 9)]
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
    """The kernels of a CPU that can do the form, with padding where they need some."""
    shape = Shape("cpu", torch.float64, 4, 2, head_dim, value_dim=v_head_dim, softcap=softcap is not None)
    found = [kernels.made_for(name, shape) for name in ("math", "sdpa_flash")]
    return [kernel for kernel in found if kernels.refusal(kernel, shape, FULL) is None]


@every_form
@every_mask
def test_softcap_and_value_heads_of_another_size_match_plain_attention(head_dim, v_head_dim, softcap, mask):
    for kernel in on_cpu(head_dim, v_head_dim, softcap):
        for sizes in ((17, 50), (50, 17), PACK):
            assert_matches(kernel, *given(mask, sizes, head_dim, v_head_dim, softcap))
        case = given(mask, (20, 60), head_dim, v_head_dim, softcap)
        assert_split_matches(kernel, *case, [0, 13, 40, 60])


@every_form
@pytest.mark.parametrize("sizes", [(30, 12), (0, 5), PACK], ids=str)
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
@pytest.mark.parametrize("name", ["rows_without_keys"])
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


@pytest.mark.parametrize("head_dim, v_head_dim, softcap", [(16, 32, 0.7), (32, 16, None)], ids=str)
def test_the_forward_of_flex_has_softcap_and_value_heads_of_another_size(head_dim, v_head_dim, softcap, monkeypatch):
    """PyTorch has no backward of it on a CPU."""
    module = pytest.importorskip("torch.nn.attention.flex_attention")
    monkeypatch.setattr(module, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    for sizes in ((50, 33), (0, 5), PACK):
        q, k, v, dout, call = given(Band(9, 3), sizes, head_dim, v_head_dim, softcap, torch.float32)
        out, lse = KERNELS["flex"].forward(q, k, v, call)
        expected_out, expected_lse, *_ = reference(q, k, v, dout, call)
        assert out.shape == dout.shape
        assert relative(out, expected_out) < 1e-6
        assert_lse(lse, expected_lse, 1e-6)


def test_a_kernel_without_value_heads_of_another_size_pads_and_says_so():
    for value_dim, note in ((128, "values padded from 128 to 192"), (256, "queries and keys padded from 192 to 256")):
        call = Shape("cpu", torch.float32, 8, 2, 192, value_dim=value_dim)
        kernel = select("sdpa_flash", call, (FULL, CAUSAL))
        assert isinstance(kernel, PaddedValues)
        assert (kernel.name, kernel.note) == ("sdpa_flash", note)
        assert kernels.select_for_patterns("sdpa_flash", call, (CAUSAL,), False).note == note
    assert select("sdpa_flash", replace(call, value_dim=None), (FULL,)) is KERNELS["sdpa_flash"]


@pytest.mark.parametrize("chosen", [select, lambda *call: kernels.select_for_patterns(*call, False)])
def test_softcap_is_refused_with_the_kernels_that_have_it(chosen):
    call = Shape("cpu", torch.float32, 8, 2, 64, value_dim=32, softcap=True)
    with pytest.raises(UnsupportedCall, match=r"^kernel=sdpa_flash: softcap: cannot apply one; kernels that can: math"):
        chosen("sdpa_flash", call, (CAUSAL,))


@pytest.fixture
def only(monkeypatch):
    """Sets the kernels that work on a GPU, beside `math`."""

    def set_up(*names: str) -> None:
        for kernel in KERNELS.values():
            reason = None if kernel.name in (*names, "math") else "not here"
            monkeypatch.setattr(kernel, "missing", lambda device, reason=reason: reason)

    return set_up


GPU = Shape("cuda", torch.bfloat16, 8, 2, 64)
MLA = Shape("cuda", torch.bfloat16, 8, 8, 192, value_dim=128)
PADDED = "values padded from 128 to 192"


@pytest.mark.parametrize(
    "here, changes, mask, kernel, note",
    [
        ("flash2 flash4 sdpa_cudnn flex decode", {}, FULL, "flash4", ""),
        ("flash2 flash4 sdpa_cudnn", {"packed": True, "tokens": 2048}, CAUSAL, "flash2", ""),  # a short packed batch
        ("flash2 flash4 sdpa_cudnn", {"packed": True, "tokens": 8192}, CAUSAL, "flash4", ""),
        ("flash2 flash4 flex", {"softcap": True}, CAUSAL, "flash4", ""),
        ("flash2 flex", {"softcap": True}, CAUSAL, "flex", ""),
        ("flash2", {"softcap": True}, CAUSAL, "math", ""),
        ("flash2 flash4 sdpa_efficient", vars(MLA), CAUSAL, "flash4", ""),
        # the backward of flash4 lacks these; a padded fast kernel goes before a slow one
        ("flash2 flash4 sdpa_efficient", vars(MLA) | {"kv_heads": 2}, CAUSAL, "flash2", PADDED),
        ("sdpa_efficient", vars(MLA) | {"dtype": torch.float32}, CAUSAL, "sdpa_efficient", ""),
        ("flash2 sdpa_efficient", vars(MLA) | {"dtype": torch.float32}, Band(5, 0), "math", ""),
    ],
)
def test_auto_on_a_gpu_takes_the_fastest_kernel_that_does_the_call(only, here, changes, mask, kernel, note):
    only(*here.split())
    taken = select("auto", replace(GPU, **changes), (mask,))
    assert (taken.name, getattr(taken, "note", None) or "") == (kernel, note)


def test_auto_says_why_it_passed_over_faster_kernels(only):
    only("flash2", "sdpa_cudnn")
    assert kernels.passed_over("sdpa_cudnn", GPU, (CAUSAL,)) == {"flash4": "not here"}
    assert kernels.passed_over("flex", GPU, (CAUSAL,)) == {}  # which auto never takes
    assert "sdpa_cudnn" not in kernels.preference(replace(GPU, packed=True))  # it makes a call for each sequence
    assert kernels.preference(GPU, decode=True)[0] == "decode"


def test_a_refusal_of_a_padded_call_gives_the_padded_size():
    call = replace(GPU, value_dim=264)
    reason = kernels.made_for("flash2", call).refuses(call, FULL)
    assert reason == "head_dim=264: multiples of 8 up to 256 only (queries and keys padded from 64 to 264)"
