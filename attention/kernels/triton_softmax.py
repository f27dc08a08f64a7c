"""The running softmax of our Triton kernels: for each query the maximum of the scores so far (`top`), the sum of their
exponentials (`total`) and that of the weighted values (`acc`). A score times `scale_log2` is in base 2. With unscaled scores
scaling and shifting are one fused multiply-add; scores that are in base 2 already have scale_log2 = 1.0, which costs nothing."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = 1.4426950408889634
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)


@triton.jit
def empty(ROWS: tl.constexpr, HEAD_DIM: tl.constexpr):  # type: ignore[no-untyped-def]
    top = tl.full([ROWS], float("-inf"), tl.float32)
    return top, tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, HEAD_DIM], tl.float32)


@triton.jit
def add_tile(s, v, top, total, acc, scale_log2, MASKED: tl.constexpr, PRECISION: tl.constexpr):  # type: ignore[no-untyped-def]
    """Adds the scores of a tile of keys. MASKED: a query may have seen no key yet."""
    higher = tl.maximum(top, tl.max(s, 1))
    base = higher * scale_log2
    if MASKED:
        base = tl.where(higher == float("-inf"), 0.0, base)
    p = tl.exp2(s * scale_log2 - base[:, None])
    shrink = tl.exp2(top * scale_log2 - base)
    total = total * shrink + tl.sum(p, 1)
    return higher, total, tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)


@triton.jit
def store(out_at, lse_at, top, total, acc, scale_log2, kept, live):  # type: ignore[no-untyped-def]
    """Writes out and lse (natural log). kept, live: where out and lse have an element."""
    norm = tl.where(total == 0.0, 1.0, total)
    tl.store(out_at, (acc / norm[:, None]).to(out_at.dtype.element_ty), mask=kept)
    tl.store(lse_at, tl.where(total == 0.0, float("-inf"), (top * scale_log2 + tl.log2(norm)) * LN2), mask=live)
