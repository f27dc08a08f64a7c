"""The Triton kernels under the interpreter on a CPU against plain fp64 attention. The interpreter has no bf16 dot; the
GPU tests have it."""

from dataclasses import replace
from itertools import chain

import pytest
import torch

from attention import make
from attention.kernels import Call, Shape, UnsupportedCall, name_of
from attention.masks.band import CAUSAL, FULL, Band
from attention.reduction.parts import empty_result
from tests.support.naive import TOLERANCES, assert_lse, assert_matches, attention, inputs, kept, normal, relative

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="not interpreted where there is a GPU; see test_triton_kernels_gpu.py"
)

from triton.runtime import interpreter  # noqa: E402

from attention.kernels import triton_flash  # noqa: E402
from attention.kernels import triton_grouped as grouped  # noqa: E402
from attention.kernels.interface import KvLengths  # noqa: E402
from attention.kernels.triton_decode import DecodeKernel, split_count  # noqa: E402
from attention.kernels.triton_flash import TritonFlash  # noqa: E402
from attention.kernels.triton_grouped import Tiling, grouped_forward, tiling  # noqa: E402
from attention.ops.merge import merge_n_triton  # noqa: E402
from attention.reduction.parts import merge_n, merge_n_eager  # noqa: E402

decode = DecodeKernel().attend
torch.set_num_threads(1)

every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=name_of)


def qkv(n_q, n_k, heads, kv_heads, head_dim, dtype, batch=2):
    shapes = ((n_q, heads), (n_k, kv_heads), (n_k, kv_heads))
    return [normal(batch, n, h, head_dim, dtype=dtype, seed=i) for i, (n, h) in enumerate(shapes)]


def assert_full_attention(result, q, k, v, scale, tolerance):
    expected, expected_lse = attention(q.double(), k.double(), v.double(), scale, kept(FULL, q.shape[1], k.shape[1]))
    out, lse = result
    assert out.shape == q.shape and lse.dtype == torch.float32
    assert relative(out, expected) < tolerance
    assert_lse(lse, expected_lse, 1e-6)


@pytest.mark.parametrize("sizes", [(30, 12), ((5, 9), (7, 4))], ids=str)
@pytest.mark.parametrize("kernel", [TritonFlash(), DecodeKernel()], ids=lambda k: k.name)
def test_results_are_written_into_the_tensors_given(kernel, sizes):
    """Into views with other tokens and heads between them."""
    if isinstance(kernel, DecodeKernel) and not isinstance(sizes[0], int):
        pytest.skip("decode: dense calls only")

    def call_of(*lengths) -> Call:
        return Call(0.125).of_packed(FULL, *lengths, torch.device("cpu")) if lengths else Call(0.125)

    q, k, v, dout, call = inputs(call_of, sizes, 4, 2, 64, torch.float32)
    out, lse = kernel.forward(q, k, v, call)
    place = torch.full((*q.shape[:-2], 6, 64), torch.nan)[..., 1:5, :]
    place_lse = torch.full((*lse.shape[:-1], lse.shape[-1] + 3), torch.nan)[..., : lse.shape[-1]]
    written = kernel.forward(q, k, v, call, into=(place, place_lse))
    assert written[0] is place and written[1] is place_lse
    assert torch.equal(place, out) and torch.equal(place_lse, lse)
    if isinstance(kernel, TritonFlash):
        into = tuple(torch.full((*x.shape[:-1], 2, 64), torch.nan)[..., 0, :] for x in (q, k, v))
        grads = kernel.backward(dout, q, k, v, out, lse, call, into=into)
        expected = kernel.backward(dout, q, k, v, out, lse, call)
        assert all(x is y and torch.equal(x, z) for x, y, z in zip(grads, into, expected, strict=True))


# decode


@every_dtype
@pytest.mark.parametrize(
    "n_queries, n_keys, heads, kv_heads, head_dim",
    [(1, 1, 8, 2, 64), (1, 257, 4, 4, 96), (4, 129, 8, 2, 80), (5, 70, 32, 1, 128), (4, 0, 8, 1, 64)],
)
def test_decode_over_splits_of_the_keys_matches_plain_attention(dtype, n_queries, n_keys, heads, kv_heads, head_dim):
    """Of a cache that is a part of a longer one, with heads first in memory; scores of tens neither overflow nor vanish."""
    q, k, v = qkv(n_queries, n_keys + 40, heads, kv_heads, head_dim, dtype, batch=1)
    k, v = k.transpose(1, 2).contiguous().transpose(1, 2)[:, 30 : n_keys + 30], v[:, 30 : n_keys + 30]
    for splits, scale in ((1, 0.1), (2, 0.1), (5, 5.0 if dtype == torch.float32 else 0.1)):
        result = decode((q, k, v), Call(scale), splits=splits)
        assert result[0].dtype == dtype
        assert_full_attention(result, q, k, v, scale, 3 * TOLERANCES[dtype][0])


def test_the_number_of_splits_fills_the_gpu_with_splits_that_are_long_enough():
    assert split_count(131072, 8, 132) == 16  # 128 of 132 SMs
    assert split_count(131072, 100, 132) == 5  # 500 of 4 times 132; 100, 200, 300 and 400 leave a quarter idle
    assert split_count(1024, 8, 132) == 4  # of 256 keys, however idle
    assert split_count(131072, 8, 1) == 1


def test_kernels_say_what_they_do_not_do(monkeypatch):
    base = Shape("cuda", torch.bfloat16, 64, 8, 128, backward=False)
    refused = [
        (DecodeKernel(), {"backward": True}, FULL, "backward: forward only"),
        (DecodeKernel(), {"packed": True}, FULL, "packed: dense calls only"),
        (DecodeKernel(), {"head_dim": 264}, FULL, "head_dim=264: up to 256 only"),
        (DecodeKernel(), {"value_dim": 264}, FULL, "v_head_dim=264: up to 256"),
        (DecodeKernel(), {"dtype": torch.float64}, FULL, "dtype=fp64: bf16, fp16 and fp32 only"),
        (DecodeKernel(), {"device": "cpu"}, FULL, "dtype=bf16: under Triton's interpreter"),
        (TritonFlash(), {}, Band(5, 0), "window=(5, 0): no sliding window"),
        (TritonFlash(), {"head_dim": 80}, FULL, "head_dim=80: 64 and 128 only"),
        (TritonFlash(), {"dtype": torch.float64}, FULL, "dtype=fp64: bf16, fp16 and fp32 only"),
    ]
    for kernel, changes, mask, reason in refused:
        assert kernel.refuses(base, FULL) is None
        assert (kernel.refuses(replace(base, **changes), mask) or "").startswith(reason)
    with pytest.raises(UnsupportedCall, match="no sliding window"):
        TritonFlash().forward(*qkv(3, 3, 2, 1, 64, torch.float32), Call(1.0, Band(1, 0)))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    for kernel in (DecodeKernel(), TritonFlash()):
        assert "needs a CUDA GPU" in kernel.missing("cpu") and kernel.missing("cuda") is None


@pytest.mark.parametrize("mask", [CAUSAL, Band(5, 0), Band(40, 2), Band(-1, 3)], ids=str)
@pytest.mark.parametrize("n_queries, n_keys", [(6, 150), (6, 4)])
def test_decode_under_bands_with_softcap_and_value_heads_of_another_size(n_queries, n_keys, mask):
    """A window reads its own keys only: the others are NaN."""
    q, k, v = qkv(n_queries, n_keys, 2, 1, 64, torch.float32, batch=1)
    v = v[..., :40].clone()
    expected = attention(q.double(), k.double(), v.double(), 0.5, kept(mask, n_queries, n_keys), 2.0)
    if mask.left >= 0:
        k[:, : max(0, n_keys - n_queries - mask.left)] = v[:, : max(0, n_keys - n_queries - mask.left)] = torch.nan
    for splits in (1, 3):
        out, lse = decode((q, k, v), Call(0.5, mask, softcap=2.0), splits=splits)
        assert out.shape == (1, n_queries, 2, 40) and relative(out, expected[0]) < 2e-6
        assert_lse(lse, expected[1], 2e-6)


@pytest.mark.parametrize("mask", [FULL, CAUSAL, Band(3, 1)], ids=str)
@pytest.mark.parametrize("n_queries", [3])
def test_decode_over_elements_of_different_lengths_merges_over_shards(mask, n_queries):
    """The keys in two calls, as on two ranks; those beyond an element's length are NaN."""
    lengths = torch.tensor([0, 2, 70, 150, 300, -4], dtype=torch.int32)
    q, k, v = qkv(n_queries, 150, 2, 1, 16, torch.float32, batch=len(lengths))
    held = lengths.clamp(0, 150).tolist()
    for x in (k, v):
        for b, n in enumerate(held):
            x[b, n:] = torch.nan
    parts = []
    for first, stop in ((0, 64), (64, 150)):
        call = Call(0.3, mask, lengths=KvLengths(lengths, first, 150))
        parts.append(decode((q, k[:, first:stop], v[:, first:stop]), call, splits=3, into=empty_result(q)))
    outs, lses = zip(*parts, strict=True)
    out, lse = merge_n(torch.stack(outs), torch.stack(lses))
    for b, n in enumerate(held):
        each = (x[b : b + 1].double() for x in (q, k[:, :n], v[:, :n]))
        expected, expected_lse = attention(*each, 0.3, kept(mask, n_queries, n))
        assert float((out[b] - expected[0]).abs().max()) < 1e-6
        assert_lse(lse[b], expected_lse[0], 1e-6)


# merging n parts


def parts_case(n: int, n_tokens: int, head_dim: int, dtype: torch.dtype):
    """n parts, where part 0 has no key for the first rows, and no part has one for the last row."""
    parts = normal(n, 2, n_tokens, 3, head_dim, dtype=torch.float64, seed=0)
    lses = 4 * normal(n, 2, 3, n_tokens, dtype=torch.float64, seed=1)
    for rows, where in ((slice(0, n_tokens // 2), slice(0, 1)), (slice(n_tokens - 1, None), slice(None))):
        parts[where, :, rows], lses[where, :, :, rows] = 0, -torch.inf
    return parts.to(dtype), lses.float()


def merged(write, parts, lses, out=None, lse=None):
    """As `merge_n` in fp32, by a given kernel."""
    out = torch.empty_like(parts[0], dtype=torch.float32) if out is None else out
    lse = torch.empty_like(lses[0]) if lse is None else lse
    write(parts, lses, out, lse)
    return out, lse


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name_of)
@pytest.mark.parametrize("n, n_tokens, head_dim", [(1, 1, 64), (3, 40, 80), (70, 2, 128)])
def test_n_parts_merge_in_one_kernel_as_in_eager_and_in_fp64(dtype, n, n_tokens, head_dim):
    parts, lses = parts_case(n, n_tokens, head_dim, dtype)
    total = lses.double().logsumexp(0)
    weights = (lses.double() - total.masked_fill(total == -torch.inf, 0)).exp().transpose(-1, -2).unsqueeze(-1)
    expected = (parts.double() * weights).sum(0)
    for write in (merge_n_triton, merge_n_eager):
        out, lse = merged(write, parts, lses)
        assert (out[:, -1] == 0).all() and (lse[..., -1] == -torch.inf).all()
        assert relative(out, expected) < 1e-6
        assert_lse(lse, total, 1e-6)
        if dtype == torch.float32:  # also onto the first part
            first = parts.clone(), lses.clone()
            merged(write, *first, out=first[0][0], lse=first[1][0])
            assert torch.equal(first[0][0], out) and torch.equal(first[1][0], lse)


# grouped


def assert_groups(q, k, v, ends, scale, tiles=None):
    out, lse = grouped_forward(q, k, v, ends, scale, tiles=tiles)
    groups = zip(q.double().chunk(len(ends), 1), ends, strict=True)
    expected = [
        attention(x, k[:, :n].double(), v[:, :n].double(), scale, kept(CAUSAL, x.shape[1], n)) for x, n in groups
    ]
    outs, lses = zip(*expected, strict=True)
    assert out.dtype == q.dtype and out.shape == q.shape and lse.dtype == torch.float32
    assert relative(out, torch.cat(outs, 1)) < TOLERANCES[q.dtype][0]
    assert_lse(lse, torch.cat(lses, -1), 1e-6)


GROUPS = [  # (queries a group, ends)
    (50, (77,)),
    (9, (9, 18, 27, 36, 50, 54, 63, 80)),
    (19, (64, 64, 128)),  # equal ends, whole tiles
    (30, (0, 7, 29, 60)),  # rows and a whole group without keys
    (1, (1, 2, 66)),
]


@pytest.mark.parametrize("dtype, head_dim", [(torch.float32, 64), (torch.float16, 128)], ids=str)
@pytest.mark.parametrize("chunk, ends", GROUPS, ids=str)
def test_grouped_attention_matches_each_groups_own(dtype, head_dim, chunk, ends):
    q, k, v = qkv(chunk * len(ends), ends[-1] + 2, 2, 1, head_dim, dtype, batch=1)
    assert_groups(q, k, v, ends, head_dim**-0.5)


@pytest.mark.parametrize("tiles", [Tiling(1, 16, 16, 4, 2), Tiling(2, 32, 64, 4, 2), Tiling(4, 16, 32, 4, 2)], ids=str)
def test_any_tiling_gives_the_same_attention(tiles):
    """Also of tensors with strides."""
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in qkv(148, 155, 2, 1, 64, torch.float32, batch=1))
    assert_groups(q, k[:, 5:], v[:, 5:], (20, 37, 100, 149), 0.125, tiles)
    assert_groups(q[:, :111], k, v, (37, 60, 149), 0.125, tiles)


def test_the_default_tiling_covers_every_group_in_at_most_four_sets():
    for groups in range(1, 9):
        for head_dim in (64, 128):
            for itemsize in (2, 4):
                tiles = tiling(groups, head_dim, itemsize)
                assert tiles.sets(groups) <= 4 and tiles.pack * tiles.rows >= 16
                if itemsize == 2:  # the accumulators fit: 128 registers a thread of 8 warps
                    assert tiles.sets(groups) * tiles.pack * tiles.rows * head_dim <= 128 * 256


def test_grouped_attention_over_no_keys_gives_zero_and_minus_infinity():
    q, k, _ = qkv(6, 0, 2, 1, 64, torch.float32)
    for queries, keys in ((q, k), (q[:, :0], k)):
        out, lse = grouped_forward(queries, keys, keys, (0, 0), 0.125)
        assert out.shape == queries.shape and (out == 0).all() and (lse == -torch.inf).all()
        assert lse.shape == (2, 2, queries.shape[1])


@pytest.mark.parametrize(
    "head_dim, dtype, reason",
    [(80, torch.float32, "head_dim=80: 64 and 128 only"), (64, torch.float64, "dtype=fp64: .* fp16 and fp32 only")],
)
def test_grouping_fused_takes_what_the_triton_kernel_takes(head_dim, dtype, reason):
    with pytest.raises(UnsupportedCall, match=f"grouping=fused: {reason}; take grouping=separate"):
        make("grouped", grouping="fused")(*qkv(4, 4, 2, 1, head_dim, dtype), causal=True)


@pytest.fixture
def tiles_read(monkeypatch):
    """A list of what the grouped kernel's programs load of k and v, found by the addresses: which of both, the program's place
    in the grid, the first key and how many keys."""
    found, given = [], {}
    plain, load = grouped.grouped_forward, interpreter.InterpreterBuilder.create_masked_load

    def called(q, k, v, *args, **options):
        given.update(k=k, v=v)
        return plain(q, k, v, *args, **options)

    def loaded(builder, ptrs, mask, *rest):
        at = ptrs.data[mask.data].astype(int)
        for name, x in given.items():
            place = (at - x.data_ptr()) // x.element_size()
            extent = sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
            if at.size and place.min() >= 0 and place.max() <= extent:
                keys = set((place % x.stride(0) // x.stride(1)).flat)
                found.append((name, tuple(map(int, builder.grid_idx)), min(keys), len(keys)))
        return load(builder, ptrs, mask, *rest)

    for module in (grouped, triton_flash):
        monkeypatch.setattr(module, "grouped_forward", called)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_masked_load", loaded)
    return found


@pytest.mark.parametrize("pack, chunk, ends", [(2, 37, (20, 37, 100, 149)), (4, 9, (0, 9, 9, 64, 65))], ids=str)
def test_a_tile_of_keys_is_read_once_for_all_groups_that_attend_it(tiles_read, pack, chunk, ends):
    tiles, heads = Tiling(pack, 16, 32, 4, 2), 2
    q, k, v = qkv(chunk * len(ends), ends[-1] + 2, heads, 1, 64, torch.float32, batch=1)
    by_group = []  # of each group (block of queries, first key) where some query attends some key of the tile
    for end in ends:
        blocks = [queries.split(tiles.keys, 1) for queries in kept(CAUSAL, chunk, end).split(tiles.rows)]
        by_group.append([(i, j * tiles.keys) for i, row in enumerate(blocks) for j, x in enumerate(row) if x.any()])

    def expected(attended):
        """The longest block of queries has the first program."""
        return sorted((x, (len(blocks) - 1 - i, h, 0), key) for i, key in attended for x in "kv" for h in range(heads))

    grouped.grouped_forward(q, k, v, ends, 0.125, tiles=tiles)
    assert sorted(each[:3] for each in tiles_read) == expected(set(chain(*by_group)))
    tiles_read.clear()
    for mine, end in zip(q.split(chunk, 1), ends, strict=True):
        grouped_forward(mine, k[:, :end], v[:, :end], (end,), 0.125, True, tiles)
    assert sorted(each[:3] for each in tiles_read) == expected(chain(*by_group))


# the separate kernel


@every_dtype
@pytest.mark.parametrize("heads", [(3, 1, 64), (2, 2, 128)], ids=str)
@pytest.mark.parametrize("mask", [FULL, CAUSAL], ids=Band.describe)
def test_the_triton_kernel_matches_plain_attention(dtype, heads, mask):
    def call_of(*lengths) -> Call:
        return Call(0.2).of_packed(mask, *lengths, torch.device("cpu")) if lengths else Call(0.2, mask)

    for sizes in ((17, 70), (50, 17), (5, 0), ((1, 19, 4, 0), (1, 33, 0, 12))):
        assert_matches(TritonFlash(), *inputs(call_of, sizes, *heads, dtype))


def test_a_function_of_the_flash_kernel_has_gradients():
    """A local call takes its `gradients` directly."""
    q, k, v = (torch.randn(1, 32, 2, 64, requires_grad=True) for _ in range(3))
    dout = torch.randn(1, 32, 2, 64)
    ours, plain = (
        torch.autograd.grad(make("dense", kernel=kernel)(q, k, v, causal=True), (q, k, v), dout)
        for kernel in ("triton", "math")
    )
    for x, y in zip(ours, plain, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)
