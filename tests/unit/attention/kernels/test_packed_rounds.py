"""Masks as packed calls of a kernel that takes none: the accuracy of merged parts in bf16."""

import pytest
import torch

import attention
from attention import masks

TOKENS = 384
MASKS = {
    "documents": masks.documents([100, 0, 200, 84]),
    "global_window": masks.global_window(20, 5),
    "dca_tile": masks.dca(32, 8, 16, granularity="tile"),
}


def passed(mask: masks.Mask, dtype: torch.dtype) -> list[torch.Tensor]:
    """out, dq, dk and dv."""
    torch.manual_seed(0)
    drawn = [torch.randn(1, TOKENS, heads, 16).to(torch.bfloat16) for heads in (4, 2, 2, 4)]
    *inputs, dout = (x.to(dtype) for x in drawn)
    q, k, v = (x.requires_grad_() for x in inputs)
    out = attention.make("dense", kernel="math")(q, k, v, mask=mask)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]


@pytest.mark.parametrize("name", MASKS)
def test_bf16_is_as_near_to_fp64_as_its_rounding(name):
    found, exact = (passed(MASKS[name], dtype) for dtype in (torch.bfloat16, torch.float64))
    for each, right in zip(found, exact, strict=True):
        assert ((each - right).norm() / right.norm()).item() < 5e-3
