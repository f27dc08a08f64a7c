"""Merging: any split of the keys gives the whole, parts without keys change nothing, and the Triton kernel agrees."""

import random
from itertools import pairwise

import pytest
import torch

from attention.reduction.parts import Accumulator, empty_result, merge, merge_eager
from tests.support.naive import attention, merge_case, normal

torch.set_num_threads(1)

B, SQ, SK, H, D = 2, 12, 30, 4, 8


def qkv(dtype=torch.float64):
    return [normal(B, n, H, D, dtype=dtype, seed=i) for i, n in enumerate((SQ, SK, SK))]


def over(q, k, v, keys):
    """Attention of all queries over some of the keys."""
    k, v = k[:, keys], v[:, keys]
    return attention(q, k, v, D**-0.5, torch.ones(q.shape[1], k.shape[1], dtype=torch.bool))


def merge_(out, lse, part, part_lse):
    merge(out, lse, out, lse, part, part_lse)


def close(x, expected, tolerance=1e-12):
    torch.testing.assert_close(x, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("seed", range(20))
def test_any_split_of_the_keys_merges_to_the_whole(seed):
    q, k, v = qkv()
    parts = random.Random(seed).randint(1, 9)
    owner = torch.randint(parts, (SK,), generator=torch.Generator().manual_seed(seed))
    out, lse = empty_result(q)
    for p in range(parts + 1):  # the last part has no key, others may have none
        merge_(out, lse, *over(q, k, v, (owner == p).nonzero()[:, 0]))
    whole, whole_lse = over(q, k, v, torch.arange(SK))
    close(out, whole)
    close(lse, whole_lse)


def test_merging_does_not_depend_on_the_order():
    q, k, v = qkv()
    one, other = (over(q, k, v, torch.arange(a, b)) for a, b in ((0, 7), (7, SK)))
    there, back = [x.clone() for x in one], [x.clone() for x in other]
    merge_(*there, *other)
    merge_(*back, *one)
    close(there[0], back[0])
    close(there[1], back[1])


def test_a_part_without_keys_changes_nothing_on_either_side():
    q, k, v = qkv()
    part = over(q, k, v, torch.arange(SK))
    left, right = [x.clone() for x in part], list(empty_result(q))
    merge_(*left, *empty_result(q))
    merge_(*right, *part)
    for merged in (left, right):
        assert torch.equal(merged[0], part[0]) and torch.equal(merged[1], part[1])


def test_two_parts_without_keys_give_zero_and_minus_infinity():
    out, lse = empty_result(qkv()[0])
    assert out.shape == (B, SQ, H, D) and lse.shape == (B, H, SQ)
    merge_(out, lse, *empty_result(qkv()[0]))
    assert (out == 0).all() and (lse == -torch.inf).all()


def test_parts_of_very_different_weight_neither_overflow_nor_vanish():
    for offset in (-1e4, -200.0, 200.0, 1e4):
        out, part = torch.ones(1, 2, 1, 4), torch.full((1, 2, 1, 4), 3.0)
        lse, part_lse = torch.full((1, 1, 2), 5000.0), torch.full((1, 1, 2), 5000.0 + offset)
        merge_(out, lse, part, part_lse)
        assert torch.equal(out, torch.full_like(out, 3.0 if offset > 0 else 1.0))
        assert torch.equal(lse, torch.full_like(lse, 5000.0 + max(offset, 0)))


def rectangles(draw: random.Random, n_q: int, n_k: int) -> list[tuple[int, int, int, int]]:
    """A random division of a rectangle of queries and keys, in random order."""
    found = []
    cuts = [0, *sorted(draw.sample(range(1, n_q), draw.randint(0, 4))), n_q]
    for a, b in pairwise(cuts):
        keys = [0, *sorted(draw.sample(range(1, n_k), draw.randint(0, 4))), n_k]
        found += [(a, b, c, d) for c, d in pairwise(keys)]
    draw.shuffle(found)
    return found


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("seed", range(10))
def test_an_accumulator_merges_parts_over_any_rows(seed, dtype, packed):
    q, k, v = qkv(dtype)
    whole, whole_lse = over(q, k, v, torch.arange(SK))
    view = (lambda x: x[0]) if packed else (lambda x: x)
    parts = rectangles(random.Random(seed), SQ, SK)
    total = Accumulator(view(q), [((a, b),) for a, b, _, _ in parts])
    for a, b, c, d in parts:
        out, lse = over(q[:, a:b], k, v, torch.arange(c, d))
        total.add(view(out), view(lse))
    out, lse = total.result()
    assert out.dtype == lse.dtype == dtype
    close(out, view(whole), 1e-12 if dtype == torch.float64 else 1e-6)
    close(lse, view(whole_lse), 1e-12 if dtype == torch.float64 else 1e-6)


def test_a_part_may_be_over_several_stretches_of_rows():
    q, k, v = qkv()
    whole, whole_lse = over(q, k, v, torch.arange(SK))
    parts = [((0, 3), (5, 9)), ((3, 5), (9, SQ)), ((0, 1), (2, 7)), ((1, 2), (7, 11)), ((0, SQ),)]
    keys = [(0, 9), (0, 9), (9, 20), (9, 20), (20, SK)]
    total = Accumulator(q, [*parts, ((11, SQ),)])
    for intervals, (c, d) in [*zip(parts, keys, strict=True), (((11, SQ),), (9, 20))]:
        rows = torch.cat([torch.arange(a, b) for a, b in intervals])
        total.add(*over(q[:, rows], k, v, torch.arange(c, d)))
    close(total.result()[0], whole)
    close(total.result()[1], whole_lse)


def test_rows_that_an_accumulator_never_sees_are_zero_and_minus_infinity():
    q, k, v = qkv()
    for x, shape in zip(Accumulator(q, []).result(), ((B, SQ, H, D), (B, H, SQ)), strict=True):
        assert x.shape == shape
        assert (x == (0 if x.shape[-1] == D else -torch.inf)).all()
    total = Accumulator(q, [((4, 9),)])
    total.add(*over(q[:, 4:9], k, v, torch.arange(SK)))
    out, lse = total.result()
    whole, whole_lse = over(q, k, v, torch.arange(SK))
    close(out[:, 4:9], whole[:, 4:9])
    close(lse[..., 4:9], whole_lse[..., 4:9])
    for rows in (slice(0, 4), slice(9, SQ)):
        assert (out[:, rows] == 0).all() and (lse[..., rows] == -torch.inf).all()


def test_a_first_part_over_all_rows_becomes_the_result():
    q, k, v = qkv(torch.float32)
    out, lse = over(q, k, v, torch.arange(9))
    first = out.bfloat16().contiguous(), lse
    for others in ([], [((3, 8),)]):
        total = Accumulator(q.bfloat16(), [((0, SQ),), *others])
        total.add(*first)
        for ((a, b),) in others:
            out, lse = over(q[:, a:b], k, v, torch.arange(9, SK))
            total.add(out.bfloat16(), lse)
        assert not total.buffers and not total.kept
        assert total.result()[0] is first[0] and total.result()[1] is first[1]


def test_only_rows_of_three_parts_take_a_wide_buffer():
    q, k, v = qkv(torch.bfloat16)
    parts = [((0, SQ),), ((0, 9),), ((6, SQ),), ((7, 8),)]
    total = Accumulator(q, parts)
    for i, ((a, b),) in enumerate(parts):
        out, lse = over(*(x.double() for x in (q[:, a:b], k, v)), torch.arange(i, i + 1))
        buffers = total.buffers
        total.add(out.bfloat16(), lse.float())
    assert list(buffers) == [0], "the LSE is merged in place"
    assert buffers[0].shape[1] == 3 and buffers[0].dtype == torch.float32 and not total.buffers


@pytest.mark.parametrize("first_whole", [True, False])
def test_half_precision_parts_accumulate_in_fp32(first_whole):
    q, k, v = qkv(torch.bfloat16)
    pieces = [
        (rows, a)
        for a in (range(0, SK, 3) if first_whole else range(SK - 3, -1, -3))
        for rows in ([(0, SQ)] if first_whole else [(0, 5), (5, SQ)])
    ]
    total = Accumulator(q, [(rows,) for rows, _ in pieces])
    rounded = torch.zeros(B, SQ, H, D, dtype=torch.float64)
    _, whole_lse = over(*(x.double() for x in (q, k, v)), torch.arange(SK))
    for (start, stop), a in pieces:
        rows = slice(start, stop)
        out, lse = over(*(x.double() for x in (q[:, rows], k, v)), torch.arange(a, a + 3))
        share = (lse - whole_lse[..., rows]).exp().transpose(1, 2).unsqueeze(-1)
        rounded[:, rows] += out.bfloat16().double() * share
        total.add(out.bfloat16(), lse.float())
    out, lse = total.result()
    assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
    # only the parts and the result are rounded to bf16, not what is summed in between
    assert ((out.double() - rounded).abs() <= rounded.abs() * 2.0**-8 + 1e-6).all()
    close(lse.double(), whole_lse, 1e-5)


@pytest.mark.skipif(torch.cuda.is_available(), reason="not interpreted where there is a GPU; see test_kernels_gpu.py")
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("heads_first", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 80])
@pytest.mark.parametrize("rows", [(0, 50), (7, 45), (12, 13), (9, 9)], ids=str)
def test_the_triton_kernel_merges_as_eager_does(packed, heads_first, dtype, head_dim, rows):
    """A part into the other in place, and two parts into a third tensor of another dtype."""
    from attention.ops.merge import merge_triton

    start, n = rows[0], rows[1] - rows[0]

    def narrowed(x, x_lse):
        return x.narrow(x.dim() - 3, start, n), x_lse.narrow(-1, start, n)

    results = []
    for how in (merge_triton, merge_eager):
        out, lse, part, part_lse = merge_case(packed, heads_first, dtype, head_dim)
        other, other_lse = torch.full_like(part, 7), torch.full_like(lse, 7)
        how(*narrowed(other, other_lse), *narrowed(out, lse), *narrowed(part, part_lse))
        how(*narrowed(out, lse), *narrowed(out, lse), *narrowed(part, part_lse))
        results.append((out, lse, other, other_lse))
    (out, lse, other, other_lse), (expected, expected_lse, expected_other, _) = results
    assert out.isfinite().all() and not lse.isnan().any()
    close(out, expected, 1e-6)
    close(lse, expected_lse, 1e-6)
    close(other.float(), expected_other.float(), max(1e-6, torch.finfo(dtype).eps))  # bf16: cut off, not rounded
    assert torch.equal(other_lse.narrow(-1, start, n), lse.narrow(-1, start, n))
    before = merge_case(packed, heads_first, dtype, head_dim)[0]
    dim = out.dim() - 3
    assert torch.equal(out.narrow(dim, 0, start), before.narrow(dim, 0, start))
    assert (other.narrow(dim, 0, start) == 7).all()
    assert n == 0 or not torch.equal(out, before)


def test_the_triton_kernel_refuses_a_strided_head_dim():
    from attention.ops.merge import merge_triton

    out, lse, part, part_lse = merge_case(False, False, torch.float32, 64)
    with pytest.raises(ValueError, match="head dim contiguous"):
        merge_triton(out, lse, out, lse, part.transpose(-1, -2).contiguous().transpose(-1, -2), part_lse)
