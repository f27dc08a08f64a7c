"""The Triton kernels under the interpreter on a CPU against plain fp64 attention. The interpreter has no bf16 dot; the
GPU tests have it."""

from dataclasses import replace
from itertools import chain, pairwise

import pytest
import torch

from attention import make
from attention.geometry import counts
from attention.geometry.counts import Shapes
from attention.kernels import Call, Shape, UnsupportedCall, name_of
from attention.masks.band import CAUSAL, FULL, Band
from attention.reduction.parts import empty_result
from attention.variants.registry import VARIANTS
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


@pytest.mark.parametrize("sizes", [(20, 20), (30, 12), ((5, 9), (7, 4))], ids=str)
@pytest.mark.parametrize("kernel", [TritonFlash(), DecodeKernel()], ids=lambda k: k.name)
@pytest.mark.parametrize("gap", [0, 3])
def test_results_are_written_into_the_tensors_given(kernel, sizes, gap):
    """Into views with other tokens and heads between them; the LSE with a gap and without."""
    if isinstance(kernel, DecodeKernel) and not isinstance(sizes[0], int):
        pytest.skip("decode: dense calls only")

    def call_of(*lengths) -> Call:
        return Call(0.125).of_packed(FULL, *lengths, torch.device("cpu")) if lengths else Call(0.125)

    q, k, v, dout, call = inputs(call_of, sizes, 4, 2, 64, torch.float32)
    out, lse = kernel.forward(q, k, v, call)
    place = torch.full((*q.shape[:-2], 6, 64), torch.nan)[..., 1:5, :]
    place_lse = torch.full((*lse.shape[:-1], lse.shape[-1] + gap), torch.nan)[..., : lse.shape[-1]]
    given = kernel.forward(q, k, v, call, into=(place, place_lse))
    assert given[0] is place and given[1] is place_lse
    assert torch.equal(place, out) and torch.equal(place_lse, lse)
    if isinstance(kernel, TritonFlash):
        into = tuple(torch.full((*x.shape[:-1], 2, 64), torch.nan)[..., 0, :] for x in (q, k, v))
        grads = kernel.backward(dout, q, k, v, out, lse, call, into=into)
        expected = kernel.backward(dout, q, k, v, out, lse, call)
        assert all(x is y and torch.equal(x, z) for x, y, z in zip(grads, into, expected, strict=True))


def test_decode_over_splits_merges_into_the_tensors_given():
    q, k, v = qkv(2, 300, 8, 2, 64, torch.float32)
    expected = decode((q, k, v), Call(0.125), splits=3)
    into = torch.full((2, 2, 10, 64), torch.nan)[:, :, 1:9], torch.full((2, 8, 4), torch.nan)[..., ::2]
    assert decode((q, k, v), Call(0.125), splits=3, into=into) == into
    assert all(map(torch.equal, into, expected))


# decode


@every_dtype
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128])
def test_decode_over_splits_of_the_keys_matches_plain_attention(dtype, head_dim):
    """One number of queries and keys for each dtype and head size; every dtype has them all."""
    which = [*TOLERANCES].index(dtype) + head_dim // 16
    n_queries, n_keys = [(1, 1), (1, 257), (4, 129)][which % 3]
    q, k, v = qkv(n_queries, n_keys, 8, 2, head_dim, dtype, batch=1)
    for splits in (1, 2, 5):
        result = decode((q, k, v), Call(head_dim**-0.5), splits=splits)
        assert result[0].dtype == dtype
        assert_full_attention(result, q, k, v, head_dim**-0.5, TOLERANCES[dtype][0])


@pytest.mark.parametrize("heads, kv_heads, n_queries", [(4, 4, 1), (6, 2, 5), (8, 1, 11), (32, 1, 3)])
def test_decode_takes_any_number_of_queries_a_kv_head(heads, kv_heads, n_queries):
    q, k, v = qkv(n_queries, 70, heads, kv_heads, 64, torch.float16)
    assert_full_attention(decode((q, k, v), Call(0.125), splits=2), q, k, v, 0.125, TOLERANCES[torch.float16][0])


def test_decode_over_no_keys_gives_zero_and_minus_infinity():
    q, k, v = qkv(4, 0, 8, 1, 64, torch.float16)
    out, lse = decode((q, k, v), Call(0.125))
    assert out.dtype == q.dtype and out.shape == q.shape and (out == 0).all()
    assert lse.shape == (2, 8, 4) and (lse == -torch.inf).all()


def test_decode_reads_a_cache_through_its_strides():
    """Heads first in memory, and a part of a longer cache."""
    q, k, v = qkv(2, 200, 8, 2, 80, torch.float32)
    heads_first = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    parts = [heads_first[0], heads_first[1][:, 30:171], v[:, 30:171]]
    assert_full_attention(decode(parts, Call(0.1), splits=2), *parts, 0.1, 1e-6)


@pytest.mark.parametrize("splits", [1, 3])
def test_fp32_results_over_shards_of_the_keys_merge_to_the_whole(splits):
    q, k, v = qkv(1, 150, 8, 1, 64, torch.float16)
    cuts = [0, 40, 40, 149, 150]
    outs, lses = zip(
        *(
            decode((q, k[:, a:b], v[:, a:b]), Call(0.125), splits=splits, into=empty_result(q))
            for a, b in pairwise(cuts)
        ),
        strict=True,
    )
    assert all(out.dtype == torch.float32 for out in outs)
    assert any((out != out.half()).any() for out in outs)  # none was rounded on the way
    assert_full_attention(merged(merge_n_triton, torch.stack(outs), torch.stack(lses)), q, k, v, 0.125, 1e-3)


def test_large_scores_neither_overflow_nor_vanish_in_decode():
    q, k, v = qkv(1, 140, 8, 1, 64, torch.float32)
    assert_full_attention(decode((q, k, v), Call(50.0), splits=2), q, k, v, 50.0, 1e-5)


def test_the_number_of_splits_fills_the_gpu_with_splits_that_are_long_enough():
    for n_keys in (0, 1, 255, 1000, 131072, 1 << 20):
        for programs in (1, 8, 64, 10000):
            splits = split_count(n_keys, programs, 132)
            assert splits == 1 or (n_keys / splits >= 256 and programs * splits < 5 * 132)
    assert split_count(131072, 8, 132) == 16  # 128 of 132 SMs
    assert split_count(131072, 100, 132) == 5  # 500 of 4 times 132; 100, 200, 300 and 400 leave a quarter idle
    assert split_count(1024, 8, 132) == 4  # of 256 keys, however idle
    assert split_count(131072, 8, 1) == 1


def test_the_decode_kernel_says_what_it_does_not_do():
    kernel = DecodeKernel()
    able = Shape("cuda", torch.bfloat16, 64, 8, 128, backward=False)
    assert kernel.missing("cpu") is None and kernel.refuses(able, FULL) is None
    refused = [
        (Shape("cuda", torch.bfloat16, 64, 8, 128), FULL, "backward: forward only"),
        (Shape("cuda", torch.bfloat16, 64, 8, 128, packed=True, backward=False), FULL, "packed: dense calls only"),
        (Shape("cuda", torch.bfloat16, 64, 8, 264, backward=False), FULL, "head_dim=264: up to 256 only"),
        (Shape("cuda", torch.bfloat16, 64, 8, 64, backward=False, value_dim=264), FULL, "v_head_dim=264: up to 256"),
        (Shape("cuda", torch.float64, 64, 8, 64, backward=False), FULL, "dtype=fp64: bf16, fp16 and fp32 only"),
        (Shape("cpu", torch.bfloat16, 64, 8, 64, backward=False), FULL, "dtype=bf16: under Triton's interpreter"),
    ]
    for shape, mask, reason in refused:
        assert (kernel.refuses(shape, mask) or "").startswith(reason)
    q, k, v = qkv(1, 5, 4, 2, 64, torch.float32)
    assert_full_attention(kernel.forward(q, k, v, Call(0.3)), q, k, v, 0.3, 1e-6)


def test_without_the_interpreter_a_cpu_cannot_run_triton(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    for kernel in (DecodeKernel(), TritonFlash()):
        assert "needs a CUDA GPU" in kernel.missing("cpu") and kernel.missing("cuda") is None


@pytest.mark.parametrize("mask", [CAUSAL, Band(0, 0), Band(5, 0), Band(40, 2), Band(-1, 3), Band(130, -1)], ids=str)
@pytest.mark.parametrize("n_queries, n_keys", [(1, 150), (6, 150), (6, 4)])
def test_decode_under_bands_with_softcap_and_value_heads_of_another_size(mask, n_queries, n_keys):
    q, k, v = qkv(n_queries, n_keys, 2, 1, 64, torch.float32, batch=1)
    v = v[..., :40]
    for softcap in (None, 2.0):
        expected = attention(q.double(), k.double(), v.double(), 0.5, kept(mask, n_queries, n_keys), softcap)
        for splits in (1, 3):
            out, lse = decode((q, k, v), Call(0.5, mask, softcap=softcap), splits=splits)
            assert out.shape == (1, n_queries, 2, 40) and relative(out, expected[0]) < 2e-6
            assert_lse(lse, expected[1], 2e-6)


def test_a_window_reads_its_own_keys_only():
    """The others are NaN."""
    q, k, v = qkv(3, 300, 4, 2, 64, torch.float32)
    expected = attention(q.double(), k.double(), v.double(), 0.2, kept(Band(20, 0), 3, 300))
    for x in (k, v):
        x[:, : 300 - 23] = torch.nan
    out, lse = decode((q, k, v), Call(0.2, Band(20, 0)), splits=2)
    assert relative(out, expected[0]) < 1e-6
    assert_lse(lse, expected[1], 1e-6)


@pytest.mark.parametrize("mask", [FULL, CAUSAL, Band(30, 0), Band(3, 1)], ids=str)
@pytest.mark.parametrize("n_queries", [1, 3])
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


def test_a_tree_reads_lengths_that_changed_in_place():
    """By the kernel itself: a plan keeps the tensor, as for a GPU."""
    q, k, v = qkv(1, 40, 4, 2, 16, torch.float32)
    call, lengths = Call(0.25, Band(9, 0)), torch.tensor([[3, 0], [40, 0]])[:, 0]  # strided, int64
    for _ in range(2):
        out, lse = decode((q, k, v), replace(call, lengths=KvLengths(lengths, 0, 40)))
        expected = make("tree", kernel="decode")(
            q, k, v, scale=0.25, window=(9, 0), kv_lengths=lengths, return_lse=True
        )
        assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])
        for b, n in enumerate(lengths.tolist()):
            plain, _ = attention(q[b : b + 1], k[b : b + 1, :n], v[b : b + 1, :n], 0.25, kept(Band(9, 0), 1, n))
            assert torch.allclose(out[b], plain[0], atol=1e-6)
        lengths += torch.tensor([5, -13])


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
@pytest.mark.parametrize("n, n_tokens, head_dim", [(1, 1, 64), (2, 9, 80), (3, 40, 128), (8, 1, 128), (70, 2, 96)])
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


@pytest.mark.parametrize("write", [merge_n_triton, merge_n_eager])
def test_a_merge_writes_where_it_is_told_also_onto_its_first_part(write):
    parts, lses = parts_case(5, 6, 64, torch.float32)
    expected, expected_lse = merged(write, parts, lses)
    heads_first = torch.empty(2, 3, 6, 64, dtype=torch.float16).transpose(1, 2)
    out, lse = merged(write, parts, lses, out=heads_first)
    assert out is heads_first and torch.equal(out, expected.half()) and torch.equal(lse, expected_lse)
    merged(write, parts, lses, out=parts[0], lse=lses[0])
    assert torch.equal(parts[0], expected) and torch.equal(lses[0], expected_lse)


# grouped


def expected_groups(q, k, v, ends, scale):
    c = q.shape[1] // len(ends)
    outs, lses = zip(
        *(
            attention(
                q[:, g * c : g * c + c].double(), k[:, :end].double(), v[:, :end].double(), scale, kept(CAUSAL, c, end)
            )
            for g, end in enumerate(ends)
        ),
        strict=True,
    )
    return torch.cat(outs, 1), torch.cat(lses, -1)


def assert_groups(q, k, v, ends, scale, tiles=None, tolerance=None):
    out, lse = grouped_forward(q, k, v, ends, scale, tiles=tiles)
    expected, expected_lse = expected_groups(q, k, v, ends, scale)
    assert out.dtype == q.dtype and out.shape == q.shape and lse.dtype == torch.float32
    assert (out[(expected_lse == -torch.inf).transpose(1, 2)] == 0).all(), "rows without keys"
    assert relative(out, expected) < (tolerance or TOLERANCES[q.dtype][0])
    assert_lse(lse, expected_lse, 1e-6)


GROUPS = [  # (queries a group, ends)
    (50, (77,)),
    (21, (21, 150)),
    (35, (35, 71, 103)),
    (17, (30, 47, 64, 81)),
    (9, (9, 18, 27, 36, 50, 54, 63, 80)),
    (19, (64, 64, 128)),  # equal ends, whole tiles
    (40, (40, 40, 41, 41)),
    (30, (0, 7, 29, 60)),  # rows and a whole group without keys
    (5, (0, 0, 0, 3, 40, 40, 90)),
    (1, (1, 2, 66)),
]


@pytest.mark.parametrize("dtype, head_dim", [(torch.float32, 64), (torch.float16, 64), (torch.float16, 128)], ids=str)
@pytest.mark.parametrize("chunk, ends", GROUPS, ids=str)
def test_grouped_attention_matches_each_groups_own(dtype, head_dim, chunk, ends):
    q, k, v = qkv(chunk * len(ends), ends[-1] + 2, 2, 1, head_dim, dtype, batch=1)
    assert_groups(q, k, v, ends, head_dim**-0.5)


@pytest.mark.parametrize("pack", [1, 2, 4])
def test_any_tiling_gives_the_same_attention(pack):
    q, k, v = qkv(4 * 37, 150, 2, 1, 64, torch.float32, batch=1)
    for rows, keys in ((16, 16), (32, 64)):
        assert_groups(q, k, v, (20, 37, 100, 149), 0.125, Tiling(pack, rows, keys, 4, 2))
    assert_groups(q[:, :111], k, v, (37, 60, 149), 0.125, Tiling(pack, 16, 32, 4, 2))


def test_grouped_attention_reads_through_strides():
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in qkv(40, 60, 4, 2, 64, torch.float32, batch=2))
    assert_groups(q, k[:, 5:55], v[:, 5:55], (20, 50), 0.125)


def test_large_scores_neither_overflow_nor_vanish_in_grouped_attention():
    """Scores of hundreds are rounded to 2**-16 in fp32."""
    q, k, v = qkv(40, 60, 2, 1, 64, torch.float32)
    assert_groups(q, k, v, (20, 50), 40.0, tolerance=1e-5)


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


NESTED = (37, (20, 37, 100, 149))


@pytest.mark.parametrize("pack, chunk, ends", [(2, *NESTED), (2, 9, (0, 9, 9, 64, 65)), (4, 16, (16, 32, 48))], ids=str)
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


@pytest.mark.parametrize("grouping", ("separate", "packed", "fused"))
def test_a_grouping_reads_the_bytes_of_keys_and_values_that_the_model_says(tiles_read, grouping):
    """Where one program has all of a chunk's queries, and every query head its own keys: others would read them again."""
    options = {"n_groups": 4, "grouping": grouping}
    make("grouped", kernel="triton", **options)(*qkv(64, 64, 3, 3, 64, torch.float32), causal=True)
    problem = VARIANTS["grouped"].problem((0, 64), 1, CAUSAL, options)
    said = counts.kv_bytes_read(problem, Shapes(2, 3, 3, 64, 4), 0, grouping)
    assert sum(n_keys for *_, n_keys in tiles_read) * 64 * 4 == said


# the separate kernel


@every_dtype
@pytest.mark.parametrize("heads", [(3, 1, 64), (2, 2, 128)], ids=str)
@pytest.mark.parametrize("mask", [FULL, CAUSAL], ids=Band.describe)
def test_the_triton_kernel_matches_plain_attention(dtype, heads, mask):
    pack = ((1, 19, 4, 0), (1, 33, 0, 12))
    for sizes in ((33, 33), (17, 70), (50, 17), (1, 65), (5, 0), pack):

        def call_of(q_lengths=None, k_lengths=None):
            if q_lengths is None:
                return Call(0.2, mask)
            return Call(0.2).of_packed(mask, q_lengths, k_lengths, torch.device("cpu"))

        assert_matches(TritonFlash(), *inputs(call_of, sizes, *heads, dtype))


def test_the_triton_kernel_says_what_it_does_not_do():
    kernel = TritonFlash()
    able = Shape("cuda", torch.bfloat16, 8, 2, 64)
    assert kernel.refuses(able, FULL) is None and kernel.refuses(able, CAUSAL) is None
    assert kernel.refuses(able, Band(5, 0)) == "window=(5, 0): no sliding window"
    assert kernel.refuses(Shape("cuda", torch.bfloat16, 8, 2, 80), FULL) == "head_dim=80: 64 and 128 only"
    assert kernel.refuses(Shape("cuda", torch.float64, 8, 2, 64), FULL) == "dtype=fp64: bf16, fp16 and fp32 only"
    with pytest.raises(UnsupportedCall, match="no sliding window"):
        kernel.forward(*qkv(3, 3, 2, 1, 64, torch.float32), Call(1.0, Band(1, 0)))


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
