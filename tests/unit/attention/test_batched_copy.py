"""Copies of several tensors at once: what they write, and nothing beside it."""

import pytest
import torch

from attention.batched_copy import by_kernel, by_words, copy_all, moves
from attention.tensors import put_, take

pytest.importorskip("triton")

from attention.ops.rows import copy_triton, copy_words, sum_rows

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


def test_shapes_that_differ_are_refused(device):
    with pytest.raises(RuntimeError, match="size"):
        copy_all([(torch.zeros(1, 10, 2, 8, device=device), torch.zeros(1, 20, 2, 8, device=device))])


@pytest.mark.parametrize("n", [1, 20])
def test_moves_write_the_tokens_they_name(device, n):
    x, into = normal(2, 100, 4, 16, device=device), normal(2, 120, 4, 16, device=device, seed=1)
    expected = into.clone()
    places = [((5 * i, 5 * i + 3 + i % 2), (119 - 6 * i - 3 - i % 2, 119 - 6 * i)) for i in range(n)]
    for (a, b), (c, d) in places:
        expected[:, c:d] = x[:, a:b]
    copy_all(moves(into, x, places))
    assert torch.equal(into, expected)


@pytest.mark.parametrize(
    ("shape", "heads", "so"),
    [
        ((1, 100_000), 4, True),
        ((100_000,), 4, True),  # a packed batch of any length
        ((4096, 2), 4, False),  # a grid has no room for so large a batch
        ((1, 100_000), 8, False),  # all heads: contiguous
    ],
)
def test_the_kernel_copies_some_heads_of_every_token(shape, heads, so):
    whole = torch.empty((*shape, 8, 16), device="meta")
    x = whole[..., :heads, :]
    assert by_kernel(x.shape, x.stride(), torch.empty_like(x).contiguous().stride()) == so


SIZES = [[(4096 * 4,), (1,)], [(3, 5, 2), (9999,), (1, 300, 4, 16), (4097,)]]


@pytest.mark.parametrize("shapes", SIZES, ids=str)
@pytest.mark.parametrize("run", ["copy_words", "copy_all"])
def test_contiguous_tensors_of_any_shapes_and_dtypes_are_one_copy(device, shapes, run):
    if run == "copy_words" and device == "cpu" and torch.cuda.is_available():
        pytest.skip("not interpreted where there is a GPU")
    dtypes = [torch.float32, torch.int64, torch.bfloat16, torch.int32]
    sources, targets, guards = [], [], []
    for i, shape in enumerate(shapes):
        dtype = dtypes[i] if torch.Size(shape).numel() % 2 == 0 or run == "copy_all" else torch.float32
        sources.append(normal(*shape, device=device, seed=i).mul(100).to(dtype))
        guards.append(torch.full((sources[-1].numel() + 16,), 7, dtype=dtype, device=device))
        targets.append(guards[-1][8:-8].view(shape))
    {"copy_words": copy_words, "copy_all": copy_all}[run](list(zip(targets, sources, strict=True)))
    assert all(map(torch.equal, targets, sources))
    assert all((guard[:8] == 7).all() and (guard[-8:] == 7).all() for guard in guards)


def test_which_copies_go_by_words():
    x = torch.zeros(4, 6, dtype=torch.bfloat16)
    assert by_words(x, x) and not by_words(x, x.t().contiguous().t())
    assert not by_words(x[:, :3], x[:, 3:]) and not by_words(x[0, :3], x[1, :3])  # rows of a pitch; an odd half word
    half = torch.zeros(9, dtype=torch.bfloat16)
    assert by_words(half[:8], half[:8]) and not by_words(half[1:], half[:8]) and not by_words(half[:8], half[1:])
    large = torch.empty((1 << 30,), dtype=torch.float32, device="meta")
    assert not by_words(large, large) and by_words(large[1:], large[1:])


MANY = tuple((7 * i, 7 * i + 1 + i % 5) for i in range(12))


@pytest.mark.parametrize("dtype, leading", [(torch.bfloat16, (100,)), (torch.float64, (2, 100))], ids=str)
@pytest.mark.parametrize("heads_first", [False, True])
def test_many_stretches_are_taken_and_put(device, dtype, leading, heads_first):
    """Of some of the heads, and of a tensor whose heads lie first, which the kernel does not do."""
    whole = normal(*leading, 6, 32, dtype=dtype, device=device)
    x = whole[..., 1:5, :]
    if heads_first:
        x = x.transpose(-3, -2).contiguous().transpose(-3, -2)
    at = torch.cat([torch.arange(*each) for each in MANY]).to(device)
    found = take(x, MANY)
    assert torch.equal(found, x.index_select(x.dim() - 3, at))
    values = normal(*found.shape, dtype=torch.float32, device=device, seed=3)
    expected = x.clone()
    expected.index_copy_(x.dim() - 3, at, values.to(dtype))
    untouched = whole[..., 5:, :].clone()
    put_(x, MANY, values)
    assert torch.equal(x, expected) and torch.equal(whole[..., 5:, :], untouched)


@pytest.mark.skipif(torch.cuda.is_available(), reason="not interpreted where there is a GPU")
def test_tokens_by_number_under_the_interpreter():
    out, x = (normal(2, 100, 6, 40, seed=i)[..., 1:5, :] for i in range(2))
    numbers = torch.randperm(100, generator=torch.Generator().manual_seed(0))[:37].int()
    to = torch.randperm(100, generator=torch.Generator().manual_seed(1))[:37].int()
    expected = out.clone()
    expected[..., to.long(), :, :] = x[..., numbers.long(), :, :]
    sum_rows([out], to, [[x]], numbers[None])
    assert torch.equal(out, expected)
