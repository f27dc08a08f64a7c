"""Sums of parts over different tokens: against fp64, in place, through strides, and the Triton kernel as eager does."""

import random

import pytest
import torch

from attention.geometry.intervals import length
from attention.reduction.grad_sum import MOST_PROGRAMS, _one_launch, sum_all, sum_eager, sum_numbered
from attention.reduction.parts import Sum
from tests.support.naive import normal

torch.set_num_threads(1)

needs_interpreter = pytest.mark.skipif(
    torch.cuda.is_available(), reason="not interpreted where there is a GPU; see test_triton_kernels_gpu.py"
)
both = pytest.mark.parametrize("how", ["eager", pytest.param("triton", marks=needs_interpreter)])


def summed(how, out, parts):
    if how == "eager":
        return sum_eager(out, parts)
    return sum_numbered((out,), [((part,), intervals) for part, intervals in parts])


def expected(out, parts):
    total = torch.zeros(out.shape, dtype=torch.float64)
    for part, intervals in parts:
        at = 0
        for start, stop in intervals:
            total[..., start:stop, :, :] += part[..., at : at + stop - start, :, :]
            at += stop - start
    return total


def stretches(draw: random.Random, n: int, most: int):
    """Random disjoint intervals of `[0, n)` in order; some touch, some are empty."""
    cuts = sorted(draw.choices(range(n + 1), k=2 * draw.randint(1, most)))
    return tuple(zip(cuts[::2], cuts[1::2], strict=True))


def near(how, out, exact):
    """Rounded once: within half a unit of the last place, beside the sum's own fp32 error. The interpreter cuts off what
    a GPU rounds to bf16."""
    units = 1 if how != "eager" and out.dtype == torch.bfloat16 else 0.5
    return ((out.double() - exact).abs() <= exact.abs() * torch.finfo(out.dtype).eps * units * 1.001 + 1e-6).all()


@both
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("seed", range(4))
def test_parts_over_any_tokens_sum_to_what_they_sum_to_in_fp64(how, packed, dtype, seed):
    draw = random.Random(seed)
    n, leading = 37, () if packed else (2,)
    out = torch.full((*leading, n, 3, 40), torch.nan, dtype=dtype)
    parts = []
    for i in range(draw.randint(1, 6)):
        intervals = stretches(draw, n, 3)
        kind = draw.choice([dtype, torch.float32])
        parts.append((normal(*leading, length(intervals), 3, 40, dtype=kind, seed=i), intervals))
    summed(how, out, parts)
    assert near(how, out, expected(out, parts))


@both
def test_tokens_that_no_part_has_are_zero(how):
    for parts in ([], [(torch.ones(2, 3, 2, 8), ((4, 7),))], [(torch.ones(2, 0, 2, 8), ())]):
        out = torch.full((2, 9, 2, 8), torch.nan)
        summed(how, out, parts)
        assert torch.equal(out.double(), expected(out, parts))


@both
def test_a_part_may_lie_in_the_sum_itself(how):
    out = normal(2, 50, 4, 64, dtype=torch.bfloat16, seed=0)
    rest = normal(2, 20, 4, 64, dtype=torch.bfloat16, seed=1)
    exact = expected(out, [(out, ((0, 50),)), (rest, ((5, 10), (30, 45)))])
    summed(how, out, [(out, ((0, 50),)), (rest, ((5, 10), (30, 45)))])
    assert near(how, out, exact)
    exact = expected(out, [(out[:, 10:30], ((10, 30),)), (rest, ((0, 20),))])
    summed(how, out, [(out[:, 10:30], ((10, 30),)), (rest, ((0, 20),))])
    assert near(how, out, exact)


@both
@pytest.mark.parametrize("head_dim", [64, 80])
def test_sums_read_and_write_through_strides(how, head_dim):
    """A slice of the heads, tokens of a longer tensor, and heads first in memory."""
    whole = torch.full((2, 40, 6, head_dim), 7.0)
    parts = [
        (normal(2, 30, 8, head_dim, dtype=torch.float32, seed=1)[:, 5:15, 2:4], ((20, 30),)),
        (normal(2, 2, 40, head_dim, dtype=torch.float32, seed=2).transpose(1, 2), ((0, 40),)),
    ]
    for given in (parts[:1], parts):
        out = whole.clone()
        summed(how, out[:, :, 3:5], given)
        assert near(how, out[:, :, 3:5], expected(out[:, :, 3:5], given))
        assert (out[:, :, :3] == 7).all() and (out[:, :, 5:] == 7).all()


@both
@pytest.mark.parametrize("n_parts", [16, 17, 40])
def test_any_number_of_parts_is_rounded_once(how, n_parts):
    out = torch.full((21, 2, 16), torch.nan, dtype=torch.bfloat16)
    intervals = [((0, 21),) if i % 2 else ((0, 5), (5, 6), (9, 20)) for i in range(n_parts)]
    parts = [(normal(length(x), 2, 16, dtype=torch.bfloat16, seed=i), x) for i, x in enumerate(intervals)]
    summed(how, out, parts)
    assert near(how, out, expected(out, parts))


@both
def test_many_stretches_are_summed(how):
    out = torch.full((200, 2, 16), torch.nan)
    intervals = [((0, 200),), tuple((i, i + 3) for i in range(0, 200, 5)), tuple((i, i + 7) for i in range(1, 190, 9))]
    parts = [(normal(length(x), 2, 16, dtype=torch.float32, seed=i), x) for i, x in enumerate(intervals)]
    summed(how, out, parts)
    assert near(how, out, expected(out, parts))


def several(n, seed, head_dim=40, dtype=torch.bfloat16, device="cpu"):
    """Sums that are alike: n of them, the last part of each lying in it."""
    intervals = (((0, 37),), ((5, 9), (11, 30)), ((30, 37),))
    sums = []
    for i in range(n):
        out = normal(2, 37, 6, head_dim, dtype=dtype, seed=seed + i, device=device)[:, :, 1:4]
        parts = [
            (
                normal(
                    2,
                    length(x),
                    3,
                    head_dim,
                    dtype=torch.float32 if j else dtype,
                    seed=seed + 10 * i + j,
                    device=device,
                ),
                x,
            )
            for j, x in enumerate(intervals)
        ]
        sums.append((out, [*parts, (out[:, 3:20], ((3, 20),))]))
    return sums


def together(sums):
    """The outs, and each part of all of them."""
    parts = [[x for x, _ in of_part] for of_part in zip(*(parts for _, parts in sums), strict=True)]
    return [out for out, _ in sums], list(zip(parts, [x for _, x in sums[0][1]], strict=True))


@needs_interpreter
@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("head_dim", [40, 64])
def test_sums_that_are_alike_are_summed_together(n, head_dim):
    sums = several(n, 0, head_dim)
    exact = [expected(*each) for each in sums]
    sum_numbered(*together(sums))
    for (out, _), each in zip(sums, exact, strict=True):
        assert near("triton", out, each)


def test_each_of_several_sums_is_made():
    sums = [*several(2, 0), *several(1, 60, dtype=torch.float32)]
    exact = [expected(*each) for each in sums]
    sum_all(*together(sums))
    for (out, _), each in zip(sums, exact, strict=True):
        assert near("eager", out, each)


@needs_interpreter
def test_more_parts_than_one_kernel_adds_are_added_to_each_of_several_sums():
    places = [((0, 21),) if i % 2 else ((0, 5), (9, 20)) for i in range(20)]
    sums = []
    for j in range(2):
        out = torch.full((21, 2, 16), torch.nan, dtype=torch.bfloat16)
        sums.append(
            (out, [(normal(length(x), 2, 16, dtype=out.dtype, seed=30 * j + i), x) for i, x in enumerate(places)])
        )
    sum_numbered(*together(sums))
    for out, parts in sums:
        assert near("triton", out, expected(out, parts))


def test_sums_are_alike_in_shape_strides_and_dtype_of_outs_and_parts():
    def given(out=None, part=None, heads=3):
        outs = [torch.zeros(9, heads, 8) for _ in range(2)]
        parts = [torch.zeros(4, heads, 8) for _ in range(2)]
        for found, other in ((outs, out), (parts, part)):
            if other is not None:
                found[1] = other
        return outs, [(outs, ((0, 9),)), (parts, ((2, 6),))]

    assert _one_launch(*given())
    for of in (9, 4):
        turned = torch.zeros(of, 8, 3).transpose(1, 2)
        for other in (turned, torch.zeros(of, 3, 8, dtype=torch.float64), torch.zeros(of + 1, 3, 8)):
            assert not _one_launch(*given(**{"out" if of == 9 else "part": other}))
    assert _one_launch(*given(heads=MOST_PROGRAMS // 2)) and not _one_launch(*given(heads=MOST_PROGRAMS // 2 + 1))


@needs_interpreter
def test_the_triton_sum_refuses_a_strided_head_dim():
    with pytest.raises(ValueError, match="head dim contiguous"):
        summed("triton", torch.zeros(9, 2, 8), [(torch.zeros(9, 8, 2).transpose(1, 2), ((0, 9),))])


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("seed", range(8))
def test_parts_that_come_one_by_one_are_rounded_once(seed, dtype, given):
    draw = random.Random(seed)
    n = 30
    found = [((0, n),) if draw.random() < 0.5 else stretches(draw, n, 3) for _ in range(draw.randint(0, 6))]
    parts = [(normal(2, length(x), 3, 8, dtype=dtype, seed=i), x) for i, x in enumerate(found)]
    like = torch.full((2, n, 3, 8), torch.nan, dtype=dtype)
    total = Sum([like], found, into=[like] if given else None)
    exact = expected(like, parts)
    for part, _ in parts:
        total.add(part.clone())
    (result,) = total.result()
    assert result.dtype == dtype and (result is like) == given
    assert near("eager", result, exact)


@pytest.mark.parametrize("seed", range(4))
def test_sums_whose_parts_come_together_are_what_they_are_apart(seed):
    draw = random.Random(seed)
    n = 30
    found = [stretches(draw, n, 3) for _ in range(4)]
    like = [torch.zeros(n, 3, 8, dtype=dtype) for dtype in (torch.bfloat16, torch.bfloat16, torch.float32)]
    total = Sum(like, found)
    parts = [
        [(normal(length(x), 3, 8, dtype=each.dtype, seed=10 * i + j), x) for i, x in enumerate(found)]
        for j, each in enumerate(like)
    ]
    exact = [expected(*each) for each in zip(like, parts, strict=True)]
    for found_together in zip(*parts, strict=True):
        total.add(*[part for part, _ in found_together])
    for each, result in zip(exact, total.result(), strict=True):
        assert near("eager", result, each)


def test_first_parts_become_the_sums_all_or_none():
    like = [torch.zeros(9, 3, 8, dtype=torch.bfloat16) for _ in range(2)]
    firsts = [normal(9, 3, 8, dtype=torch.bfloat16, seed=0), normal(9, 6, 8, dtype=torch.bfloat16, seed=1)[:, ::2]]
    rest = [normal(4, 3, 8, dtype=torch.bfloat16, seed=n) for n in (2, 3)]
    parts = [[(a, ((0, 9),)), (b, ((3, 7),))] for a, b in zip(firsts, rest, strict=True)]
    exact = [expected(*each) for each in zip(like, parts, strict=True)]
    total = Sum(like, [((0, 9),), ((3, 7),)])
    total.add(*firsts)
    total.add(*rest)
    assert not {id(x) for x in total.result()} & {id(x) for x in firsts}
    for result, each in zip(total.result(), exact, strict=True):
        assert near("eager", result, each)


def test_a_first_part_of_all_tokens_becomes_the_sum():
    like = torch.zeros(2, 9, 3, 8, dtype=torch.bfloat16)
    first, second = (normal(2, n, 3, 8, dtype=torch.bfloat16, seed=n) for n in (9, 4))
    for parts in ([first], [first, second]):
        total = Sum([like], [((0, 9),), ((3, 7),)][: len(parts)])
        for part in parts:
            total.add(part)
        assert not total.buffers and not total.kept and total.result()[0] is first
