"""How fast the local kernels compute patterns on one GPU, beside dense FlashAttention-4.

    python -m benchmarks.sparse [--sizes 8192,32768,131072] [--patterns window_global,block_dca,...] [--kernels ...] [--json FILE]

Prints for each pattern, size and kernel the milliseconds of forward and backward (medians of CUDA events), TFLOP/s on the pairs that the
pattern keeps, and the milliseconds that a new pattern costs before its first launch. bf16, 32 heads over 8 KV heads, head dim 128. Results
of 8K tokens are compared with those of rectangles by FlashAttention-4."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import median

import numpy as np
import torch
from torch import Tensor

from attention.errors import UnsupportedCall
from attention.kernels import KERNELS, Call, Kernel, Shape
from attention.kernels.patterns import ForPatterns
from attention.masks.band import CAUSAL
from attention.masks.pattern import Pattern
from tests.support import patterns

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
SHAPE = Shape("cuda", torch.bfloat16, HEADS, KV_HEADS, HEAD_DIM)


def lengths_of(tokens: int) -> list[int]:
    """Document lengths: most short, some long."""
    rng = np.random.default_rng(0)
    found: list[int] = []
    while sum(found) < tokens:
        found.append(int(np.clip(rng.lognormal(6.2, 1.6), 16, tokens // 4)))
    found[-1] -= sum(found) - tokens
    return [n for n in found if n > 0]


PATTERNS: dict[str, Callable[[int], Pattern]] = {
    "window_global": lambda tokens: patterns.window_and_global(tokens, 1024, 128),
    "window_global_64": lambda tokens: patterns.window_and_global(tokens, 1000, 64),
    "block_dca": patterns.block_dca,
    "block_sparse": patterns.block_sparse,
    "documents": lambda tokens: patterns.documents(lengths_of(tokens)),
}
RECTANGLES = "flash4 by rectangles"


@dataclass
class Row:
    pattern: str
    tokens: int
    kernel: str
    share: float  # of the pairs of a causal mask
    forward_ms: float = 0.0
    backward_ms: float = 0.0
    forward_tf: float = 0.0
    backward_tf: float = 0.0
    build_ms: float = 0.0
    error: float = 0.0  # relative, of the worst of out, dq, dk, dv
    note: str = ""

    def __str__(self) -> str:
        if self.note:
            return f"{self.pattern:<17} {self.tokens:>7} {self.kernel:<21} {self.note[:150]}"
        return (
            f"{self.pattern:<17} {self.tokens:>7} {self.kernel:<21} {100 * self.share:5.1f}% "
            f"{self.forward_ms:9.3f} ms {self.forward_tf:6.1f} TF | {self.backward_ms:9.3f} ms {self.backward_tf:6.1f} TF | "
            f"both {self.forward_ms + self.backward_ms:9.3f} ms | build {self.build_ms:8.2f} ms | error {self.error:.1e}"
        )


def milliseconds(run: Callable[[], object]) -> float:
    """The median of some runs by CUDA events; the GPU idles before each, so that launches are hidden."""
    run()
    torch.cuda.synchronize()
    times: list[float] = []
    start = time.perf_counter()
    while len(times) < 3 or (len(times) < 10 and time.perf_counter() - start < 1.0):
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(4_000_000)
        before.record()
        run()
        after.record()
        torch.cuda.synchronize()
        times.append(before.elapsed_time(after))
    return median(times)


def tensors(tokens: int) -> list[Tensor]:
    """q, k, v, dout."""
    torch.manual_seed(0)
    heads = (HEADS, KV_HEADS, KV_HEADS, HEADS)
    return [torch.randn(1, tokens, h, HEAD_DIM, device="cuda", dtype=torch.bfloat16) for h in heads]


def build_ms(kernel: Kernel, given: list[Tensor], call: Call) -> float:
    """What a new pattern costs: the first forward and backward of it, less the second ones. Everything is compiled."""
    assert call.pattern is not None
    fresh = Pattern(call.pattern.n_q, call.pattern.n_k, call.pattern.rectangles)
    new = Call(call.scale, pattern=fresh)

    def run() -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        out, lse = kernel.forward(*given[:3], new)
        kernel.backward(given[3], *given[:3], out, lse, new)
        torch.cuda.synchronize()
        return 1e3 * (time.perf_counter() - start)

    first = run()
    return first - min(run(), run())


def measured(row: Row, kernel: Kernel, call: Call, pairs: int, expected: list[Tensor] | None) -> list[Tensor]:
    """Fills the row; returns out, dq, dk, dv."""
    given = tensors(row.tokens)
    q, k, v, dout = given
    out, lse = kernel.forward(q, k, v, call)
    found = [out, *kernel.backward(dout, q, k, v, out, lse, call)]
    if expected is not None:
        row.error = max(
            float((x.float() - y.float()).norm() / y.float().norm()) for x, y in zip(found, expected, strict=True)
        )
    row.forward_ms = milliseconds(lambda: kernel.forward(q, k, v, call))
    row.backward_ms = milliseconds(lambda: kernel.backward(dout, q, k, v, out, lse, call))
    flops = 4.0 * HEADS * HEAD_DIM * pairs
    row.forward_tf, row.backward_tf = flops / row.forward_ms / 1e9, 2.5 * flops / row.backward_ms / 1e9
    if call.pattern is not None:
        row.build_ms = build_ms(kernel, given, call)
    return found


class ByRectangles(ForPatterns):
    """A kernel's packed calls alone."""

    def why_rectangles(self, call: Call) -> str:
        return "it is asked for"


def kernel_of(name: str) -> Kernel:
    return ByRectangles(KERNELS["flash4"], SHAPE) if name == RECTANGLES else KERNELS[name]


def attempt(row: Row, call: Call, pairs: int, expected: list[Tensor] | None) -> list[Tensor] | None:
    try:
        kernel = kernel_of(row.kernel)
        row.note = kernel.missing("cuda") or ""
        return None if row.note else measured(row, kernel, call, pairs, expected)
    except (UnsupportedCall, torch.OutOfMemoryError, RuntimeError, ValueError, AssertionError) as error:
        row.note = f"{type(error).__name__}: {' '.join(str(error).split())}"
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sizes", default="8192,32768,131072")
    parser.add_argument("--patterns", default=",".join(PATTERNS))
    parser.add_argument("--kernels", default=",".join([RECTANGLES, "flash4", "cudnn_flex", "flex"]))
    parser.add_argument("--seconds", type=float, default=1e9, help="start no row after so many")
    parser.add_argument("--json")
    options = parser.parse_args()
    rows: list[Row] = []
    start = time.monotonic()

    def done(row: Row) -> None:
        rows.append(row)
        print(row, flush=True)
        if options.json:
            with open(options.json, "w") as file:
                json.dump([asdict(x) for x in rows], file, indent=1)

    for tokens in map(int, options.sizes.split(",")):
        causal = tokens * (tokens + 1) // 2
        row = Row("causal", tokens, "flash4", 1.0)
        attempt(row, Call(HEAD_DIM**-0.5, CAUSAL), causal, None)
        done(row)
        for pattern in options.patterns.split(","):
            made = PATTERNS[pattern](tokens)
            expected = None
            for name in options.kernels.split(","):
                if time.monotonic() - start > options.seconds or (name == "flex" and tokens > 32768):
                    continue
                row = Row(pattern, tokens, name, made.pairs() / causal)
                fresh = Pattern(tokens, tokens, made.rectangles)
                found = attempt(row, Call(HEAD_DIM**-0.5, pattern=fresh), made.pairs(), expected)
                done(row)
                if tokens <= 8192 and expected is None:
                    expected = found
            del expected
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
