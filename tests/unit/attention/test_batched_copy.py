"""Copies of several tensors at once: what they write, and nothing beside it. On a GPU where there is one, else in PyTorch and under
Triton's interpreter."""

import pytest
import torch

from attention.batched_copy import copy_all
from attention.tensors import put_, take

pytest.importorskip("triton")

from attention.ops.rows import copy_triton, copy_words, divide_strided

GPU = torch.cuda.is_available()
pytestmark = pytest.mark.gpu if GPU else []


def normal(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to("cuda" if GPU else "cpu", dtype)


@pytest.mark.parametrize("copy", [copy_all, copy_triton])
@pytest.mark.parametrize("leading", [(2, 37), (41,)], ids=str)
def test_some_heads_of_several_tensors_are_copied_and_nothing_beside_them(copy, leading):
    for n, dtype in ((1, torch.float32), (20, torch.bfloat16)):
        given = [[normal(*leading, heads, 80, dtype=dtype, seed=i + heads) for heads in (7, 5)] for i in range(n)]
        expected = [torch.cat([to[..., :2, :], of[..., :4, :], to[..., 6:, :]], -2) for to, of in given]
        copy([(to[..., 2:6, :], of[..., :4, :]) for to, of in given])
        assert all(torch.equal(to, wanted) for (to, _), wanted in zip(given, expected, strict=True))


def test_copies_of_every_size_stride_and_dtype_in_one_call():
    whole, lse = normal(2, 16, 12, 8), normal(5, 3, dtype=torch.float64)
    turned = whole.transpose(1, 2).contiguous().transpose(1, 2)
    views = whole[:, :, 4:8], whole[0, :2], whole[:, ::2], whole[:, :0]
    sources = [whole, *views, lse, lse.t(), whole.bfloat16(), turned]
    targets = [torch.full_like(x, 7.0, memory_format=torch.contiguous_format) for x in sources]
    wide = torch.zeros_like(whole)
    copy_all([*zip(targets, sources, strict=True), (wide, whole.bfloat16())])
    assert all(map(torch.equal, [*targets, wide], [*sources, whole.bfloat16().float()]))


@pytest.mark.parametrize("copy", [copy_words, copy_all])
def test_contiguous_tensors_of_any_shapes_and_dtypes_are_one_copy(copy):
    shapes = {torch.float32: (3, 5, 2), torch.int64: (9999,), torch.bfloat16: (1, 300, 4, 16), torch.int32: (1,)}
    sources = [normal(*shape).mul(100).to(dtype) for dtype, shape in shapes.items()]
    guards = [torch.full((x.numel() + 16,), 7, dtype=x.dtype, device=x.device) for x in sources]
    targets = [guard[8:-8].view(x.shape) for guard, x in zip(guards, sources, strict=True)]
    copy(list(zip(targets, sources, strict=True)))
    assert all(map(torch.equal, targets, sources))
    assert all((guard[:8] == 7).all() and (guard[-8:] == 7).all() for guard in guards)


MANY = tuple((7 * i, 7 * i + 1 + i % 5) for i in range(12))


@pytest.mark.parametrize("dtype, leading", [(torch.bfloat16, (100,)), (torch.float64, (2, 100))], ids=str)
@pytest.mark.parametrize("heads_first", [False, True])
def test_many_stretches_are_taken_and_put(dtype, leading, heads_first):
    """Of some of the heads, and of a tensor whose heads lie first, which the kernel does not do."""
    whole = normal(*leading, 6, 32, dtype=dtype)
    x = whole[..., 1:5, :]
    x = x.transpose(-3, -2).contiguous().transpose(-3, -2) if heads_first else x
    at = torch.cat([torch.arange(*interval) for interval in MANY]).to(x.device)
    taken = take(x, MANY)
    assert torch.equal(taken, x.index_select(x.dim() - 3, at))
    values, untouched = normal(*taken.shape, seed=3), whole[..., 5:, :].clone()
    expected = x.clone().index_copy_(x.dim() - 3, at, values.to(dtype))
    put_(x, MANY, values)
    assert torch.equal(x, expected) and torch.equal(whole[..., 5:, :], untouched)


@pytest.mark.parametrize("n", [1, 3])
def test_a_stride_of_each_heads_tokens_is_divided_and_the_rest_cleared(n):
    x = normal(2, 37, 2, 80)
    expected = torch.zeros_like(x)
    expected[:, :, 0], expected[:, 3::4, 1] = x[:, :, 0] / n, x[:, 3::4, 1] / n
    x[:, 0, 1] = torch.nan  # memory that nothing was written to
    divide_strided(x, x, torch.tensor([[1, 4], [0, 3]], dtype=torch.int32, device=x.device), n)
    torch.testing.assert_close(x, expected)
