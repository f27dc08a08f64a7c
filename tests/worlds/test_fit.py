"""Tensors of any strides: what a kernel cannot take as it lies is copied, in one place."""

import pytest
import torch

from attention.tensors import fit, fits
from tests.jobs import numerics
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


IN_WORLDS = ["ring", "zigzag_llama3", "ring_allgather", "ulysses", "tree", "ring_decode"]
FORMS = ("strided_last_dim", "heads_first", "misaligned", "one_token")


@pytest.mark.parametrize("transport", ("gloo", "symm"))
def test_every_variant_takes_shards_of_any_strides(in_world, transport):
    for name, how, error in in_world(numerics.in_strides, 2, names=IN_WORLDS, forms=FORMS, transport=transport):
        assert error < 1e-5, (name, how)


def test_autocast_does_not_change_what_a_variant_computes_in(in_world):
    for name, same in in_world(numerics.under_autocast, 2, names=IN_WORLDS):
        assert same, name
