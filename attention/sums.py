"""Sums of partial gradients that cover different tokens, in fp32 (fp64 for fp64), rounded once. On CUDA one Triton kernel
reads every part once and writes the sum once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from torch import Tensor

from attention.schedules import length
from attention.tensors import add_, tokens, wide
from attention.transfers import Intervals, side_by_side

MOST = 16  # stretches of parts that one kernel adds up

Parts = Sequence[tuple[Tensor, Intervals]]


def sum_parts(out: Tensor, parts: Parts) -> None:
    """Write to every token of `out` the sum over the parts that have it, or 0.

    out: `[B, S, H, D]` or `[T, H, D]`; each part: the tokens of its intervals of out's tokens, side by side, in any dtype.
    Any strides, but for a contiguous last dim. A part may lie in out itself, at the place of its tokens.

    Raises ValueError for a part that has not as many tokens as its intervals, or a strided last dim."""
    for part, intervals in parts:
        if tokens(part) != length(intervals) or part.dim() != out.dim() or part.shape[-2:] != out.shape[-2:]:
            raise ValueError(
                f"part {list(part.shape)} over the tokens {intervals} of out {list(out.shape)}: give as many tokens as the "
                "intervals have, and the same heads and head dim"
            )
    if out.is_cuda:
        from attention.kernels.triton_sum import sum_triton

        sum_triton(out, parts)
        return
    sum_eager(out, parts)


def sum_eager(out: Tensor, parts: Parts) -> None:
    """As `sum_parts`, in plain PyTorch on any device."""
    total = out.new_zeros(out.shape, dtype=wide(out.dtype))
    for part, intervals in parts:
        add_(total, intervals, part)
    out.copy_(total)


@dataclass(frozen=True)
class Entry:
    """Tokens `[start, stop)` of the sum are those from `at` on of part number `part`."""

    part: int
    start: int
    stop: int
    at: int


@dataclass(frozen=True)
class Range:
    """Tokens `[start, stop)` of the sum, and the few stretches that meet them."""

    start: int
    stop: int
    entries: tuple[Entry, ...]


@lru_cache(maxsize=1024)
def ranges(n: int, parts: tuple[Intervals, ...], most: int = MOST) -> tuple[Range, ...]:
    """`[0, n)` in as few ranges as meet at most `most` stretches each; a token has at most as many parts."""
    entries = []
    for number, intervals in enumerate(parts):
        for (start, stop), (at, _) in zip(intervals, side_by_side(intervals), strict=True):
            if stop > start:
                entries.append(Entry(number, start, stop, at))
    if len(entries) <= most:
        return (Range(0, n, tuple(entries)),)
    found: list[Range] = []
    begin, held = 0, dict.fromkeys(e for e in entries if e.start <= 0)
    for cut in sorted({e.start for e in entries} | {e.stop for e in entries} | {n}):
        if not 0 < cut < n:
            continue
        alive = [e for e in held if e.stop > cut]
        new = [e for e in entries if e.start == cut]
        if len(held) + len(new) > most:
            found.append(Range(begin, cut, tuple(held)))
            begin, held = cut, dict.fromkeys(alive)
        held |= dict.fromkeys(new)
    found.append(Range(begin, n, tuple(held)))
    return tuple(found)
