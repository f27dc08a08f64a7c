"""Masks as packed calls of a kernel that takes none: equal bits when called twice, and the accuracy of merged parts in bf16."""

import pytest
import torch

import attention
from attention import masks

TOKENS = 384
MASKS = {
    "documents": masks.documents([100, 0, 200, 84]),
    "global_window": masks.global_window(20, 5),
    "dca": masks.dca(32, 8, 64, granularity="block", block=16),
    "dca_tile": masks.dca(32, 8, 16, granularity="tile"),
}


def passed(mask: masks.Mask, dtype: torch.dtype, deterministic: bool) -> list[torch.Tensor]:
    """out, dq, dk and dv."""
    torch.manual_seed(0)
    drawn = [torch.randn(1, TOKENS, heads, 16).to(torch.bfloat16) for heads in (4, 2, 2, 4)]
    *inputs, dout = (x.to(dtype) for x in drawn)
    q, k, v = (x.requires_grad_() for x in inputs)
    out = attention.make("dense", kernel="math", deterministic=deterministic)(q, k, v, mask=mask)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]


@pytest.mark.parametrize("name", MASKS)
def test_deterministic_calls_give_equal_bits(name):
    first, second = (passed(MASKS[name], torch.float32, True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("name", MASKS)
def test_bf16_is_as_near_to_fp64_as_its_rounding(name):
    found, exact = (passed(MASKS[name], dtype, False) for dtype in (torch.bfloat16, torch.float64))
    for each, right in zip(found, exact, strict=True):
        assert ((each - right).norm() / right.norm()).item() < 5e-3
