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


@pytest.mark.parametrize("seed", range(6))
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


def test_a_part_without_keys_changes_nothing_on_either_side():
    q, k, v = qkv()
    part = over(q, k, v, torch.arange(SK))
    left, right = [x.clone() for x in part], list(empty_result(q))
    merge_(*left, *empty_result(q))
    merge_(*right, *part)
    for merged in (left, right):
        assert torch.equal(merged[0], part[0]) and torch.equal(merged[1], part[1])
    out, lse = empty_result(q)
    merge_(out, lse, *empty_result(q))
    assert not out.any() and (lse == -torch.inf).all()


@pytest.mark.parametrize("offset", (-1e4, -200.0, 200.0, 1e4))
def test_parts_of_very_different_weight_neither_overflow_nor_vanish(offset):
    out, part = torch.ones(1, 2, 1, 4), torch.full((1, 2, 1, 4), 3.0)
    lse, part_lse = torch.full((1, 1, 2), 5000.0), torch.full((1, 1, 2), 5000.0 + offset)
    merge_(out, lse, part, part_lse)
    assert (out == (3 if offset > 0 else 1)).all() and (lse == 5000 + max(offset, 0)).all()


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
@pytest.mark.parametrize("seed", range(5))
def test_an_accumulator_merges_parts_over_any_rows(seed, packed):
    q, k, v = qkv()
    whole, whole_lse = over(q, k, v, torch.arange(SK))
    view = (lambda x: x[0]) if packed else (lambda x: x)
    parts = rectangles(random.Random(seed), SQ, SK)
    total = Accumulator(view(q), [((a, b),) for a, b, _, _ in parts])
    for a, b, c, d in parts:
        out, lse = over(q[:, a:b], k, v, torch.arange(c, d))
        total.add(view(out), view(lse))
    out, lse = total.result()
    close(out, view(whole))
    close(lse, view(whole_lse))


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


@pytest.mark.parametrize("rows", [[], [((4, 9),)]], ids=str)
def test_rows_that_an_accumulator_never_sees_are_zero_and_minus_infinity(rows):
    q, k, v = qkv()
    total, whole = Accumulator(q, rows), over(q, k, v, torch.arange(SK))
    for ((a, b),) in rows:
        total.add(*over(q[:, a:b], k, v, torch.arange(SK)))
        whole[0][:, :a], whole[0][:, b:], whole[1][..., :a], whole[1][..., b:] = 0, 0, -torch.inf, -torch.inf
    out, lse = total.result()
    if rows:
        close(out, whole[0])
        close(lse, whole[1])
    else:
        assert out.shape == q.shape and not out.any() and (lse == -torch.inf).all()


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


@pytest.mark.parametrize("rows", [[(0, SQ)], [(0, 5), (5, SQ)]], ids=str)
def test_half_precision_parts_accumulate_in_fp32(rows):
    """Only the parts and the result are rounded to bf16, not what is summed in between."""
    q, k, v = qkv(torch.bfloat16)
    exact = [x.double() for x in (q, k, v)]
    pieces = [(a, b, first) for first in range(0, SK, 3) for a, b in rows]
    total = Accumulator(q, [((a, b),) for a, b, _ in pieces])
    rounded = torch.zeros(B, SQ, H, D, dtype=torch.float64)
    _, whole_lse = over(*exact, torch.arange(SK))
    for a, b, first in pieces:
        out, lse = over(exact[0][:, a:b], *exact[1:], torch.arange(first, first + 3))
        rounded[:, a:b] += out.bfloat16().double() * (lse - whole_lse[..., a:b]).exp().transpose(1, 2).unsqueeze(-1)
        total.add(out.bfloat16(), lse.float())
    out, lse = total.result()
    assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
    assert ((out.double() - rounded).abs() <= rounded.abs() * 2.0**-8 + 1e-6).all()
    close(lse.double(), whole_lse, 1e-5)


@pytest.mark.skipif(torch.cuda.is_available(), reason="not interpreted where there is a GPU; see test_kernels_gpu.py")
@pytest.mark.parametrize("packed, heads_first", [(False, False), (True, True)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [(0, 50), (7, 45), (9, 9)], ids=str)
def test_the_triton_kernel_merges_as_eager_does(packed, heads_first, dtype, rows):
    """A part into the other in place, and two parts into a third tensor of another dtype; nothing beside the rows."""
    from attention.ops.merge import merge_triton

    start, n = rows[0], rows[1] - rows[0]

    def narrowed(x, x_lse):
        return x.narrow(x.dim() - 3, start, n), x_lse.narrow(-1, start, n)

    results = []
    for how in (merge_triton, merge_eager):
        out, lse, part, part_lse = merge_case(packed, heads_first, dtype, 80)
        other, other_lse = torch.full_like(part, 7), torch.full_like(lse, 7)
        how(*narrowed(other, other_lse), *narrowed(out, lse), *narrowed(part, part_lse))
        how(*narrowed(out, lse), *narrowed(out, lse), *narrowed(part, part_lse))
        results.append((out, lse, other.float(), other_lse))
    for tolerance, x, y in zip((1e-6, 1e-6, max(1e-6, torch.finfo(dtype).eps), 1e-6), *results, strict=True):
        close(x, y, tolerance)  # bf16: cut off, not rounded
    before = merge_case(packed, heads_first, dtype, 80)[0]
    dim = before.dim() - 3
    out, _, other, _ = results[0]
    assert (
        torch.equal(out.narrow(dim, 0, start), before.narrow(dim, 0, start))
        and (other.narrow(dim, 0, start) == 7).all()
    )


def test_the_triton_kernel_refuses_a_strided_head_dim():
    from attention.ops.merge import merge_triton

    out, lse, part, part_lse = merge_case(False, False, torch.float32, 64)
    with pytest.raises(ValueError, match="head dim contiguous"):
        merge_triton(out, lse, out, lse, part.transpose(-1, -2).contiguous().transpose(-1, -2), part_lse)
