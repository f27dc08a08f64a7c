"""The kernels that take patterns as they are, on a GPU, against plain fp64 attention."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from attention.errors import UnsupportedCall
from attention.kernels import KERNELS, Call, Kernel, Shape, name_of
from attention.kernels.patterns import ForPatterns
from attention.masks.overlap import both
from attention.masks.pattern import Pattern
from attention.masks.rectangles import UNBOUNDED, rectangles
from attention.reduction.parts import Accumulator
from tests.support.naive import TOLERANCES, assert_lse, assert_matches, inputs, reference, relative
from tests.support.patterns import PATTERNS, random_pattern, window_and_global

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

NATIVE = ("flash4", "cudnn_flex", "flex")
COMPILED = {"flex": ("window_and_global", "block_dca", "rows_without_keys")}  # compiles for seconds a shape
every_kernel = pytest.mark.parametrize("name", NATIVE)


def able(name: str, q: torch.Tensor, k: torch.Tensor, pattern: Pattern) -> Kernel:
    kernel = KERNELS[name]
    reason = kernel.missing("cuda") or kernel.refuses_pattern(Shape.of(q, k, k, backward=True), pattern, False)
    if reason and "quicker" not in reason:
        pytest.skip(f"{name}: {reason}")
    return kernel


def case(pattern: Pattern, head_dim: int = 64, heads=(8, 2), dtype: torch.dtype = torch.bfloat16):
    """(q, k, v, dout, call) of a batch of two. The pattern is a new one: nothing is kept with it."""
    pattern = Pattern(pattern.n_q, pattern.n_k, pattern.rectangles)
    call = Call(head_dim**-0.5, pattern=pattern)
    return inputs(lambda: call, (pattern.n_q, pattern.n_k), *heads, head_dim, dtype, "cuda")


def some(name: str, pattern: str) -> None:
    if pattern not in COMPILED.get(name, PATTERNS):
        pytest.skip(f"{name}: compiled for a few patterns only")


@every_kernel
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_pattern_matches_plain_attention(name, head_dim, pattern):
    some(name, pattern)
    q, k, v, dout, call = case(PATTERNS[pattern], head_dim)
    assert_matches(able(name, q, k, call.pattern), q, k, v, dout, call)


@every_kernel
@pytest.mark.parametrize("pattern", ["window_and_global", "block_sparse"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=name_of)
def test_a_pattern_of_heads_without_groups_matches_plain_attention(name, pattern, dtype):
    some(name, pattern)
    q, k, v, dout, call = case(PATTERNS[pattern], 128, (3, 3), dtype)
    assert_matches(able(name, q, k, call.pattern), q, k, v, dout, call)


@pytest.mark.parametrize("name", ["flash4", "cudnn_flex"])
@pytest.mark.parametrize("seed", range(12))
def test_random_patterns_match_plain_attention(name, seed):
    pattern = random_pattern(seed)
    q, k, v, dout, call = case(pattern, (64, 128)[seed % 2])
    kernel = able(name, q, k, pattern)
    try:
        assert_matches(kernel, q, k, v, dout, call)
    except UnsupportedCall as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("pattern", ["window_and_global", "window_and_global_tile", "global_rows", "causal"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_lists_cut_in_parts_match_plain_attention(pattern, head_dim, monkeypatch):
    monkeypatch.setattr("attention.kernels.flash4_sparse.longest_part", lambda tiles, rows: 2)
    q, k, v, dout, call = case(PATTERNS[pattern], head_dim)
    kernel = able("flash4", q, k, call.pattern)
    assert_matches(kernel, q, k, v, dout, call)
    assert call.pattern.kept["flash4", q.device, True][1] is not None
    assert call.pattern.kept["flash4", q.device, False][1] is not None


def test_a_long_list_is_cut_in_parts():
    q, k, v, dout, call = case(window_and_global(8192, 512, 128), 128, (2, 1))
    kernel = able("flash4", q, k, call.pattern)
    assert_matches(kernel, *(x[:1] for x in (q, k, v, dout)), call)
    assert call.pattern.kept["flash4", q.device, True][1] is not None


@every_kernel
def test_parts_over_split_keys_sum_to_the_whole_with_the_final_out_and_lse(name):
    whole = PATTERNS["global_rows"]
    q, k, v, dout, call = case(whole, 128)
    kernel = able(name, q, k, whole)
    cuts = [0, 256, whole.n_k]
    parts = []
    for c, d in itertools.pairwise(cuts):
        part = both(whole.rectangles, rectangles([(0, whole.n_q, c, d, -UNBOUNDED, UNBOUNDED)]))
        parts.append(
            (slice(c, d), replace(call, pattern=Pattern(whole.n_q, d - c, rectangles(part - [0, 0, c, c, c, c]))))
        )
    total = Accumulator(q, [((0, whole.n_q),)] * 2)
    for keys, part in parts:
        total.add(*kernel.forward(q, k[:, keys], v[:, keys], part))
    out, lse = total.result()
    expected_out, expected_lse, *expected = reference(q, k, v, dout, call)
    assert relative(out, expected_out) < TOLERANCES[q.dtype][0]
    assert_lse(lse, expected_lse, TOLERANCES[q.dtype][0])
    sums = [torch.zeros(x.shape, dtype=torch.float64, device=x.device) for x in (q, k, v)]
    for keys, part in parts:
        dq, dk, dv = kernel.backward(dout, q, k[:, keys], v[:, keys], out, lse, part)
        sums[0] += dq
        sums[1][:, keys] += dk
        sums[2][:, keys] += dv
    for grad, wanted in zip(sums, expected, strict=True):
        assert relative(grad, wanted) < TOLERANCES[q.dtype][1]


@every_kernel
def test_results_of_a_pattern_are_written_into_the_tensors_given(name):
    pattern = PATTERNS["window_and_global"]
    q, k, v, dout, call = case(pattern, 128)
    kernel = able(name, q, k, pattern)
    out, lse = kernel.forward(q, k, v, call)
    grads = kernel.backward(dout, q, k, v, out, lse, call)
    into = torch.full((2, pattern.n_q, 12, 128), torch.nan, dtype=q.dtype, device="cuda")[:, :, 2:-2], lse.clone()
    for x, target, wanted in zip(kernel.forward(q, k, v, call, into=into), into, (out, lse), strict=True):
        assert x is target
        torch.testing.assert_close(x, wanted, rtol=2e-2, atol=2e-3)
    into_grads = tuple(torch.full_like(x, torch.nan) for x in grads)
    for x, target, wanted in zip(
        kernel.backward(dout, q, k, v, out, lse, call, into=into_grads), into_grads, grads, strict=True
    ):
        assert x is target
        torch.testing.assert_close(x, wanted, rtol=2e-2, atol=2e-3)


@every_kernel
def test_a_pattern_is_taken_without_a_batch(name):
    pattern = PATTERNS["window_and_global"]
    q, k, v, dout, call = case(pattern, 128)
    assert_matches(able(name, q, k, pattern), *(x[0] for x in (q, k, v, dout)), call)


def test_what_a_kernel_cannot_do_is_done_by_rectangles_or_refused():
    shape = Shape("cuda", torch.bfloat16, 8, 2, 128)
    window = PATTERNS["window_and_global"]
    columns = np.arange(6) * 128
    rows = rectangles([(0, 256, c, c + 100, -UNBOUNDED, UNBOUNDED) for c in columns])
    kernel = KERNELS["flash4"]
    assert "add gradients up" in (kernel.refuses_pattern(shape, window, True) or "")
    assert "6 intervals of keys" in (kernel.refuses_pattern(shape, Pattern(256, 768, rows), False) or "")
    if kernel.missing("cuda"):
        pytest.skip(kernel.missing("cuda"))
    for name in ("one_row", "documents", "window_and_global", "rows_without_keys"):
        q, k, v, dout, call = case(PATTERNS[name], 128)
        assert_matches(ForPatterns(kernel, Shape.of(q, k, k, backward=True)), q, k, v, dout, call)
