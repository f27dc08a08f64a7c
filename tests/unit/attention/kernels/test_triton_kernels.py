"""The Triton kernels against plain fp64 attention: on a GPU where there is one, else under the interpreter."""

from dataclasses import replace
from itertools import product

import pytest
import torch

from attention import make
from attention.kernels import Call, Shape, UnsupportedCall, name_of
from attention.masks.band import CAUSAL, FULL, Band
from attention.reduction.parts import empty_result
from tests.support.naive import TOLERANCES, assert_lse, assert_matches, attention, inputs, kept, normal, relative

pytest.importorskip("triton")

from attention.kernels.triton_decode import DecodeKernel, split_count
from attention.kernels.triton_flash import TritonFlash
from attention.kernels.triton_grouped import grouped_forward
from attention.reduction.grad_sum import sum_all

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
pytestmark = pytest.mark.gpu if GPU else []
on_gpu = pytest.mark.skipif(not GPU, reason="needs a CUDA GPU")
# the interpreter has no bf16 dot
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, *[torch.bfloat16] * GPU], ids=name_of)
decode = DecodeKernel().attend
torch.set_num_threads(1)


def qkv(n_q, n_k, heads, kv_heads, head_dim, dtype, batch=2):
    shapes = ((n_q, heads), (n_k, kv_heads), (n_k, kv_heads))
    return [normal(batch, n, h, head_dim, dtype=dtype, seed=i, device=DEVICE) for i, (n, h) in enumerate(shapes)]


def plain(q, k, v, scale, mask=FULL, softcap=None):
    keep = kept(mask, q.shape[1], k.shape[1], DEVICE)
    return attention(q.double(), k.double(), v.double(), scale, keep, softcap)


def assert_close(result, expected, dtype):
    (out, lse), (expected_out, expected_lse) = result, expected
    assert out.isfinite().all() and not lse.isnan().any() and lse.dtype == torch.float32
    assert (out[(expected_lse == -torch.inf).transpose(1, 2)] == 0).all(), "rows without keys"
    # a GPU's exp2 is an approximation to 2 ulp
    wide = 1e-5 if GPU else 3e-6
    assert relative(out, expected_out) < (wide if dtype == torch.float32 else TOLERANCES[dtype][0])
    assert_lse(lse, expected_lse, 1e-5)


# decode


DECODES = [(1, 1, 8, 2, 64), (1, 257, 4, 4, 96), (4, 129, 8, 2, 80), (5, 70, 32, 1, 128), (4, 0, 8, 1, 64)]
LONG_DECODES = [(1, 8192, 16, 2, 256), (16, 777, 16, 2, 80), (2, 20001, 64, 8, 128)]


@every_dtype
@pytest.mark.parametrize("n_queries, n_keys, heads, kv_heads, head_dim", DECODES + LONG_DECODES * GPU)
def test_decode_over_splits_of_the_keys_matches_plain_attention(dtype, n_queries, n_keys, heads, kv_heads, head_dim):
    """Of a cache that is a part of a longer one, with heads first in memory; scores of tens neither overflow nor vanish."""
    q, k, v = qkv(n_queries, n_keys + 40, heads, kv_heads, head_dim, dtype, batch=1)
    k, v = k.transpose(1, 2).contiguous().transpose(1, 2)[:, 30 : n_keys + 30], v[:, 30 : n_keys + 30]
    for splits, scale in ((None, 0.1), (40 if GPU else 5, 2.0 if dtype == torch.float32 else 0.1)):
        expected = plain(q, k, v, scale)
        assert_close(decode((q, k, v), Call(scale), splits=splits), expected, dtype)
        assert_close(decode((q, k, v), Call(scale), splits=splits, into=empty_result(q)), expected, dtype)


@pytest.mark.parametrize(
    "n_keys, programs, processors, splits",
    [
        (131072, 8, 132, 16),  # 128 of 132 SMs
        (131072, 100, 132, 5),  # 500 of 4 times 132; 100, 200, 300 and 400 leave a quarter idle
        (1024, 8, 132, 4),  # of 256 keys, however idle
        (0, 8, 132, 1),
        (131072, 8, 1, 1),
    ],
)
def test_the_number_of_splits_fills_the_gpu_with_splits_that_are_long_enough(n_keys, programs, processors, splits):
    assert split_count(n_keys, programs, processors) == splits


def test_kernels_say_what_they_do_not_do(monkeypatch):
    base = Shape("cuda", torch.bfloat16, 64, 8, 128, backward=False)
    refused = [
        (DecodeKernel(), {"backward": True}, FULL, "backward: forward only"),
        (DecodeKernel(), {"value_dim": 264}, FULL, "v_head_dim=264: up to 256"),
        (DecodeKernel(), {"dtype": torch.float64}, FULL, "dtype=fp64: bf16, fp16 and fp32 only"),
        *[(DecodeKernel(), {"device": "cpu"}, FULL, "dtype=bf16: under Triton's interpreter")] * (not GPU),
        (TritonFlash(), {}, Band(5, 0), "window=(5, 0): no sliding window"),
        (TritonFlash(), {"head_dim": 80}, FULL, "head_dim=80: 64 and 128 only"),
    ]
    for kernel, changes, mask, reason in refused:
        assert kernel.refuses(base, FULL) is None
        assert (kernel.refuses(replace(base, **changes), mask) or "").startswith(reason)
    with pytest.raises(UnsupportedCall, match="no sliding window"):
        TritonFlash().forward(*qkv(3, 3, 2, 1, 64, torch.float32), Call(1.0, Band(1, 0)))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    for kernel in (DecodeKernel(), TritonFlash()):
        assert "needs a CUDA GPU" in kernel.missing("cpu") and kernel.missing("cuda") is None


@every_dtype
@pytest.mark.parametrize("mask", [CAUSAL, Band(5, 0), Band(40, 2), Band(-1, 3)], ids=str)
@pytest.mark.parametrize(
    "n_queries, n_keys, dims", [(6, 150, (64, 40)), (6, 4, (128, 80)), *[(4, 5003, (192, 128))] * GPU]
)
def test_decode_under_bands_with_softcap_and_value_heads_of_another_size(dtype, n_queries, n_keys, dims, mask):
    """A window reads its own keys only: the others are NaN."""
    q, k, v = qkv(n_queries, n_keys, 2, 1, dims[0], dtype)
    v = v[..., : dims[1]].clone()
    expected = plain(q, k, v, 0.3, mask, 2.0)
    if mask.left >= 0:
        unseen = max(0, n_keys - n_queries - mask.left)
        k[:, :unseen] = v[:, :unseen] = torch.nan
    for splits in (None, 3):
        assert_close(decode((q, k, v), Call(0.3, mask, softcap=2.0), splits=splits), expected, dtype)


# grouped


def assert_groups(q, k, v, ends, scale, tiles=None):
    groups = zip(q.chunk(len(ends), 1), ends, strict=True)
    outs, lses = zip(*(plain(x, k[:, :n], v[:, :n], scale, CAUSAL) for x, n in groups), strict=True)
    result = grouped_forward(q, k, v, ends, scale, tiles=tiles)
    assert_close(result, (torch.cat(outs, 1), torch.cat(lses, -1)), q.dtype)


GROUPS = [  # (queries a group, ends)
    (50, (77,)),
    (9, (9, 18, 27, 36, 50, 54, 63, 80)),
    (19, (64, 64, 128)),  # equal ends, whole tiles
    (30, (0, 7, 29, 60)),  # rows and a whole group without keys
    (3, (0, 0)),
    (1, (1, 2, 66)),
    *[(513, (513, 1500)), (200, (0, 100, 100, 450, 900)), (512, tuple(range(512, 4097, 512)))] * GPU,
]


@every_dtype
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("chunk, ends", GROUPS, ids=str)
def test_grouped_attention_matches_each_groups_own(dtype, head_dim, chunk, ends):
    q, k, v = qkv(chunk * len(ends), ends[-1] + 2, 2, 1, head_dim, dtype, batch=1)
    assert_groups(q, k, v, ends, head_dim**-0.5)


# the separate kernel


@every_dtype
@pytest.mark.parametrize("heads", [(3, 1, 64), (2, 2, 128)], ids=str)
@pytest.mark.parametrize("mask", [FULL, CAUSAL], ids=Band.describe)
def test_the_triton_kernel_matches_plain_attention(dtype, heads, mask):
    pack = ((1, 19, 4, 0), (1, 33, 0, 12))
    for sizes in ((17, 70), (50, 17), (5, 0), pack):
        assert_matches(TritonFlash(), *inputs(Call(0.125, mask), sizes, *heads, dtype, DEVICE))


@pytest.mark.parametrize("mask, n_queries", [(FULL, 1), (CAUSAL, 3), (Band(100, 0), 3)], ids=str)
def test_a_tree_reads_lengths_that_change_in_place(mask, n_queries):
    """By the kernel: a plan keeps the tensor, and so does a captured call. Keys beyond an element's length are NaN."""
    tokens, dtype = (3000, torch.bfloat16) if GPU else (150, torch.float32)
    q, k, v = qkv(n_queries, tokens, 2, 1, 128 if GPU else 16, dtype, batch=6)
    lengths = torch.tensor([0, 2, 70, 101, tokens, 148], dtype=torch.int32, device=DEVICE)
    fn = make("tree", kernel="decode")
    given = {"causal": mask.right == 0, "window": (mask.left, mask.right), "kv_lengths": lengths, "return_lse": True}
    out, lse = fn(q, k, v, **given)
    if GPU:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out, lse = fn(q, k, v, **given)
    for _ in range(3):
        keys = [x.clone() for x in (k, v)]
        for x, b in product((k, v), range(6)):
            x[b, int(lengths[b]) :] = torch.nan
        out, lse = (graph.replay(), (out, lse))[1] if GPU else fn(q, k, v, **given)
        for x, kept_x in zip((k, v), keys, strict=True):
            x.copy_(kept_x)
        for b, n in enumerate(lengths.tolist()):
            expected = plain(q[b : b + 1], k[b : b + 1, :n], v[b : b + 1, :n], q.shape[-1] ** -0.5, mask)
            assert_close((out[b : b + 1], lse[b : b + 1]), expected, dtype)
        lengths[:4] += 13


@on_gpu
def test_decode_reaches_beyond_two_to_the_31_elements():
    """The last keys of a cache of 2.1e9 elements weigh all."""
    k = torch.zeros(1, (1 << 20) + 8, 16, 128, dtype=torch.bfloat16, device="cuda")
    v, q = torch.zeros_like(k), torch.ones_like(k[:, :1])
    k[:, -8:], v[:, -8:] = 1, 3
    out, lse = decode((q, k, v), Call(1.0))
    assert (out == 3).all() and torch.allclose(lse, torch.full_like(lse, 128 + 2.0794415))


@on_gpu
@every_dtype
def test_later_starts_of_a_kernel_do_as_the_first_at_any_address(dtype):
    """The first start of a shape compiles, those after it go straight to what was compiled."""
    for seed, by in enumerate((0, 0, 1, 8, 1, 0)):  # elements behind a multiple of 16 bytes
        drawn = [normal(1, 300, 4, 128, dtype=dtype, seed=10 * seed + i, device="cuda") for i in range(2)]
        a, total = (x.new_empty(x.numel() + by)[by:].view(x.shape).copy_(x) for x in drawn)
        expected = a.double()
        expected[:, 200:] += drawn[1][:, :100]
        sum_all((total,), [((a,), ((0, 300),)), ((drawn[1][:, :100],), ((200, 300),))])
        assert relative(total, expected) < TOLERANCES[dtype][0]


@on_gpu
def test_a_decode_whose_cache_grows_stays_right():
    """Numbers of keys that Triton has other code for, in turn."""
    cache = [normal(2, 4096, 2, 128, dtype=torch.bfloat16, seed=i, device="cuda") for i in range(2)]
    q = normal(2, 1, 16, 128, dtype=torch.bfloat16, seed=2, device="cuda")
    for n_keys in (1, 2, 1600, 1601, 1616, 2047, 2048, 1, 4095, 4096):
        k, v = (x[:, :n_keys] for x in cache)
        assert_close(decode((q, k, v), Call(128**-0.5)), plain(q, k, v, 128**-0.5, FULL), torch.bfloat16)
