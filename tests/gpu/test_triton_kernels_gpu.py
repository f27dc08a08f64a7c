"""The Triton kernels on a GPU against plain fp64 attention."""

import pytest
import torch

from attention import make
from attention.kernels import Call, name_of
from attention.masks.band import CAUSAL, FULL, Band
from tests.support.naive import TOLERANCES, assert_lse, assert_matches, attention, inputs, kept, normal, relative

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

from attention.geometry.schedules import length  # noqa: E402
from attention.kernels.triton_decode import DecodeKernel  # noqa: E402
from attention.kernels.triton_flash import TritonFlash  # noqa: E402
from attention.kernels.triton_grouped import Tiling, grouped_forward  # noqa: E402
from attention.reduction.grad_sum import sum_all, sum_eager  # noqa: E402
from attention.reduction.parts import empty_result, merge, merge_eager, merge_n, merge_n_eager  # noqa: E402

decode = DecodeKernel().attend
every_half = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=name_of)
every_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=name_of)
every_seed = pytest.mark.parametrize("seed", [0, 100])


def qkv(n_q, n_k, heads, kv_heads, head_dim, dtype, seed, batch=2):
    shapes = ((n_q, heads), (n_k, kv_heads), (n_k, kv_heads))
    return [normal(batch, n, h, head_dim, dtype=dtype, seed=seed + i, device="cuda") for i, (n, h) in enumerate(shapes)]


def plain(q, k, v, scale, mask):
    keep = kept(mask, q.shape[1], k.shape[1], "cuda")
    return attention(q.double(), k.double(), v.double(), scale, keep)


def assert_close(result, expected, dtype):
    (out, lse), (expected_out, expected_lse) = result, expected
    assert out.isfinite().all() and not lse.isnan().any()
    assert (out[(expected_lse == -torch.inf).transpose(1, 2)] == 0).all(), "rows without keys"
    # a GPU's exp2 is an approximation to 2 ulp
    assert relative(out, expected_out) < (3e-6 if dtype == torch.float32 else TOLERANCES[dtype][0])
    assert_lse(lse, expected_lse, 1e-5)


@every_dtype
@every_seed
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("n_queries, n_keys", [(1, 1), (1, 8192), (4, 5003), (16, 777), (1, 0)])
def test_decode_matches_plain_attention(dtype, seed, head_dim, n_queries, n_keys):
    q, k, v = qkv(n_queries, n_keys, 16, 2, head_dim, dtype, seed)
    scale = head_dim**-0.5
    expected = plain(q, k, v, scale, FULL)
    for splits in (None, 1, 3, 40):
        assert_close(decode((q, k, v), Call(scale), splits=splits), expected, dtype)
        assert_close(decode((q, k, v), Call(scale), splits=splits, into=empty_result(q)), expected, dtype)


@every_half
@pytest.mark.parametrize("heads, kv_heads", [(64, 8), (8, 8), (32, 1), (6, 2)])
def test_decode_over_a_long_cache_with_heads_first(dtype, heads, kv_heads):
    q, k, v = qkv(2, 20001, heads, kv_heads, 128, dtype, 0, batch=1)
    k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v))
    assert_close(decode((q, k, v), Call(0.3)), plain(q, k, v, 0.3, FULL), dtype)


@every_dtype
@pytest.mark.parametrize("dims", [(64, 64), (192, 128), (128, 80)], ids=str)
@pytest.mark.parametrize("mask", [CAUSAL, Band(1000, 0), Band(0, 3), Band(-1, 2)], ids=str)
def test_decode_under_bands_with_softcap_and_value_heads_of_another_size(dtype, dims, mask):
    for n_queries, n_keys, softcap in ((1, 5003, None), (4, 5003, 3.0), (5, 3, None), (9, 64, 1.0)):
        q, k, v = qkv(n_queries, n_keys, 16, 2, dims[0], dtype, 0)
        v = normal(2, n_keys, 2, dims[1], dtype=dtype, seed=3, device="cuda")
        keep = kept(mask, n_queries, n_keys, "cuda")
        expected = attention(q.double(), k.double(), v.double(), 0.3, keep, softcap)
        for splits in (None, 3):
            assert_close(decode((q, k, v), Call(0.3, mask, softcap=softcap), splits=splits), expected, dtype)


@pytest.mark.parametrize("mask", [FULL, CAUSAL, Band(100, 0)], ids=str)
@pytest.mark.parametrize("n_queries", [1, 3])
def test_a_captured_tree_reads_lengths_that_change_in_place(mask, n_queries):
    q, k, v = qkv(n_queries, 3000, 16, 2, 128, torch.bfloat16, 0, batch=64)
    lengths = torch.arange(64, device="cuda", dtype=torch.int32) * 47
    fn = make("tree")
    given = {"causal": mask.right == 0, "window": (mask.left, mask.right), "kv_lengths": lengths, "return_lse": True}
    fn(q, k, v, **given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = fn(q, k, v, **given)
    for _ in range(3):
        graph.replay()
        for b, n in enumerate(lengths.clamp(0, 3000).tolist()):
            each = (x[b : b + 1].double() for x in (q, k[:, :n], v[:, :n]))
            expected = attention(*each, 128**-0.5, kept(mask, n_queries, n, "cuda"))
            assert_close((out[b : b + 1], lse[b : b + 1]), expected, torch.bfloat16)
        lengths += 13


def test_decode_reaches_beyond_two_to_the_31_elements():
    """The last keys of a cache of 2.1e9 elements weigh all."""
    n, heads, head_dim = 1 << 20, 16, 128
    k = torch.zeros(1, n + 8, heads, head_dim, dtype=torch.bfloat16, device="cuda")
    v = torch.zeros_like(k)
    q = torch.ones(1, 1, heads, head_dim, dtype=torch.bfloat16, device="cuda")
    k[:, -8:], v[:, -8:] = 1, 3
    out, lse = decode((q, k, v), Call(1.0))
    assert (out == 3).all() and torch.allclose(lse, torch.full_like(lse, 128 + 2.0794415))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=name_of)
@every_seed
@pytest.mark.parametrize("n, n_tokens, heads, head_dim", [(64, 1, 64, 128), (8, 4, 16, 80), (2, 3001, 8, 128)])
def test_n_parts_merge_in_one_kernel_as_in_eager(dtype, seed, n, n_tokens, heads, head_dim):
    parts = normal(n, 2, n_tokens, heads, head_dim, dtype=dtype, seed=seed, device="cuda")
    lses = 4 * normal(n, 2, heads, n_tokens, dtype=torch.float32, seed=seed + 1, device="cuda")
    parts[0, 0], lses[0, 0] = 0, -torch.inf
    parts[:, 1, -1], lses[:, 1, :, -1] = 0, -torch.inf
    expected, expected_lse = torch.empty_like(parts[0], dtype=torch.float32), torch.empty_like(lses[0])
    merge_n_eager(parts, lses, expected, expected_lse)
    out, lse = merge_n(parts, lses)
    assert relative(out, expected.double()) < (1e-6 if dtype == torch.float32 else 4e-3)
    assert_lse(lse, expected_lse.double(), 1e-6)


GROUPS = [  # (queries a group, ends)
    (512, (1024,)),
    (513, (513, 1500)),
    (300, (300, 700, 1200)),
    (256, (256, 512, 768, 1024)),
    (130, tuple(130 * (i + 1) for i in range(8))),
    (200, (0, 100, 100, 450, 900)),  # rows and a group without keys
    (64, (333, 333, 333, 334, 335, 1000)),
    (1, (1, 2, 66)),
]


def expected_groups(q, k, v, ends, scale):
    c = q.shape[1] // len(ends)
    each = [plain(q[:, g * c : g * c + c], k[:, :end], v[:, :end], scale, CAUSAL) for g, end in enumerate(ends)]
    return torch.cat([out for out, _ in each], 1), torch.cat([lse for _, lse in each], -1)


@every_dtype
@every_seed
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("chunk, ends", GROUPS, ids=str)
def test_grouped_attention_matches_each_groups_own(dtype, seed, head_dim, chunk, ends):
    q, k, v = qkv(chunk * len(ends), ends[-1] + 2, 8, 1, head_dim, dtype, seed)
    scale = head_dim**-0.5
    assert_close(grouped_forward(q, k, v, ends, scale), expected_groups(q, k, v, ends, scale), dtype)


@every_half
@pytest.mark.parametrize("tiles", [Tiling(1, 64, 64, 4, 2), Tiling(2, 32, 64, 4, 2), Tiling(4, 32, 64, 8, 3)], ids=str)
def test_any_tiling_gives_the_same_attention(dtype, tiles):
    ends = (300, 600, 1000)
    q, k, v = qkv(3 * 300, 1000, 8, 2, 64, dtype, 0)
    result = grouped_forward(q, k, v, ends, 0.125, tiles=tiles)
    assert_close(result, expected_groups(q, k, v, ends, 0.125), dtype)


@every_half
@pytest.mark.parametrize("groups", [2, 4, 8])
def test_one_fused_call_agrees_with_separate_calls(dtype, groups):
    q, k, v = qkv(4096, 4096, 8, 1, 128, dtype, 5, batch=1)
    c = 4096 // groups
    ends = [c * (g + 1) for g in range(groups)]
    fused, fused_lse = grouped_forward(q, k, v, ends, 0.09)
    for g, end in enumerate(ends):
        rows = slice(g * c, g * c + c)
        out, lse = grouped_forward(q[:, rows], k[:, :end], v[:, :end], (end,), 0.09, True)
        assert relative(fused[:, rows], out.double()) < 5e-3
        assert relative(fused_lse[..., rows], lse.double()) < 1e-5


@every_dtype
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("mask", [FULL, CAUSAL], ids=Band.describe)
def test_the_triton_kernel_matches_plain_attention(dtype, head_dim, mask):
    pack = ((1, 300, 129, 512), (1, 512, 129, 700))
    for sizes in ((512, 512), (515, 1021), (1000, 600), (1, 700), pack):

        def call_of(q_lengths=None, k_lengths=None):
            if q_lengths is None:
                return Call(0.125, mask)
            return Call(0.125).of_packed(mask, q_lengths, k_lengths, torch.device("cuda"))

        assert_matches(TritonFlash(), *inputs(call_of, sizes, 8, 2, head_dim, dtype, "cuda"))


# sums


def sum_parts(out, parts):
    sum_all((out,), [((part,), intervals) for part, intervals in parts])


@every_dtype
@pytest.mark.parametrize("batch, heads, head_dim", [(1, 32, 128), (2, 3, 80)])
@pytest.mark.parametrize("n_parts", [1, 2, 3, 5, 20])
def test_parts_are_summed_as_eager_sums_them_also_in_place(dtype, batch, heads, head_dim, n_parts):
    n = 1003
    for in_place in (False, True):
        whole = normal(batch, n, heads + 2, head_dim, dtype=dtype, seed=99, device="cuda")
        parts = []
        for i in range(n_parts):
            intervals = (((0, n),), ((100, 501), (777, 778)), ((n - 7, n),))[i % 3]
            tokens = sum(stop - start for start, stop in intervals)
            kind = torch.float32 if i % 4 == 3 else dtype
            parts.append((normal(batch, tokens, heads, head_dim, dtype=kind, seed=i, device="cuda"), intervals))
        results = []
        for how in (sum_parts, sum_eager):
            out = whole.clone()[:, :, 1:-1]
            how(out, [*parts, (out, ((0, n),))] if in_place else parts)
            results.append(out)
        torch.testing.assert_close(*results)
        assert in_place or n_parts > 1 or torch.equal(*results)


@every_dtype
@pytest.mark.parametrize("head_dim", [80, 128])
def test_sums_that_are_alike_are_one_launch_and_as_eager_sums_them(dtype, head_dim, monkeypatch):
    from attention.ops import rows

    n, launched, start = 1003, [], rows.TritonLauncher.__call__
    monkeypatch.setattr(rows.TritonLauncher, "__call__", lambda *given: launched.append(1) or start(*given))

    def made(count, unlike):
        outs = [normal(2, n, 10, head_dim, dtype=dtype, seed=100 + i, device="cuda")[:, :, 1:-1] for i in range(count)]
        if unlike:
            outs[-1] = outs[-1].contiguous()
        parts = [(outs, ((0, n),))]
        for j, places in enumerate((((100, 501), (777, 778)), ((600, n - 1),))):
            tokens = length(places)
            of_part = [
                normal(2, tokens, 8, head_dim, dtype=dtype, seed=10 * i + j, device="cuda") for i in range(count)
            ]
            parts.append((of_part, places))
        return outs, parts

    for count, unlike, launches in ((1, False, 1), (2, False, 1), (4, False, 1), (3, True, 3)):
        outs, parts = made(count, unlike)
        launched.clear()
        sum_all(outs, parts)
        assert len(launched) == launches
        again, parts = made(count, unlike)
        for i, out in enumerate(again):
            sum_eager(out, [(of_part[i], places) for of_part, places in parts])
        torch.testing.assert_close(outs, again)


@every_dtype
@pytest.mark.parametrize("batch, heads, head_dim", [(1, 32, 128), (2, 3, 80)])
@pytest.mark.parametrize("n_parts", [1, 3, 20])
def test_many_stretches_are_summed_by_number_as_eager_sums_them(dtype, batch, heads, head_dim, n_parts):
    n, many = 1003, tuple((10 * i, 10 * i + 3 + i % 7) for i in range(100))
    whole = normal(batch, n, heads + 2, head_dim, dtype=dtype, seed=99, device="cuda")
    parts = [
        (normal(batch, length(many), heads, head_dim, dtype=dtype, seed=i, device="cuda"), many) for i in range(n_parts)
    ]
    for given in (parts, [*parts, (None, ((0, n),))]):
        results = []
        for how in (sum_parts, sum_eager):
            out = whole.clone()[:, :, 1:-1]
            how(out, [(out if part is None else part, intervals) for part, intervals in given])
            results.append(out)
        torch.testing.assert_close(*results)


def test_sums_of_new_lengths_compile_nothing_anew():
    from attention.ops.rows import _sum_rows

    compiled = []
    for n in (1000, 1001, 2, 17, 4096):
        x = torch.ones(1, n, 4, 64, device="cuda", dtype=torch.bfloat16)
        sum_parts(torch.empty_like(x), [(x, ((0, n),)), (x[:, : n // 2], ((n - n // 2, n),))])
        compiled.append(sum(len(cache[0]) for cache in _sum_rows.device_caches.values()))
    assert len(set(compiled)) == 1


def shifted(x, by):
    """x at an address `by` elements behind a multiple of 16 bytes."""
    room = x.new_empty(x.numel() + by)
    return room[by:].view(x.shape).copy_(x)


@every_half
def test_later_starts_of_a_kernel_do_as_the_first_at_any_address(dtype):
    """The first start of a shape compiles, those after it go straight to what was compiled."""
    for seed, by in enumerate((0, 0, 1, 8, 1, 0)):
        a, b = (normal(1, 300, 4, 128, dtype=dtype, seed=10 * seed + i, device="cuda") for i in range(2))
        lses = [normal(1, 4, 300, dtype=torch.float32, seed=10 * seed + i, device="cuda") for i in (2, 3)]
        expected, expected_lse = torch.empty_like(a, dtype=torch.float64), lses[0].double()
        merge_eager(expected, expected_lse, a.double(), expected_lse, b.double(), lses[1].double())
        a, b = (shifted(x, by) for x in (a, b))
        merge(a, lses[0], a, lses[0], b, lses[1])
        assert relative(a, expected) < TOLERANCES[dtype][0] and relative(lses[0], expected_lse) < 1e-6
        total = shifted(torch.empty_like(a), by)
        sum_parts(total, [(a, ((0, 300),)), (b[:, :100], ((200, 300),))])
        expected = a.double()
        expected[:, 200:] += b[:, :100]
        assert relative(total, expected) < TOLERANCES[dtype][0]


def test_a_decode_whose_cache_grows_stays_right():
    """Numbers of keys that Triton has other code for, in turn."""
    cache = [normal(2, 4096, 2, 128, dtype=torch.bfloat16, seed=i, device="cuda") for i in range(2)]
    q = normal(2, 1, 16, 128, dtype=torch.bfloat16, seed=2, device="cuda")
    for n_keys in (1, 2, 1600, 1601, 1616, 2047, 2048, 1, 4095, 4096):
        k, v = (x[:, :n_keys] for x in cache)
        assert_close(decode((q, k, v), Call(128**-0.5)), plain(q, k, v, 128**-0.5, FULL), torch.bfloat16)
