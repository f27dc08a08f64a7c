"""Sinks at the edges. Their numbers, those of softcaps and of value heads of another size are with the variants'."""

import pytest
import torch

import attention


@pytest.mark.parametrize("name", ["dense", "dilated"])
def test_a_query_without_keys_has_its_sink_as_lse_and_a_sink_of_minus_infinity_is_none(name):
    q, given = torch.randn(1, 8, 2, 16), {"causal": True}
    if name == "dense":
        fn, given = attention.make("dense"), {"mask": attention.masks.rectangles([((4, 8), (0, 8), (-1, 0))])}
    else:  # of the second head every other query
        fn = attention.make("dilated", segments=[8, 8], rates=[1, 2])
    sinks = torch.tensor([0.5, -torch.inf]).requires_grad_()
    out, lse = fn(q, q, q, **given, sinks=sinks, return_lse=True)
    expected, expected_lse = fn(q, q, q, **given, return_lse=True)
    torch.testing.assert_close((out[:, :, 1], lse[:, 1]), (expected[:, :, 1], expected_lse[:, 1]))
    assert (lse[:, 1] == -torch.inf).sum() == 4
    unseen = expected_lse[0, 0] == -torch.inf
    assert not out[0, unseen].any() and (lse[0, 0, unseen] == 0.5).all() and unseen.sum() == 4 * (name == "dense")
    (of_sinks,) = torch.autograd.grad(out.sum(), sinks)
    assert of_sinks[0].isfinite() and of_sinks[0] != 0 and of_sinks[1] == 0
