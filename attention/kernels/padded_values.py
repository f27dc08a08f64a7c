"""Value heads of another size by a kernel that has none: the smaller head dim is filled up with zeros. Zeros in q and k leave
every score as it is. Those in v become zeros of out, which are cut off; the same holds for the gradients."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor
from torch.nn.functional import pad

from attention.kernels.interface import Call, Into, Kernel, Pair, Shape, Triple, Wrapped, settle
from attention.masks.band import Band
from attention.masks.pattern import Pattern


class PaddedValues(Wrapped):
    """A kernel for calls of `shape`, whose head dims D and Dv differ. The kernel itself is called with both of the larger
    one.

    note: what is padded, for the reader of a result."""

    def __init__(self, kernel: Kernel, shape: Shape):
        super().__init__(kernel, "v_head_dim")
        d, dv = shape.head_dim, shape.v_head_dim
        self.note = f"values padded from {dv} to {d}" if dv < d else f"queries and keys padded from {d} to {dv}"

    def refuses(self, shape: Shape, mask: Band) -> str | None:
        reason = self.kernel.refuses(_padded_shape(shape), mask)
        return f"{reason} ({self.note})" if reason and shape.v_head_dim > shape.head_dim else reason

    def refuses_pattern(self, shape: Shape, pattern: Pattern, deterministic: bool) -> str | None:
        return self.kernel.refuses_pattern(_padded_shape(shape), pattern, deterministic)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: Call, into: Pair | None = None) -> Pair:
        wide_q, wide_k, wide_v = _padded(q, k, v)
        out, lse = self.kernel.forward(wide_q, wide_k, wide_v, call)
        return settle((_cut(out, v), lse), into)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: Call, into: Into = None
    ) -> Triple:
        wide_dout, wide_q, wide_k, wide_v, wide_out = _padded(dout, q, k, v, out)
        dq, dk, dv = self.kernel.backward(wide_dout, wide_q, wide_k, wide_v, wide_out, lse, call)
        return settle((_cut(dq, q), _cut(dk, k), _cut(dv, v)), into)


def _padded_shape(shape: Shape) -> Shape:
    return replace(shape, head_dim=max(shape.head_dim, shape.v_head_dim), value_dim=None)


def _padded(*xs: Tensor) -> list[Tensor]:
    """The tensors with zeros up to the larger head dim."""
    most = max(x.shape[-1] for x in xs)
    return [x if x.shape[-1] == most else pad(x, (0, most - x.shape[-1])) for x in xs]


def _cut(x: Tensor, like: Tensor) -> Tensor:
    """The first dims of x, as many as `like` has, in memory of their own."""
    n = like.shape[-1]
    return x if x.shape[-1] == n else x[..., :n].contiguous()
