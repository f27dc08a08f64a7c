"""Merging: parts over any rows and keys give the whole, parts without keys change nothing, and the Triton kernel agrees."""

import random
from itertools import pairwise

import pytest
import torch

from attention.ops.merge import merge_triton
from attention.reduction.parts import Accumulator, empty_result, merge, merge_eager
from tests.support.naive import attention, normal

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


def test_a_part_without_keys_changes_nothing_on_either_side():
    q, k, v = qkv()
    for part in (over(q, k, v, torch.arange(SK)), empty_result(q)):
        left, right = [x.clone() for x in part], list(empty_result(q))
        merge_(*left, *empty_result(q))
        merge_(*right, *part)
        assert all(map(torch.equal, (*left, *right), (*part, *part)))


@pytest.mark.parametrize("offset", (-1e4, -200.0, 200.0, 1e4))
def test_parts_of_very_different_weight_neither_overflow_nor_vanish(offset):
    out, part = torch.ones(1, 2, 1, 4), torch.full((1, 2, 1, 4), 3.0)
    lse, part_lse = torch.full((1, 1, 2), 5000.0), torch.full((1, 1, 2), 5000.0 + offset)
    merge_(out, lse, part, part_lse)
    assert (out == (3 if offset > 0 else 1)).all() and (lse == 5000 + max(offset, 0)).all()


def rectangles(draw: random.Random, n_q: int, n_k: int) -> list[tuple[tuple[tuple[int, int], ...], int, int]]:
    """A random division of the queries and keys, in random order: stretches of queries, and the first and last key."""
    cuts = [0, *sorted(draw.sample(range(1, n_q), 4)), n_q]
    stretches = [*pairwise(cuts)]
    rows = [tuple(stretches[i::2]) for i in range(2)] if draw.random() < 0.5 else [(x,) for x in stretches]
    found = []
    for intervals in rows:
        keys = [0, *sorted(draw.sample(range(1, n_k), draw.randint(0, 4))), n_k]
        found += [(intervals, c, d) for c, d in pairwise(keys)]
    draw.shuffle(found)
    return found


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_an_accumulator_merges_parts_over_any_rows(seed, packed):
    q, k, v = qkv()
    whole, whole_lse = over(q, k, v, torch.arange(SK))
    view = (lambda x: x[0]) if packed else (lambda x: x)
    parts = rectangles(random.Random(seed), SQ, SK)
    total = Accumulator(view(q), [intervals for intervals, _, _ in parts])
    for intervals, c, d in parts:
        rows = torch.cat([torch.arange(a, b) for a, b in intervals])
        out, lse = over(q[:, rows], k, v, torch.arange(c, d))
        total.add(view(out), view(lse))
    out, lse = total.result()
    close(out, view(whole))
    close(lse, view(whole_lse))


@pytest.mark.parametrize("rows", [[(0, SQ)], [(0, 5), (5, SQ)]], ids=str)
def test_half_precision_parts_accumulate_in_fp32(rows):
    """Only the parts and the result are rounded to bf16, not what is summed in between."""
    q, k, v = qkv()
    pieces = [(a, b, first) for first in range(0, SK, 3) for a, b in rows]
    total, exact = (Accumulator(x, [((a, b),) for a, b, _ in pieces]) for x in (q.bfloat16(), q))
    for a, b, first in pieces:
        out, lse = over(q[:, a:b], k, v, torch.arange(first, first + 3))
        total.add(out.bfloat16(), lse.float())
        exact.add(out.bfloat16().double(), lse)
    (out, lse), (rounded, whole_lse) = total.result(), exact.result()
    assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
    assert ((out.double() - rounded).abs() <= rounded.abs() * 2.0**-8 + 1e-6).all()
    close(lse.double(), whole_lse, 1e-5)


GPU = torch.cuda.is_available()
DTYPES = [torch.float32, torch.bfloat16, *[torch.float64, torch.float16] * GPU]


@pytest.mark.parametrize("how", [pytest.param(merge if GPU else merge_triton, marks=[pytest.mark.gpu] * GPU)])
@pytest.mark.parametrize("packed, head_dim", [(False, 64), (True, 80)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [(0, 50), (7, 45), (9, 9)], ids=str)
def test_the_triton_kernel_merges_as_eager_does(how, packed, head_dim, dtype, rows):
    """A part into the other in place, and two parts into a third tensor of another dtype; nothing beside the rows. Either or both
    have rows without keys; where packed, heads lie first in memory."""
    (start, stop), wide = rows, torch.float64 if dtype == torch.float64 else torch.float32

    def narrowed(x, x_lse):
        return x[..., start:stop, :, :], x_lse[..., start:stop]

    results = []
    for merged in (how, merge_eager):
        case = []
        for seed, (kind, unseen) in enumerate(((wide, slice(10, 20)), (dtype, slice(15, 40)))):
            out, lse = (
                normal(2, *shape, dtype=x, seed=seed, device="cuda" if GPU else "cpu")
                for shape, x in (((50, 3, head_dim), kind), ((3, 50), wide))
            )
            out[:, unseen], lse[..., unseen] = 0, -torch.inf
            case += [out, 4 * lse]
        if packed:
            case = [x.transpose(1, 2).contiguous().transpose(1, 2)[0] for x in case]
        out, lse, part, part_lse = case
        other, other_lse = torch.full_like(part, 7), torch.full_like(lse, 7)
        merged(*narrowed(other, other_lse), *narrowed(out, lse), *narrowed(part, part_lse))
        merged(*narrowed(out, lse), *narrowed(out, lse), *narrowed(part, part_lse))
        results.append((out, lse, other.to(wide), other_lse))
    exact = 1e-12 if wide == torch.float64 else 1e-6
    for tolerance, x, y in zip((exact, exact, max(exact, torch.finfo(dtype).eps), exact), *results, strict=True):
        assert not x.isnan().any()
        close(x, y, tolerance)  # bf16: cut off under the interpreter, not rounded
