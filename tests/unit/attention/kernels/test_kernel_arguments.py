"""How masks and lengths become the arguments of other people's kernels: pure functions, and what can be shown on a CPU."""

from dataclasses import replace

import pytest
import torch

from attention.kernels import KERNELS, Call
from attention.masks.band import CAUSAL, FULL, Band
from tests.support.naive import assert_lse, inputs, kept, reference, relative
from tests.support.patterns import PATTERNS
from tests.support.patterns import kept as pairs_of

MASKS = [FULL, CAUSAL, Band(7, 0), Band(5, 9), Band(-1, 4), Band(6, -1)]
PACK = ((1, 19, 8, 4, 0, 150), (1, 7, 23, 0, 5, 12))

every_mask = pytest.mark.parametrize("mask", MASKS, ids=Band.describe)


@pytest.mark.parametrize(
    "name, package", [("flash3", "FlashAttention-3"), ("flash4", "flash-attn-4"), ("xformers", "")]
)
def test_a_package_that_is_not_installed_is_named_with_its_command(name, package):
    reason = KERNELS[name].missing("cuda")
    if reason is None:
        pytest.skip(f"{name} works here")
    assert package in reason
    assert "install" in reason or "sm" in reason


@every_mask
def test_a_call_as_a_pattern_keeps_the_pairs_of_each_sequence(mask):
    expected = torch.block_diag(*(kept(mask, sq, sk).int() for sq, sk in zip(*PACK, strict=True))).bool()
    pattern = Call(0.125).of_packed(mask, *PACK, torch.device("cpu")).as_pattern(0, 0)
    assert torch.equal(torch.from_numpy(pairs_of(pattern)), expected)


DENSE, SHORT = ((140, 513), 32, None), (((100, 40), (256, 257)), 32, None)  # lengths, Dv, softcap
FLEX = [
    *((Call(0.125, mask), *sizes) for mask in MASKS for sizes in (DENSE, SHORT)),
    *((Call(0.125, Band(9, 3)), sizes, 48, 0.7) for sizes in ((50, 33), (0, 5), PACK)),
    *(
        (Call(0.25, pattern=x), (x.n_q, x.n_k), 16, None)
        for x in map(PATTERNS.get, ("documents", "rows_without_keys", "nothing"))
    ),
]


@pytest.mark.parametrize("call, sizes, v_head_dim, softcap", FLEX, ids=str)
def test_the_forward_of_flex_attention_matches_plain_attention(call, sizes, v_head_dim, softcap, monkeypatch):
    """PyTorch has no backward of it on a CPU."""
    module = pytest.importorskip("torch.nn.attention.flex_attention")
    monkeypatch.setattr(module, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    call = replace(call, softcap=softcap)
    q, k, v, dout, call = inputs(call, sizes, 4, 2, 32, torch.float32, v_head_dim=v_head_dim)
    out, lse = KERNELS["flex"].forward(q, k, v, call)
    expected, expected_lse, *_ = reference(q, k, v, dout, call)
    assert out.shape == dout.shape and relative(out, expected) < 1e-6
    assert_lse(lse, expected_lse, 1e-6)
