"""Softcap and value heads of another size by the kernels of a GPU, against plain fp64 attention with gradients. Some compile for
seconds a shape, so a few shapes speak for all."""

import pytest
import torch

from attention import kernels
from attention.kernels import KERNELS, Call, Shape
from attention.kernels.padded_values import PaddedValues
from attention.kernels.patterns import ForPatterns
from attention.masks.band import CAUSAL, FULL, Band
from tests.support.naive import assert_matches, inputs
from tests.support.patterns import PATTERNS

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

DENSE = (300, 515)
PACK = ((1, 300, 129, 64), (1, 512, 129, 70))
WINDOW = Band(100, 0)

SOFTCAPS = [  # kernel, head dim, mask, lengths
    ("flash4", 64, WINDOW, PACK),
    ("flash4", 128, CAUSAL, DENSE),
    ("flash4", 256, FULL, DENSE),
    ("flex", 64, CAUSAL, DENSE),
    ("math", 64, CAUSAL, PACK),
]
VALUES = [  # kernel, KV heads of 4, D, Dv, mask, lengths
    ("flash4", 4, 192, 128, CAUSAL, DENSE),
    ("flash4", 4, 192, 128, WINDOW, PACK),
    ("flash4", 4, 128, 64, CAUSAL, DENSE),
    ("sdpa_cudnn", 2, 192, 128, CAUSAL, DENSE),
    ("sdpa_cudnn", 2, 128, 64, CAUSAL, PACK),
    ("sdpa_cudnn", 2, 64, 128, FULL, DENSE),
    ("sdpa_efficient", 2, 192, 128, CAUSAL, DENSE),
    ("sdpa_efficient", 2, 64, 128, CAUSAL, PACK),
    ("cudnn_flex", 4, 192, 128, CAUSAL, DENSE),
    ("cudnn_flex", 4, 128, 64, WINDOW, PACK),
    ("flex", 2, 192, 128, CAUSAL, DENSE),
    ("math", 2, 192, 128, CAUSAL, PACK),
]
PADDED = [
    ("flash4", 2, 128, 96, CAUSAL, PACK),
    ("flash2", 2, 192, 128, WINDOW, PACK),
    ("flash2", 2, 64, 128, CAUSAL, DENSE),
    ("sdpa_flash", 2, 192, 128, CAUSAL, DENSE),
    ("xformers", 2, 64, 32, CAUSAL, DENSE),
    ("triton", 2, 128, 64, CAUSAL, DENSE),
]


def case(mask: Band, sizes, kv_heads: int, head_dim: int, v_head_dim: int, softcap: float | None):
    """(q, k, v, dout, call) on the GPU in bf16, 4 heads, with scores of the order of 1."""
    made = Call(2 * head_dim**-0.5, mask, softcap=softcap)

    def call_of(q_lengths=None, k_lengths=None) -> Call:
        if q_lengths is None:
            return made
        return made.of_packed(mask, q_lengths, k_lengths, torch.device("cuda"))

    return inputs(call_of, sizes, 4, kv_heads, head_dim, torch.bfloat16, "cuda", v_head_dim)


def checked(name: str, q, k, v, dout, call: Call) -> kernels.Kernel:
    """The kernel, after its comparison with plain attention. What it declares must not be refused, where it works at all."""
    if reason := KERNELS[name].missing("cuda"):
        pytest.skip(f"{name}: {reason}")
    shape = Shape.of(q, k, v, backward=True, softcap=call.softcap is not None)
    kernel = kernels.made_for(name, shape)
    assert kernels.refusal(kernel, shape, call.mask) is None
    assert_matches(kernel, q, k, v, dout, call)
    return kernel


@pytest.mark.parametrize("name, head_dim, mask, sizes", SOFTCAPS, ids=str)
def test_softcap_matches_plain_attention(name, head_dim, mask, sizes):
    for softcap in (1.5,) if name in ("flash4", "flex") else (1.5, 30.0):
        checked(name, *case(mask, sizes, 2, head_dim, head_dim, softcap))


@pytest.mark.parametrize("name, kv_heads, head_dim, v_head_dim, mask, sizes", VALUES, ids=str)
def test_value_heads_of_another_size_match_plain_attention(name, kv_heads, head_dim, v_head_dim, mask, sizes):
    assert checked(name, *case(mask, sizes, kv_heads, head_dim, v_head_dim, None)) is KERNELS[name]


@pytest.mark.parametrize("name, kv_heads, head_dim, v_head_dim, mask, sizes", PADDED, ids=str)
def test_padded_value_heads_match_plain_attention(name, kv_heads, head_dim, v_head_dim, mask, sizes):
    kernel = checked(name, *case(mask, sizes, kv_heads, head_dim, v_head_dim, None))
    assert isinstance(kernel, PaddedValues)


def test_softcap_and_value_heads_of_another_size_go_together_in_flash4():
    checked("flash4", *case(CAUSAL, DENSE, 4, 192, 128, 1.5))


@pytest.mark.parametrize("name", ["window_and_global_tile", "prefix_documents"])
def test_patterns_have_both_by_packed_calls_of_flash4(name):
    if reason := KERNELS["flash4"].missing("cuda"):
        pytest.skip(reason)
    pattern = PATTERNS[name]

    def call_of() -> Call:
        return Call(0.15, pattern=pattern, softcap=1.5)

    q, k, v, dout, call = inputs(call_of, (pattern.n_q, pattern.n_k), 4, 4, 192, torch.bfloat16, "cuda", v_head_dim=128)
    shape = Shape.of(q, k, v, backward=True, softcap=True)
    kernel = ForPatterns(kernels.made_for("flash4", shape), shape)
    assert "softcap" in (kernel.why_rectangles(call) or "")
    assert_matches(kernel, q, k, v, dout, call)
