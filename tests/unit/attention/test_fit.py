"""Tensors of any strides: what a kernel cannot take as it lies is copied, in one place."""

import torch

from attention.tensors import fit, fits
from tests.support.strides import STRIDES

torch.set_num_threads(1)


def test_what_fits_is_not_copied():
    x = torch.randn(2, 8, 6, 16)
    rows = (x, x[:, 2:5], x[:, :, 1:3], x.transpose(1, 2), x[:1], x[..., :8], x[:, :, :, None, :].flatten(3))
    assert all(fits(x, 16) and fit((x,), 16)[0] is x for x in rows)
    assert fits(STRIDES["misaligned"](x), 1) and not fits(STRIDES["misaligned"](x), 16)
    assert fits(STRIDES["odd_rows"](x), 1) and not fits(STRIDES["odd_rows"](x), 16)
    for how in ("strided_last_dim", "every_other_element", "one_head", "one_token", "one_number", "overlapping"):
        assert not fits(STRIDES[how](x), 1), how


def test_a_copy_that_fits_passes_gradients_on():
    x = torch.randn(1, 4, 2, 8, requires_grad=True)
    (found,) = fit((STRIDES["strided_last_dim"](x),), 16)
    assert fits(found, 16)
    (grad,) = torch.autograd.grad(found, x, torch.ones_like(x))
    assert torch.equal(grad, torch.ones_like(x))
