"""The kernels that take patterns as they are, on a GPU, against plain fp64 attention."""

import numpy as np
import pytest
import torch

from attention.errors import UnsupportedCall
from attention.kernels import KERNELS, Call, Kernel, Shape
from attention.kernels.patterns import ForPatterns
from attention.masks.pattern import Pattern
from attention.masks.rectangles import UNBOUNDED, rectangles
from tests.support.naive import assert_matches, inputs
from tests.support.patterns import PATTERNS, random_pattern

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

NATIVE = ("flash4", "cudnn_flex", "flex")
COMPILED = {"flex": ("window_and_global", "global_rows", "rows_without_keys")}  # compiles for seconds a shape
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
    return inputs(call, (pattern.n_q, pattern.n_k), *heads, head_dim, dtype, "cuda")


def some(name: str, pattern: str) -> None:
    if pattern not in COMPILED.get(name, PATTERNS):
        pytest.skip(f"{name}: compiled for a few patterns only")


@every_kernel
@pytest.mark.parametrize(
    "head_dim, heads, dtype", [(64, (8, 2), torch.bfloat16), (128, (3, 3), torch.float16)], ids=str
)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_pattern_matches_plain_attention(name, head_dim, heads, dtype, pattern):
    """With a batch, and without."""
    some(name, pattern)
    q, k, v, dout, call = case(PATTERNS[pattern], head_dim, heads, dtype)
    kernel = able(name, q, k, call.pattern)
    assert_matches(kernel, q, k, v, dout, call)
    assert_matches(kernel, *(x[0] for x in (q, k, v, dout)), call)


@pytest.mark.parametrize("name", ["flash4", "cudnn_flex"])
@pytest.mark.parametrize("seed", range(6))
def test_random_patterns_match_plain_attention(name, seed):
    pattern = random_pattern(seed)
    q, k, v, dout, call = case(pattern, (64, 128)[seed % 2])
    kernel = able(name, q, k, pattern)
    try:
        assert_matches(kernel, q, k, v, dout, call)
    except UnsupportedCall as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("pattern, head_dim", [("window_and_global_tile", 64), ("global_rows", 128)])
def test_lists_cut_in_parts_match_plain_attention(pattern, head_dim, monkeypatch):
    monkeypatch.setattr("attention.kernels.flash4_sparse.longest_part", lambda tiles, rows: 2)
    q, k, v, dout, call = case(PATTERNS[pattern], head_dim)
    kernel = able("flash4", q, k, call.pattern)
    assert_matches(kernel, q, k, v, dout, call)
    assert call.pattern.kept["flash4", q.device, True][1] is not None
    assert call.pattern.kept["flash4", q.device, False][1] is not None


@every_kernel
def test_results_of_a_pattern_are_written_into_the_tensors_given(name):
    q, k, v, dout, call = case(PATTERNS["window_and_global"], 128)
    kernel = able(name, q, k, call.pattern)
    result = kernel.forward(q, k, v, call)
    grads = kernel.backward(dout, q, k, v, *result, call)
    into = [torch.full_like(x, torch.nan) for x in (*result, *grads)]
    into[0] = torch.cat([into[0]] * 3, 2)[:, :, 2:10]  # of some heads
    kernel.forward(q, k, v, call, into=tuple(into[:2]))
    kernel.backward(dout, q, k, v, *result, call, into=tuple(into[2:]))
    torch.testing.assert_close(into, [*result, *grads], rtol=2e-2, atol=2e-3)


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
