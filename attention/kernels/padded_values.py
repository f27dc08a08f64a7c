"""Value heads of another size by a kernel that has none: the smaller head dim is filled up with zeros. Zeros in q and k leave
every score as it is. Those in v become zeros of out, which are cut off; the same holds for the gradients."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from attention.kernels.fit import dense_like
from attention.kernels.interface import Call, Into, Kernel, Pair, Shape, Triple, Wrapped
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

    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call, into: Pair | None) -> Pair:
        most = max(q.shape[-1], v.shape[-1])
        whole = v.shape[-1] == most  # out is written where it is wanted
        q, k, values = (_padded(x, most) for x in (q, k, v))
        out, lse = self.kernel.forward(q, k, values, call, into if whole else None)
        return _cut(out, v), lse

    def gradients(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: Call, into: Into
    ) -> Triple:
        most = max(q.shape[-1], v.shape[-1])
        wide_dout, wide_q, wide_k, wide_v, wide_out = (_padded(x, most) for x in (dout, q, k, v, out))
        dq, dk, dv = self.kernel.backward(wide_dout, wide_q, wide_k, wide_v, wide_out, lse, call)
        return _cut(dq, q), _cut(dk, k), _cut(dv, v)


def _padded_shape(shape: Shape) -> Shape:
    return replace(shape, head_dim=max(shape.head_dim, shape.v_head_dim), value_dim=None)


def _padded(x: Tensor, head_dim: int) -> Tensor:
    """x with zeros up to that head dim."""
    own = x.shape[-1]
    if own == head_dim:
        return x
    found = x.new_empty((*x.shape[:-1], head_dim))
    found[..., :own].copy_(x)
    found[..., own:].zero_()
    return found


def _cut(x: Tensor, like: Tensor) -> Tensor:
    """The first dims of x, as many as `like` has, in memory of their own."""
    if x.shape[-1] == like.shape[-1]:
        return x
    found = x[..., : like.shape[-1]]
    return dense_like(found).copy_(found)
