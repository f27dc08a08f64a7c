"""Sinks, softcap and value heads of another size: edges, and what is refused. Their numbers are with the variants'."""

import pytest
import torch

import attention


def test_a_query_without_keys_has_out_0_and_its_sink_as_lse():
    fn, sinks = attention.make("dense"), torch.tensor([0.5, -2.0])
    q = torch.randn(1, 8, 2, 16)
    out, lse = fn(q, q, q, mask=attention.masks.rectangles([((4, 8), (0, 8), (-1, 0))]), sinks=sinks, return_lse=True)
    assert not out[:, :4].any() and torch.equal(lse[0, :, :4], sinks[:, None].expand(2, 4))


@pytest.mark.parametrize("name", ["dense", "dilated"])
def test_a_sink_of_minus_infinity_is_none_also_where_a_query_sees_no_key(name):
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
    (of_sinks,) = torch.autograd.grad(out.sum(), sinks)
    assert of_sinks[0].isfinite() and of_sinks[0] != 0 and of_sinks[1] == 0


@pytest.mark.parametrize(
    ("given", "said"),
    (
        ({"sinks": torch.zeros(3)}, r"sinks: \[3\] given: must be a tensor \[2\]"),
        ({"sinks": [0.0, 1.0]}, r"sinks: \[0.0, 1.0\] given"),
        ({"sinks": torch.zeros(2, dtype=torch.int64)}, "sinks are torch.int64 on cpu: must be bf16"),
        ({"softcap": 0}, "softcap=0: must be a positive finite number"),
        ({"softcap": -1.0}, "softcap=-1.0: must be"),
        ({"softcap": torch.inf}, "softcap=inf: must be"),
        ({"softcap": "x"}, "softcap='x': must be"),
    ),
)
def test_bad_values_are_refused_in_one_line(given, said):
    q = torch.randn(1, 8, 2, 16)
    with pytest.raises(ValueError, match=said) as error:
        attention.make("ring")(q, q, q, **given)
    assert "\n" not in str(error.value)


def test_values_of_no_dim_are_refused():
    q = torch.randn(1, 8, 2, 16)
    with pytest.raises(ValueError, match="its head dim must be at least 1"):
        attention.make("ring")(q, q, q[..., :0])
