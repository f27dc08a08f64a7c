"""Groups of heads. Executors work on one group at a time, so that one group travels while another computes, or to hold
less."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from attention.executors.policy import OVERLAPPED, group_sizes
from attention.geometry.options import check_stride
from attention.kernels.interface import Triple


@dataclass(frozen=True)
class HeadGroup:
    """KV heads `[k_start, k_stop)` and the query heads that they serve."""

    k_start: int
    k_stop: int
    q_start: int
    q_stop: int

    def keys(self, x: Tensor) -> Tensor:
        """These heads of a tensor like k; x itself if they are all."""
        return cut_heads(x, self.k_start, self.k_stop)

    def queries(self, x: Tensor) -> Tensor:
        """These heads of a tensor like q, or of an LSE; x itself if they are all."""
        return cut_heads(x, self.q_start, self.q_stop)

    def of(self, qkv: Triple) -> Triple:
        """These heads of tensors like q, k and v."""
        q, k, v = qkv
        return self.queries(q), self.keys(k), self.keys(v)


def cut_heads(x: Tensor, start: int, stop: int) -> Tensor:
    """Heads `[start, stop)` of `[..., heads, D]`, or of an LSE: a view, or x itself if they are all."""
    return x if stop - start == x.size(-2) else x.narrow(-2, start, stop - start)


def head_groups(
    heads: int,
    kv_heads: int,
    stride: int | None,
    small_first: bool = False,
    small_last: bool = False,
    tokens: int = OVERLAPPED,
) -> list[HeadGroup]:
    """The groups of `policy.group_sizes` with their heads. Raises ValueError when the stride does not divide the KV
    heads."""
    check_stride(stride, kv_heads)
    sizes = group_sizes(kv_heads, stride, small_first, small_last, tokens)
    ratio = heads // kv_heads
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [HeadGroup(a, a + n, a * ratio, (a + n) * ratio) for a, n in zip(starts, sizes, strict=True)]
