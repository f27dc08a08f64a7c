"""Copies of several tensors at once: what they write, and nothing beside it."""

import pytest
import torch

from attention.batched_copy import copy_all
from attention.tensors import put_, take

pytest.importorskip("triton")

from attention.ops.rows import copy_triton, copy_words

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=DEVICES)
def device(request):
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    return request.param


def normal(*shape, dtype=torch.float32, device="cpu", seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def some_heads(shape, more, first, n, **how):
    """Heads `[first, first + n)` of a tensor `shape` with `more` heads in all."""
    whole = normal(*shape[:-2], more, shape[-1], **how)
    return whole, whole[..., first : first + n, :]


FORMS = [
    # leading dims, heads of the target, of the source, head dim
    ((2, 37), (8, 2, 4), (6, 0, 4), 16),
    ((41,), (3, 1, 1), (5, 4, 1), 80),
    ((2, 9), (4, 0, 4), (4, 0, 4), 64),
]


@pytest.mark.parametrize("how", ["copy_all", "kernel"])
@pytest.mark.parametrize("leading, into, of, head_dim", FORMS, ids=str)
def test_every_pair_is_copied_and_nothing_beside_it(device, how, leading, into, of, head_dim):
    if how == "kernel" and device == "cpu" and torch.cuda.is_available():
        pytest.skip("not interpreted where there is a GPU")
    copy = copy_all if how == "copy_all" else copy_triton
    for n_pairs, dtype in (
        (1, torch.float32),
        (3, torch.float64 if how == "copy_all" else torch.float32),
        (20, torch.bfloat16),
    ):
        pairs, expected = [], []
        for i in range(n_pairs):
            given = {"dtype": dtype, "device": device}
            whole, target = some_heads((*leading, 0, head_dim), *into, seed=i, **given)
            _, source = some_heads((*leading, 0, head_dim), *of, seed=100 + i, **given)
            wanted = whole.clone()
            wanted[..., into[1] : into[1] + into[2], :] = source
            pairs.append((target, source))
            expected.append((whole, wanted))
        copy(pairs)
        assert all(torch.equal(whole, wanted) for whole, wanted in expected)


def test_copies_of_every_size_stride_and_dtype_in_one_call(device):
    whole, lse = normal(2, 16, 12, 8, device=device), normal(5, 3, dtype=torch.float64, device=device)
    turned = whole.transpose(1, 2).contiguous().transpose(1, 2)
    sources = [
        whole,
        whole[:, :, 4:8],
        whole[0, :2],
        whole[:, ::2],
        lse,
        lse.t(),
        whole[:, :0],
        whole.bfloat16(),
        turned,
    ]
    targets = [torch.full_like(x, 7.0, memory_format=torch.contiguous_format) for x in sources]
    copy_all(zip(targets, sources, strict=True))
    assert all(map(torch.equal, targets, sources))
    wide = torch.zeros(whole.shape, device=device)
    copy_all([(wide, whole.bfloat16())])
    assert torch.equal(wide, whole.bfloat16().float())


@pytest.mark.parametrize("copy", [copy_words, copy_all])
def test_contiguous_tensors_of_any_shapes_and_dtypes_are_one_copy(device, copy):
    if copy is copy_words and device == "cpu" and torch.cuda.is_available():
        pytest.skip("not interpreted where there is a GPU")
    pairs, guards = [], []
    for shape, dtype in [
        ((3, 5, 2), torch.float32),
        ((9999,), torch.int64),
        ((1, 300, 4, 16), torch.bfloat16),
        ((1,), torch.int32),
    ]:
        source = normal(*shape, device=device).mul(100).to(dtype)
        guards.append(torch.full((source.numel() + 16,), 7, dtype=dtype, device=device))
        pairs.append((guards[-1][8:-8].view(shape), source))
    copy(pairs)
    assert all(torch.equal(target, source) for target, source in pairs)
    assert all((guard[:8] == 7).all() and (guard[-8:] == 7).all() for guard in guards)


MANY = tuple((7 * i, 7 * i + 1 + i % 5) for i in range(12))


@pytest.mark.parametrize("dtype, leading", [(torch.bfloat16, (100,)), (torch.float64, (2, 100))], ids=str)
@pytest.mark.parametrize("heads_first", [False, True])
def test_many_stretches_are_taken_and_put(device, dtype, leading, heads_first):
    """Of some of the heads, and of a tensor whose heads lie first, which the kernel does not do."""
    whole = normal(*leading, 6, 32, dtype=dtype, device=device)
    x = whole[..., 1:5, :]
    x = x.transpose(-3, -2).contiguous().transpose(-3, -2) if heads_first else x
    at = torch.cat([torch.arange(*interval) for interval in MANY]).to(device)
    taken = take(x, MANY)
    assert torch.equal(taken, x.index_select(x.dim() - 3, at))
    values, untouched = normal(*taken.shape, device=device, seed=3), whole[..., 5:, :].clone()
    expected = x.clone().index_copy_(x.dim() - 3, at, values.to(dtype))
    put_(x, MANY, values)
    assert torch.equal(x, expected) and torch.equal(whole[..., 5:, :], untouched)
