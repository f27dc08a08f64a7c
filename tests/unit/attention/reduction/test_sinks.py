"""Sinks in Triton's interpreter against their definition in fp64; the GPU has the same test."""

from __future__ import annotations

import pytest
import torch

from attention.reduction.sinks import sinks_gradients

pytest.importorskip("triton")
GPU = torch.cuda.is_available()
pytestmark = pytest.mark.gpu if GPU else []


def case(shape, dtype):
    device = "cuda" if GPU else "cpu"
    generator = torch.Generator().manual_seed(sum(shape))
    out, dout = (torch.randn(shape, generator=generator).to(device, dtype) for _ in range(2))
    lse = torch.randn((*shape[:-3], shape[-2], shape[-3]), generator=generator).to(device)
    lse[..., 0] = -torch.inf  # a query that sees no key
    out.narrow(len(shape) - 3, 0, 1).zero_()
    sinks = torch.randn(shape[-2], generator=generator).to(device)
    sinks[-1] = -torch.inf  # none
    return dout, out, lse, sinks


@pytest.mark.parametrize("dtype", (torch.float16, torch.float32))
@pytest.mark.parametrize("shape", ((2, 70, 3, 24), (600, 2, 64)), ids=str)
def test_the_kernels_match_the_definition(shape, dtype):
    from attention.ops.merge import apply_sinks, sinks_gradient

    dout, out, lse, sinks = case(shape, dtype)
    wide = lse.double()
    after = torch.logaddexp(wide, sinks.double()[:, None])
    right = out.double() * (wide - after).exp().nan_to_num(0).transpose(-1, -2).unsqueeze(-1)
    found, found_lse = out.clone(), lse.clone()
    apply_sinks(found, found_lse, sinks)
    close = {torch.float16: 2e-3, torch.float32: 1e-6}[dtype]
    torch.testing.assert_close(found.double(), right, rtol=close, atol=close)
    torch.testing.assert_close(found_lse.double(), after, rtol=1e-6, atol=1e-6)
    share = (sinks.double()[:, None] - after).exp().nan_to_num(0)
    expected = -(share * (dout.double() * found.double()).sum(-1).transpose(-1, -2)).sum(-1)
    expected = expected.sum(0) if expected.dim() == 2 else expected
    (by_torch,) = sinks_gradients(dout, (out, out, out, found, found_lse, sinks))
    for each in (sinks_gradient(dout, found, found_lse, sinks), by_torch):
        torch.testing.assert_close(each.double(), expected, rtol=1e-4, atol=1e-4)
        assert each[-1] == 0
