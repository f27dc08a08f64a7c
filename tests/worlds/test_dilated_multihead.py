"""The module of multi-head dilated attention."""

import pytest
import torch
import torch.nn.functional as F

from attention.models import DilatedMultihead
from tests.support.dilated import reference

PAIRS = {"segments": [8, 16], "rates": [1, 2]}


def test_it_is_its_parts_one_after_another():
    torch.manual_seed(0)
    module = DilatedMultihead(32, 4, 2, dtype=torch.float64, kernel="math", mixing="longnet", **PAIRS)
    with torch.no_grad():  # biases are 0 at first
        for x in (module.qkv.bias, module.out.bias, module.norm.weight, module.norm.bias):
            x.normal_()
    x = torch.randn(2, 24, 32, dtype=torch.float64, requires_grad=True)
    q, k, v = F.linear(x, module.qkv.weight, module.qkv.bias).view(2, 24, 8, 8).split([4, 2, 2], 2)
    inner, _ = reference(q, k, v, **PAIRS, mixing="longnet", causal=True)
    normal = F.layer_norm(inner.flatten(2), (32,), module.norm.weight, module.norm.bias)
    expected = F.linear(normal, module.out.weight, module.out.bias)
    inputs = [x, *module.parameters()]
    ours = module(x, causal=True)
    dout = torch.randn_like(ours)
    grads = zip(*(torch.autograd.grad(y, inputs, dout) for y in (ours, expected)), strict=True)
    assert all(torch.allclose(a, b, 1e-10, 1e-10) for a, b in [(ours, expected), *grads])


def test_gamma_scales_the_initial_weights_that_values_pass_through():
    torch.manual_seed(0)
    module, xavier = DilatedMultihead(256, 4, gamma=3.0, **PAIRS), (2 / 512) ** 0.5
    stds = [w.std().item() for w in (*module.qkv.weight.split(256), module.out.weight)]
    assert stds == pytest.approx([xavier, xavier, 3 * xavier, 3 * xavier], rel=0.02)
    assert not module.qkv.bias.any() and not module.out.bias.any()


def test_heads_that_do_not_divide_the_hidden_size_are_refused():
    with pytest.raises(ValueError, match="heads=5: must divide hidden=32; give another number of heads"):
        DilatedMultihead(32, 5, **PAIRS)


def test_whole_models_say_where_they_went():
    with pytest.raises(ImportError, match=r"import Transformer from runner\.models"):
        from attention.models import Transformer  # noqa: F401
