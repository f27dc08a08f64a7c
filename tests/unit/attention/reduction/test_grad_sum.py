"""Sums of parts over different tokens: against fp64, in place, through strides, and the Triton kernel as eager does."""

import random

import pytest
import torch

from attention.geometry.intervals import length
from attention.reduction.grad_sum import sum_all, sum_eager, sum_numbered
from attention.reduction.parts import Sum
from tests.support.naive import normal

torch.set_num_threads(1)

GPU = torch.cuda.is_available()
in_triton = pytest.mark.gpu if GPU else ()
both = pytest.mark.parametrize("how", ["eager", pytest.param("triton", marks=in_triton)])


def summed(how, out, parts):
    """By the kernel on a GPU where there is one, else under the interpreter."""
    if how == "eager":
        return sum_eager(out, parts)
    return sum_numbered((out,), [((part,), intervals) for part, intervals in parts])


def device_of(how):
    return "cuda" if GPU and how in ("triton", sum_numbered) else "cpu"


def expected(out, parts):
    total = torch.zeros(out.shape, dtype=torch.float64, device=out.device)
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
    units = 1 if how != "eager" and not GPU and out.dtype == torch.bfloat16 else 0.5
    return ((out.double() - exact).abs() <= exact.abs() * torch.finfo(out.dtype).eps * units * 1.001 + 1e-6).all()


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("seed", range(4))
def test_parts_over_any_tokens_sum_to_what_they_sum_to_in_fp64(how, dtype, seed):
    """Through strides: of some heads, with parts whose heads lie first in memory. What no part has is zero."""
    draw = random.Random(seed)
    n, leading, device = 37, () if seed % 2 else (2,), device_of(how)
    whole = torch.full((*leading, n, 6, 40), 7.0, dtype=dtype, device=device)
    parts = []
    for i in range(draw.choice((1, 5, 17))):
        intervals = stretches(draw, n, draw.choice((1, 12)))
        shape, kind = (length(intervals), 3, 40), draw.choice([dtype, torch.float32])
        part = normal(*leading, *shape, dtype=kind, seed=i, device=device)
        parts.append(
            (part.transpose(-3, -2).contiguous().transpose(-3, -2) if draw.random() < 0.5 else part, intervals)
        )
    out = whole[..., 2:5, :]
    summed(how, out, parts)
    assert near(how, out, expected(out, parts))
    assert (whole[..., :2, :] == 7).all() and (whole[..., 5:, :] == 7).all()


@both
@pytest.mark.parametrize("parts", [[], [(torch.ones(2, 0, 2, 8, device=device_of("triton")), ())]])
def test_tokens_that_no_part_has_are_zero(how, parts):
    out = torch.full((2, 9, 2, 8), torch.nan, device=device_of("triton"))
    summed(how, out, parts)
    assert not out.any()


def several(how, n, seed, n_parts=3, dtype=torch.bfloat16):
    """Sums that are alike: n of them, the last part of each lying in it."""
    intervals = [(((0, 37),), ((5, 9), (11, 30)), ((30, 37),))[i % 3] for i in range(n_parts)]
    sums = []
    for i in range(n):
        out = normal(2, 37, 6, 40, dtype=dtype, seed=seed + i, device=device_of(how))[:, :, 1:4]
        parts = [
            (normal(2, length(x), 3, 40, dtype=kind, seed=seed + 100 * i + j, device=device_of(how)), x)
            for j, (kind, x) in enumerate(zip([dtype, *[torch.float32] * n_parts], intervals, strict=False))
        ]
        sums.append((out, [*parts, (out[:, 3:20], ((3, 20),))]))
    return sums


@pytest.mark.parametrize(
    "how, sums",
    [
        (sum_all, [(2, 0), (1, 60, 3, torch.float32)]),
        pytest.param(sum_numbered, [(1, 0)], marks=in_triton),
        pytest.param(sum_numbered, [(4, 0)], marks=in_triton),
        pytest.param(sum_numbered, [(2, 0, 20)], marks=in_triton),  # more parts than one kernel adds
    ],
)
def test_several_sums_are_made_together(how, sums):
    sums = [x for given in sums for x in several(how, *given)]
    exact = [expected(*one) for one in sums]
    parts = [[x for x, _ in of_part] for of_part in zip(*(parts for _, parts in sums), strict=True)]
    how([out for out, _ in sums], list(zip(parts, [x for _, x in sums[0][1]], strict=True)))
    for (out, _), total in zip(sums, exact, strict=True):
        assert near("triton" if how is sum_numbered else "eager", out, total)


@pytest.mark.parametrize("into", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_parts_that_come_one_by_one_are_rounded_once(seed, into):
    draw, n = random.Random(seed), 30
    places = [((0, n),) if draw.random() < 0.5 else stretches(draw, n, 3) for _ in range(draw.randint(0, 6))]
    like = [torch.full((n, 3, 8), torch.nan, dtype=dtype) for dtype in (torch.bfloat16, torch.float32)]
    parts = [
        [(normal(length(x), 3, 8, dtype=out.dtype, seed=10 * i + j), x) for i, x in enumerate(places)]
        for j, out in enumerate(like)
    ]
    exact = [expected(*one) for one in zip(like, parts, strict=True)]
    total = Sum(like, places, into=like if into else None)
    for together in zip(*parts, strict=True):
        total.add(*[part.clone() for part, _ in together])
    for out, result, right in zip(like, total.result(), exact, strict=True):
        assert result.dtype == out.dtype and (result is out) == into
        assert near("eager", result, right)


@pytest.mark.parametrize("strided", [False, True])
def test_first_parts_of_all_tokens_become_the_sums_all_or_none(strided):
    like = [torch.zeros(9, 3, 8, dtype=torch.bfloat16) for _ in range(2)]
    firsts = [x.clone() + 1 for x in like]
    firsts[1] = torch.cat([firsts[1]] * 2, 1)[:, ::2] if strided else firsts[1]
    total = Sum(like, [((0, 9),), ((3, 7),)])
    total.add(*firsts)
    total.add(*(x[3:7].clone() for x in firsts))
    for first, result in zip(firsts, total.result(), strict=True):
        assert (result is first) != strided
        assert (result[3:7] == 2).all() and (result[:3] == 1).all() and (result[7:] == 1).all()
