"""The interface of local kernels: *(q, k, v, call) -> (out, lse)*, with a backward from the final out and lse."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Literal, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from attention.gpu.uploads import uploaded
from attention.kernels.fit import dense_like, fit, fits, without_autocast
from attention.masks.band import FULL, Band
from attention.masks.pattern import Pattern
from attention.tensors import empty_lse, empty_tokens, result_like, tokens

Pair = tuple[Tensor, Tensor]  # out, lse
Triple = tuple[Tensor, Tensor, Tensor]  # dq, dk, dv
Into = Triple | None  # where a backward writes its gradients
Grads = tuple[Tensor, ...]  # dq, dk, dv, then the sinks' gradient, if any


class KvLengths(NamedTuple):
    """Each batch element's number of keys in a decode, counting the keys of all its calls. A kernel reads a number above
    `total` as `total`, and one below 0 as 0."""

    lengths: Tensor  # integers [B], on the device; for `ByElement` on the CPU
    first: int  # the position of this call's first key
    total: int  # the most keys that an element may have


@dataclass(frozen=True, eq=False)
class Call:
    """One kernel call. Dense: q `[B, Sq, H, D]`, k `[B, Sk, Hk, D]`, v `[B, Sk, Hk, Dv]`, out `[B, Sq, H, Dv]`, lse
    `[B, H, Sq]`. Packed (varlen), with `q_lengths`: q `[Tq, H, D]`, k `[Tk, Hk, D]`, v `[Tk, Hk, Dv]`, lse `[H, Tq]`, and
    sequence i of the queries sees sequence i of the keys. Dv is D unless the kernel has the feature "v_head_dim".

    softcap: a score x, which is scaled, becomes `softcap * tanh(x / softcap)`; only for kernels with the feature "softcap".

    lengths: the numbers of keys, in a dense call whose batch elements differ in them; only for kernels with the feature
    "kv_lengths". The mask is then aligned to each element's last key, whose position counts the keys of all calls.

    The mask is aligned bottom-right in every sequence. With a `pattern` the call is dense, whatever the tensors' form: one sequence
    of queries, one of keys, and the pattern is the mask. lse is the natural log, fp32 (fp64 for fp64). Raises ValueError
    for a scale that is not positive and finite."""

    scale: float
    mask: Band = FULL
    q_lengths: tuple[int, ...] | None = None
    k_lengths: tuple[int, ...] | None = None
    cu_q: Tensor | None = None  # int32 [n + 1], on the device
    cu_k: Tensor | None = None
    deterministic: bool = False
    pattern: Pattern | None = None
    softcap: float | None = None
    lengths: KvLengths | None = None

    def __post_init__(self) -> None:
        if not 0 < self.scale < math.inf:
            raise ValueError(f"scale={self.scale}: must be positive and finite; for a negative scale, negate q")
        if self.softcap is not None and not 0 < self.softcap < math.inf:
            raise ValueError(f"softcap={self.softcap}: must be positive and finite; leave it out for none")

    @property
    def packed(self) -> bool:
        return self.q_lengths is not None

    @cached_property
    def max_q(self) -> int:
        return max(self.q_lengths or (0,))

    @cached_property
    def max_k(self) -> int:
        return max(self.k_lengths or (0,))

    @cached_property
    def some_without_keys(self) -> bool:
        """Whether some query of a packed batch sees no key."""
        right = self.mask.right
        lengths = zip(self.q_lengths or (), self.k_lengths or (), strict=True)
        return any(sq and (sk == 0 or sk - sq + right < 0 <= right) for sq, sk in lengths)

    def under(self, mask: Band | Pattern) -> Call:
        """This call under another mask, dense."""
        band, pattern = (mask, None) if isinstance(mask, Band) else (FULL, mask)
        return replace(self, mask=band, pattern=pattern, q_lengths=None, k_lengths=None, cu_q=None, cu_k=None)

    def of_packed(self, mask: Band, q_lengths: Sequence[int], k_lengths: Sequence[int], device: torch.device) -> Call:
        """This call under a band in every sequence of a packed batch."""
        n = len(q_lengths) + 1
        aligned = -(-n // 4) * 4  # both start at a multiple of 16 bytes, in one copy to the device
        both = [*accumulate(q_lengths, initial=0), *[0] * (aligned - n), *accumulate(k_lengths, initial=0)]
        there = uploaded(np.array(both, np.int32), device)
        cu_q, cu_k = there[:n], there[aligned:]
        lengths = tuple(q_lengths), tuple(k_lengths)
        return replace(self, mask=mask, pattern=None, q_lengths=lengths[0], k_lengths=lengths[1], cu_q=cu_q, cu_k=cu_k)


@dataclass(frozen=True)
class Shape:
    """What decides, together with the mask, whether a kernel supports a call."""

    device: str
    dtype: torch.dtype
    heads: int
    kv_heads: int
    head_dim: int
    packed: bool = False
    backward: bool = True
    tokens: int | None = None  # queries of a call, over all sequences; None: unknown, treated as many
    value_dim: int | None = None  # of v and out; None: head_dim
    softcap: bool = False

    @property
    def v_head_dim(self) -> int:
        return self.value_dim or self.head_dim

    @staticmethod
    def of(q: Tensor, k: Tensor, v: Tensor, backward: bool | None = None, softcap: bool = False) -> Shape:
        """Of one call. backward: by default, whether q requires a gradient."""
        packed, tokens = q.dim() == 3, q.shape[-3]
        backward = q.requires_grad if backward is None else backward
        value_dim = None if v.shape[-1] == q.shape[-1] else v.shape[-1]
        return Shape(
            q.device.type, q.dtype, q.shape[-2], k.shape[-2], q.shape[-1], packed, backward, tokens, value_dim, softcap
        )


Feature = Literal["softcap", "v_head_dim", "kv_lengths"]


class Kernel:
    """A local kernel. Shapes as in `Call`.

    Callers use `forward` and `backward`, which take and write tensors of any strides. A kernel has `attend` and `gradients`,
    which are spared what most kernels cannot do. There every tensor but lse has a contiguous last dim, `align` holds, and
    there are queries and keys. A dense call has no queries without keys. With a `pattern`, or if the kernel is
    `one_batch`, the tensors have a batch dim, also those of a packed call (1).

    into: tensors to write and return instead of new ones. They have the shapes and dtypes of the results (out may also
    be in the accumulation dtype), any strides, and do not overlap the inputs. A kernel may ignore them: its results are then
    copied (`settle`), and an out in the accumulation dtype may have been rounded.

    A kernel that splits the keys may leave merging to its caller, by a method `splits(q, k, v, call)`. It returns
    partial results `[n, B, Sq, H, D]` in fp32, n >= 0, and their LSEs `[n, B, H, Sq]`.

    name, summary: for users; the summary says what runs. align: bytes; the first element and every row of q, k, v, dout,
    out and the results lie on multiples of it. features: what it can do beyond plain attention (see `lacks`). note: what
    the reader of a result must know. any_order: why its backward cannot be deterministic."""

    name: str
    summary: str
    align = 16
    features: frozenset[Feature] = frozenset()
    one_batch = False
    note: str | None = None
    any_order: str | None = None

    def missing(self, device: str) -> str | None:
        """Why the kernel cannot run on this machine's `device` ("cpu" or "cuda"), or None."""
        return None if device == "cuda" else "needs a CUDA GPU"

    def refuses(self, shape: Shape, mask: Band) -> str | None:
        """Why the kernel does not support such a call, as `value: rule`, or None."""
        raise NotImplementedError

    def refuses_pattern(self, shape: Shape, pattern: Pattern, deterministic: bool) -> str | None:
        """Why the kernel cannot do a pattern by itself, or None."""
        return "it takes no patterns"

    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call, into: Pair | None) -> Pair:
        raise NotImplementedError

    def gradients(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: Call, into: Into
    ) -> Triple:
        """The share of these keys, from the final out and lse."""
        raise NotImplementedError

    @without_autocast
    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: Call, into: Pair | None = None) -> Pair:
        """(out, lse); a query without keys has out 0 and lse -inf."""
        if q.dim() == 3 and (self.one_batch or call.pattern is not None):
            return batch_of_one(self.forward, (q, k, v), call, into)
        q, k, v = fit((q, k, v), self.align)
        first = first_with_keys(q, k, call)
        if first or not q.numel():
            out, lse = into or (empty_tokens(result_like(q, v), tokens(q)), empty_lse(q))
            out.narrow(-3, 0, first).zero_()
            lse[..., :first].fill_(-torch.inf)
            if first < tokens(q):
                self.forward(q[:, first:], k, v, call, (out[:, first:], lse[..., first:]))
            return out, lse
        fitting = into if into is None or fits(into[0], self.align) else (dense_like(into[0]), into[1])
        out, lse = self.attend(q, k, v, call, fitting)
        if call.some_without_keys:
            lse.masked_fill_(lse == torch.inf, -torch.inf)
            out.masked_fill_((lse == -torch.inf).transpose(-1, -2).unsqueeze(-1), 0)
        return settle((out, lse), into)

    @without_autocast
    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: Call, into: Into = None
    ) -> Triple:
        """(dq, dk, dv) of these keys, from the final out and lse; 0 for queries and keys that no pair has."""
        if q.dim() == 3 and (self.one_batch or call.pattern is not None):
            return batch_of_one(self.backward, (dout, q, k, v, out, lse), call, into)
        dout, q, k, v, out = fit((dout, q, k, v, out), self.align)
        first = first_with_keys(q, k, call)
        if first or not q.numel():
            dq, dk, dv = into or (dense_like(q), dense_like(k), dense_like(v))
            dq.narrow(-3, 0, first).zero_()
            if first < tokens(q):
                dout, out, q, rest = (x[:, first:] for x in (dout, out, q, dq))
                self.backward(dout, q, k, v, out, lse[..., first:], call, (rest, dk, dv))
            else:
                dk.zero_()
                dv.zero_()
            return dq, dk, dv
        fitting = into
        if into is not None and not all(fits(x, self.align) for x in into):
            dq, dk, dv = (x if fits(x, self.align) else dense_like(x) for x in into)
            fitting = dq, dk, dv
        return settle(self.gradients(dout, q, k, v, out, lse, call, fitting), into)


class Wrapped(Kernel):
    """A kernel by another one, which does what this one adds nothing to."""

    def __init__(self, kernel: Kernel, *features: Feature):
        self.kernel, self.name, self.summary, self.align = kernel, kernel.name, kernel.summary, kernel.align
        self.features, self.note, self.any_order = kernel.features.union(features), kernel.note, kernel.any_order

    def missing(self, device: str) -> str | None:
        return self.kernel.missing(device)

    def refuses(self, shape: Shape, mask: Band) -> str | None:
        return self.kernel.refuses(shape, mask)


def first_with_keys(q: Tensor, k: Tensor, call: Call) -> int:
    """The number of leading queries that surely see no key: of a packed batch or a pattern all, or 0. Masks are aligned
    bottom-right, so the other queries of a dense call are not affected if these are cut off."""
    if not q.numel() or not k.numel():
        return tokens(q)
    if call.pattern is not None:
        return 0 if len(call.pattern.rectangles) else tokens(q)
    if call.packed or call.lengths is not None or call.mask.right < 0:
        return 0
    return min(max(0, tokens(q) - tokens(k) - call.mask.right), tokens(q))


def lacks(kernel: Kernel, shape: Shape) -> str | None:
    """Why a kernel cannot do what the call has beyond plain attention, or None."""
    if shape.softcap and "softcap" not in kernel.features:
        return "softcap: cannot apply one"
    if shape.v_head_dim != shape.head_dim and "v_head_dim" not in kernel.features:
        return f"v_head_dim={shape.v_head_dim}: must be head_dim={shape.head_dim}"
    return None


T = TypeVar("T", Pair, Triple)


def settle(result: T, into: T | None) -> T:
    """The result of a kernel that cannot write into given tensors: copied into `into`, where given."""
    if into is None:
        return result
    for x, value in zip(into, result, strict=True):
        if x is not value:
            x.copy_(value)
    return into


def batch_of_one(run: Callable[..., T], tensors: tuple[Tensor, ...], call: Call, into: T | None) -> T:
    """A call on tensors without a batch dim, by `run`, which takes them with one."""
    result = run(*(x[None] for x in tensors), call, into and tuple(x[None] for x in into))
    return into or tuple(x[0] for x in result)  # type: ignore[return-value]
