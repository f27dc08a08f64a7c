"""In which groups of heads an executor works, so that some travel while others compute, or less is held at a time."""

from __future__ import annotations

from dataclasses import dataclass

from attention.kernels.interface import Triple
from attention.variants import OVERLAPPED, check_stride


@dataclass(frozen=True)
class HeadGroup:
    """KV heads `[k_start, k_stop)` and the query heads that they serve."""

    k_start: int
    k_stop: int
    q_start: int
    q_stop: int

    @property
    def keys(self) -> slice:
        return slice(self.k_start, self.k_stop)

    @property
    def queries(self) -> slice:
        return slice(self.q_start, self.q_stop)

    def of(self, qkv: Triple) -> Triple:
        """These heads of tensors like q, k and v."""
        q, k, v = qkv
        return q[..., self.queries, :], k[..., self.keys, :], v[..., self.keys, :]


def head_groups(
    heads: int, kv_heads: int, stride: int | None, pulls: bool = False, tokens: int = OVERLAPPED
) -> list[HeadGroup]:
    """`stride` KV heads at a time. None: all at once where all are sent together anyway, or the `tokens` to be gathered are
    few; where they are pulled, a small group first, since the compute waits for it, a small one last, since its
    gradients' way home is waited for, and the rest between.

    Raises ValueError when the stride does not divide the KV heads."""
    each = check_stride(stride, kv_heads)
    sizes = [each] * (kv_heads // each)
    if stride is None and pulls and kv_heads >= 4 and tokens >= OVERLAPPED:
        small = kv_heads // 4
        sizes = [small, kv_heads - 2 * small, small]
    ratio = heads // kv_heads
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [HeadGroup(a, a + n, a * ratio, (a + n) * ratio) for a, n in zip(starts, sizes, strict=True)]
