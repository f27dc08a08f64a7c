"""The interface of local kernels: *(q, k, v, call) -> (out, lse)*, with a backward from the final out and lse."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from itertools import accumulate, pairwise
from typing import Literal, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from attention.gpu.uploads import uploaded
from attention.kernels.decompose import CallPart, Tensors, batch_of_one, by_element, by_parts, rectangles_of
from attention.masks.band import FULL, Band
from attention.masks.pattern import Pattern
from attention.masks.rectangles import rectangle, rectangles
from attention.tensors import dense_like, fit

Pair = tuple[Tensor, Tensor]  # out, lse
Triple = tuple[Tensor, Tensor, Tensor]  # dq, dk, dv
Into = Triple | None  # where a backward writes its gradients
Grads = tuple[Tensor, ...]  # dq, dk, dv, then the sinks' gradient, if any
T = TypeVar("T", Pair, Triple)

HALF = (torch.bfloat16, torch.float16)


class KvLengths(NamedTuple):
    """Each batch element's number of keys in a decode, counting the keys of all its calls. A kernel reads a number above
    `total` as `total`, and one below 0 as 0."""

    lengths: Tensor  # integers [B], on the device; on the CPU for a kernel that lacks the feature
    first: int  # the position of this call's first key
    total: int  # the most keys that an element may have


@dataclass(frozen=True, eq=False)
class Call:
    """One kernel call. Dense: q `[B, Sq, H, D]`, k `[B, Sk, Hk, D]`, v `[B, Sk, Hk, Dv]`, out `[B, Sq, H, Dv]`, lse
    `[B, H, Sq]`. Packed (varlen), with `q_lengths`: q `[Tq, H, D]`, k `[Tk, Hk, D]`, v `[Tk, Hk, Dv]`, lse `[H, Tq]`, and
    sequence i of the queries sees sequence i of the keys. Dv is D unless the kernel has the feature "v_head_dim".

    softcap: a score x, which is scaled, becomes `softcap * tanh(x / softcap)`; only for kernels with the feature "softcap".

    lengths: the numbers of keys, in a dense call whose batch elements differ in them; forward only. The mask is then aligned to
    each element's last key, whose position counts the keys of all calls.

    The mask is aligned bottom-right in every sequence. With a `pattern` the call is dense, whatever the tensors' form: one sequence
    of queries, one of keys, and the pattern is the mask. lse is the natural log, fp32 (fp64 for fp64). The scale and a softcap are
    positive and finite."""

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

    @property
    def packed(self) -> bool:
        return self.q_lengths is not None

    @cached_property
    def max_q(self) -> int:
        return max(self.q_lengths or (0,))

    @cached_property
    def max_k(self) -> int:
        return max(self.k_lengths or (0,))

    def sequences(self, sq: int, sk: int) -> list[tuple[int, int]]:
        """(queries, keys) of each sequence. sq, sk: those of a dense call."""
        return list(zip(self.q_lengths or (sq,), self.k_lengths or (sk,), strict=True))

    @cached_property
    def some_without_keys(self) -> bool:
        """Whether some query of a packed batch sees no key."""
        right = self.mask.right
        return self.packed and any(n and (not m or m - n + right < 0 <= right) for n, m in self.sequences(0, 0))

    def as_pattern(self, sq: int, sk: int) -> Pattern:
        """The mask of the call as a pattern. sq, sk: the queries and keys of a dense call."""
        return self.pattern or _pattern(self.mask, tuple(self.sequences(sq, sk)))

    def under(self, mask: Band | Pattern) -> Call:
        """This call under another mask, dense, without lengths."""
        band, pattern = (mask, None) if isinstance(mask, Band) else (FULL, mask)
        return Call(self.scale, band, deterministic=self.deterministic, pattern=pattern, softcap=self.softcap)

    def of_packed(self, mask: Band, q_lengths: Sequence[int], k_lengths: Sequence[int], device: torch.device) -> Call:
        """This call under a band in every sequence of a packed batch."""
        n = len(q_lengths) + 1
        aligned = -(-n // 4) * 4  # both start at a multiple of 16 bytes, in one copy to the device
        both = [*accumulate(q_lengths, initial=0), *[0] * (aligned - n), *accumulate(k_lengths, initial=0)]
        there = uploaded(np.array(both, np.int32), device)
        cu_q, cu_k = there[:n], there[aligned:]
        return Call(
            self.scale, mask, tuple(q_lengths), tuple(k_lengths), cu_q, cu_k, self.deterministic, None, self.softcap
        )


@lru_cache(maxsize=64)
def _pattern(mask: Band, sequences: tuple[tuple[int, int], ...]) -> Pattern:
    q, k = (list(accumulate(lengths, initial=0)) for lengths in zip(*sequences, strict=True))
    rows = rectangles([rectangle(*sides, mask) for sides in zip(pairwise(q), pairwise(k), strict=True)])
    return Pattern(q[-1], k[-1], rows)


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
        tokens, heads, head_dim = q.shape[-3:]
        value_dim = None if v.shape[-1] == head_dim else v.shape[-1]
        backward = q.requires_grad if backward is None else backward
        return Shape(
            q.device.type, q.dtype, heads, k.shape[-2], head_dim, q.dim() == 3, backward, tokens, value_dim, softcap
        )


Feature = Literal["softcap", "v_head_dim", "kv_lengths"]


class Kernel:
    """A local kernel. Shapes as in `Call`.

    Callers use `forward` and `backward`, which take and write tensors of any strides, or what these call, where the kernel
    `takes_whole` the call. A kernel has `attend` and `gradients`,
    which are spared what most kernels cannot do. There every tensor but lse has a contiguous last dim, `align` holds, and
    there are queries and keys. A dense call has no queries without keys, nor a call that `parts` divides. With a `pattern`, or
    if the kernel is `one_batch`, the tensors have a batch dim, also those of a packed call (1).

    into: tensors to write and return instead of new ones. They have the shapes and dtypes of the results (out may also
    be in the accumulation dtype), any strides, and do not overlap the inputs. Only of a kernel that `writes`, `attend` and
    `gradients` take them, too. Other results are copied (`settle`), and an out in the accumulation dtype may have been rounded.

    A kernel that splits the keys may leave merging to its caller, by a method `splits(q, k, v, call)`. It returns
    partial results `[n, B, Sq, H, D]` in fp32, n >= 0, and their LSEs `[n, B, H, Sq]`.

    name, summary: for users; the summary says what runs. align: bytes; the first element and every row of q, k, v, dout,
    out and the results lie on multiples of it. features: what it can do beyond plain attention (see `lacks`); a kernel without
    "kv_lengths" is called for each length. dtypes, most_head_dim, head_bytes (what a head is a multiple of), windows: what it
    takes, by default FlashAttention's. note: what the reader of a result must know. any_order: why its backward cannot be
    deterministic."""

    name: str
    summary: str
    align = 16
    features: frozenset[Feature] = frozenset()
    dtypes: tuple[torch.dtype, ...] = HALF
    most_head_dim = 256
    head_bytes = 16
    windows = True
    on_cpu = False
    one_batch = False
    writes = False
    only_squares = False
    note: str | None = None
    any_order: str | None = None

    def missing(self, device: str) -> str | None:
        """Why the kernel cannot run on this machine's `device` ("cpu" or "cuda"), or None."""
        return None if device == "cuda" or self.on_cpu else "needs a CUDA GPU"

    def refuses(self, shape: Shape, mask: Band) -> str | None:
        """Why the kernel does not support such a call, as `value: rule`, or None."""
        if mask.windowed and not self.windows:
            return f"window=({mask.left}, {mask.right}): no sliding window"
        return dtype_rule(shape.dtype, self.dtypes) or head_dim_rule(
            shape, self.most_head_dim, self.head_bytes // shape.dtype.itemsize
        )

    def refuses_pattern(self, shape: Shape, pattern: Pattern, deterministic: bool) -> str | None:
        """Why the kernel cannot do a pattern by itself, or None."""
        return "it takes no patterns"

    def squares(self, x: Tensor, y: Tensor, call: Call) -> bool:
        """Whether the kernel is given such a call as full rectangles, causal squares and small windows."""
        return self.only_squares

    def parts(self, x: Tensor, y: Tensor, call: Call) -> Sequence[CallPart] | None:
        """The parts that are computed one by one, for x of the queries and y of the keys; None: the call as it is. Masks are
        aligned bottom-right, so leading queries that surely see no key can be cut off."""
        sq, sk = x.shape[-3], y.shape[-3]
        if not x.numel() or not y.numel() or (call.pattern and not len(call.pattern.rectangles)):
            return ()
        if self.squares(x, y, call):
            done = not call.packed and (call.mask.full or (call.mask.causal and sq == sk))
            return None if done else rectangles_of(call, sq, sk)
        first = sq - sk - call.mask.right
        if first <= 0 or call.mask.right < 0 or call.packed or call.lengths is not None:
            return None
        return [CallPart(((first, sq),), ((0, sk),), call)]

    def attend(self, tensors: Tensors, call: Call) -> Pair:
        raise NotImplementedError

    def gradients(self, tensors: Tensors, call: Call) -> Triple:
        """The share of these keys, from the final out and lse."""
        raise NotImplementedError

    def takes_whole(self, q: Tensor, k: Tensor, call: Call) -> bool:
        """Whether `attend` and `gradients` take a call as it is, of tensors that fit."""
        if q.dim() == 3 and (self.one_batch or call.pattern is not None):
            return False
        return call.lengths is None and not call.some_without_keys and self.parts(q, k, call) is None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: Call, into: Pair | None = None) -> Pair:
        """(out, lse); a query without keys has out 0 and lse -inf."""
        if call.lengths is not None and "kv_lengths" not in self.features:
            return by_element(partial(self._run, self.attend), (q, k, v), call, into)
        out, lse = self._run(self.attend, (q, k, v), call, into)
        if call.some_without_keys:
            lse.masked_fill_(lse == torch.inf, -torch.inf)
            out.masked_fill_((lse == -torch.inf).transpose(-1, -2).unsqueeze(-1), 0)
        return out, lse

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: Call, into: Into = None
    ) -> Triple:
        """(dq, dk, dv) of these keys, from the final out and lse; 0 for queries and keys that no pair has."""
        return self._run(self.gradients, (dout, q, k, v, out, lse), call, into)

    def _run(self, compute: Callable[..., T], tensors: Tensors, call: Call, into: T | None = None) -> T:
        """`attend` or `gradients`, of tensors of any strides; their dtype decides what it computes in."""
        x, _, y, *_ = tensors  # of the queries, and of the keys
        device = "cuda" if x.is_cuda else "cpu"
        if torch.is_autocast_enabled(device):
            with torch.autocast(device, enabled=False):
                return self._run(compute, tensors, call, into)
        if x.dim() == 3 and (self.one_batch or call.pattern is not None):
            return batch_of_one(partial(self._run, compute), tensors, call, into)  # type: ignore[return-value]
        tensors = fit(tensors, self.align)
        parts = self.parts(x, y, call)
        if parts is not None:
            return by_parts(compute, tensors, parts, into)  # type: ignore[no-any-return]
        written = [fit(into, self.align, dense_like)] if self.writes and into else []
        return settle(compute(tensors, call, *written), into)


class Wrapped(Kernel):
    """A kernel by another one, which does what this one adds nothing to."""

    def __init__(self, kernel: Kernel, *features: Feature):
        self.kernel, self.features = kernel, kernel.features.union(features)
        for name in ("name", "summary", "align", "note", "any_order", "missing"):
            setattr(self, name, getattr(kernel, name))

    def refuses(self, shape: Shape, mask: Band) -> str | None:
        return self.kernel.refuses(shape, mask)

    def takes_whole(self, q: Tensor, k: Tensor, call: Call) -> bool:
        return False


def dtype_rule(dtype: torch.dtype, dtypes: Sequence[torch.dtype]) -> str | None:
    """Why a kernel that takes these dtypes does not take this one, or None."""
    *some, last = map(name_of, dtypes)
    return None if dtype in dtypes else f"dtype={name_of(dtype)}: {', '.join(some)} and {last} only"


def head_dim_rule(shape: Shape, most: int, multiple: int = 8) -> str | None:
    """Why a kernel of these head dims does not take a shape's, or None."""
    for name, size in (("head_dim", shape.head_dim), ("v_head_dim", shape.v_head_dim)):
        if size > most or size % multiple:
            return f"{name}={size}: multiples of {multiple} up to {most} only"
    return None


def name_of(dtype: torch.dtype) -> str:
    """The short name of a dtype: "bf16", "fp32"."""
    return str(dtype).replace("torch.bfloat", "bf").replace("torch.float", "fp")


def lacks(kernel: Kernel, shape: Shape) -> str | None:
    """Why a kernel cannot do what the call has beyond plain attention, or None."""
    if shape.softcap and "softcap" not in kernel.features:
        return "softcap: cannot apply one"
    if shape.v_head_dim != shape.head_dim and "v_head_dim" not in kernel.features:
        return f"v_head_dim={shape.v_head_dim}: must be head_dim={shape.head_dim}"
    return None


def settle(result: T, into: T | None) -> T:
    """The result of a kernel that cannot write into given tensors: copied into `into`, where given."""
    if into is None:
        return result
    for x, value in zip(into, result, strict=True):
        if x is not value:
            x.copy_(value)
    return into
