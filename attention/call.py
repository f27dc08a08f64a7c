"""The arguments of `make` and of a call, each named once: `Settings` and `CallSpec`. Each check of an argument returns it in its
canonical form, or raises a ValueError that names the received value, the rule and the way out."""

from __future__ import annotations

import math
import sys
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise
from numbers import Real
from operator import index
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from attention import masks
from attention.errors import nearest
from attention.executors.plan import KeyLengths
from attention.geometry.layouts import CuSeqlens
from attention.geometry.options import HeadCount, Options, check_heads
from attention.kernels import Shape
from attention.masks.band import Band
from attention.masks.checks import whole_number
from attention.masks.mask import Mask
from attention.masks.sequences import mask_of
from attention.tensors import on_host, tokens
from attention.variants.base import Variant, decodes

if TYPE_CHECKING:
    from attention.api import ContextParallel

Lengths = Tensor | list[int] | tuple[int, ...] | None
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
INTEGERS = (torch.int32, torch.int64, torch.int16, torch.int8, torch.uint8)
NO_WINDOW = (-1, -1)
MOST = 256  # cached checks of packed batches
MOST_TEXT = 40  # characters of a wrong value that a message shows
FP32 = torch.finfo(torch.float32)
# what other packages call an argument, and what to give instead
ELSEWHERE = {
    "is_causal": "give causal=True",
    "attn_mask": "give mask=, one of attention.masks",
    "dropout_p": "dropout is not supported by any variant; leave it out",
    "softmax_scale": "give scale=",
    "window_size": "give window=(left, right)",
    "cu_seqlens_q": "give the global cu_seqlens=",
    "enable_gqa": "k and v may always have fewer heads than q; leave it out",
}


@dataclass(frozen=True)
class Settings:
    """What `make` fixes for all calls of a function: its checked arguments."""

    variant: Variant[Any]
    options: Options
    kernel: str
    transport: str
    deterministic: bool
    replay: str
    agreement_s: float  # 0: ranks are not compared
    check: bool


@dataclass(frozen=True)
class CallSpec:
    """The checked arguments of a call that determine its plan, in addition to the function's `Settings`."""

    shape: Shape
    batch: int = field(compare=False)  # a plan serves any, but ranks agree on a new plan only if theirs are equal
    kv_tokens: int  # of this rank
    cu_seqlens: CuSeqlens  # without padding
    causal: bool
    window: tuple[int, int]
    mask: Mask | None
    padding: int
    scale: float
    softcap: float | None
    sinks: bool
    kv_lengths: KeyLengths  # of a decode
    lengths_on: str | None  # where these are known
    device: torch.device
    return_lse: bool


def call_spec(
    fn: ContextParallel, q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None,
    window: tuple[int, int] = NO_WINDOW, cu_seqlens: Lengths = None, mask: Mask | None = None, kv_tokens: int | None = None,
    padding: int = 0, sinks: Tensor | None = None, softcap: float | None = None, kv_lengths: Lengths = None,
    return_lse: bool = False,
) -> CallSpec:  # fmt: skip
    """The checked arguments of a call (see `ContextParallel.__call__`). Raises ValueError."""
    packed, decode = cu_seqlens is not None, fn.variant.decode
    check_tensors(q, k, v, packed, decode)
    check_sinks(sinks, q)
    whole = tokens(k) * (1 if fn.layout.replicated else fn.world)
    total = whole if kv_tokens is None else whole_number("kv_tokens", kv_tokens)
    lengths = check_kv_lengths(kv_lengths, len(q), total, q.device, fn.variant)
    gradient = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, v, sinks))
    shape = Shape.of(q, k, v, gradient, softcap is not None)
    kv_heads, ratio = fn.options.computed(HeadCount(shape.kv_heads, shape.heads // shape.kv_heads), fn.world)
    return CallSpec(
        shape=replace(shape, heads=kv_heads * ratio, kv_heads=kv_heads),
        batch=1 if packed else len(q),
        kv_tokens=tokens(k),
        cu_seqlens=check_cu_seqlens(cu_seqlens, total - check_padding(padding, total, decode)),
        causal=check_flag("causal", causal),
        window=check_window(window),
        mask=check_mask(mask),
        padding=padding,
        scale=positive(check_scale(scale), q.shape[-1]),
        softcap=check_softcap(softcap),
        sinks=sinks is not None,
        kv_lengths=lengths,
        lengths_on=None if lengths is None else "GPU" if isinstance(lengths, Tensor) else "CPU",
        device=q.device,
        return_lse=return_lse,
    )


def key_of_more(arguments: Mapping[str, Any]) -> Hashable:
    """The part of a call's key for arguments that are not the defaults. Raises ValueError for wrong ones."""
    sinks, padding, lengths = (arguments[name] for name in ("sinks", "padding", "cu_seqlens"))
    tensor = isinstance(sinks, Tensor) and (sinks.shape, sinks.dtype, sinks.device, sinks.requires_grad)
    return (
        check_scale(arguments["scale"]), check_softcap(arguments["softcap"]), check_window(arguments["window"]),
        id(arguments["mask"]), type(sinks), tensor, torch.is_grad_enabled(), padding, type(padding),
        lengths is not None and whole_lengths(lengths),
    )  # fmt: skip


def process_group(group: object) -> dist.ProcessGroup | None:
    """The process group: `group` itself, or that of a one-dimensional device mesh. Raises ValueError for anything else."""
    if group is None or isinstance(group, dist.ProcessGroup) or group == dist.GroupMember.NON_GROUP_MEMBER:
        return group  # type: ignore[return-value]
    if not isinstance(group, dist.DeviceMesh):
        raise ValueError(
            f"group={_text(group)}: must be a process group or a device mesh of one dimension; give dist.new_group(ranks)"
        )
    if group.ndim != 1:
        raise ValueError(
            f"group={_text(group)}: a mesh of {group.ndim} dimensions must be cut to the one of the sequence; for instance "
            'mesh["cp"]'
        )
    inside = group.get_coordinate() is not None
    return group.get_group() if inside else dist.GroupMember.NON_GROUP_MEMBER  # type: ignore[return-value]


def _text(value: object) -> str:
    """A wrong value in a message of one line."""
    text = " ".join(repr(value).split())
    return text if len(text) <= MOST_TEXT else f"{text[:MOST_TEXT]}…"


def rank_and_world(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """This rank's number in the group and the group's size; (0, 1) without torch.distributed.

    Raises ValueError for a rank outside the group."""
    if not dist.is_initialized():
        return 0, 1
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError(
            f"group={group}: rank {dist.get_rank()} is not in the group; call make on the group's ranks only"
        )
    return rank, dist.get_world_size(group)


def check_keywords(unknown: Mapping[str, object], known: Iterable[str]) -> None:
    """Raises TypeError for the first of these keyword arguments, which a call does not have."""
    for name in unknown:
        raise TypeError(f"{name}: a call has no such argument; {ELSEWHERE.get(name) or nearest(name, known)}")


def check_plain(name: str, x: object) -> None:
    """Raises ValueError unless x is a dense tensor in this rank's memory."""
    if not isinstance(x, Tensor):
        raise ValueError(f"{name} is a {type(x).__name__}: it must be a tensor; for instance torch.as_tensor({name})")
    distributed = sys.modules.get("torch.distributed.tensor")  # which a program that has DTensors has imported
    if distributed is not None and isinstance(x, distributed.DTensor):
        raise ValueError(f"{name} is a DTensor: it must be the tensor that this rank holds; give {name}.to_local()")
    if x.is_nested:
        raise ValueError(f"{name} is a nested tensor: it must be one dense tensor; give a packed batch with cu_seqlens")
    if x.layout != torch.strided:
        raise ValueError(f"{name} is a tensor of layout {x.layout}: it must be dense; give {name}.to_dense()")


def check_tensors(q: Tensor, k: Tensor, v: Tensor, packed: bool, decode: bool) -> None:
    """Kind, shapes, dtype and device of q, k and v. Raises ValueError."""
    if decode and packed:
        raise ValueError("cu_seqlens: a decode takes a batch of single sequences, [B, Sq, H, D] and [B, N, Hk, D]")
    dims = 3 if packed else 4
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_plain(name, x)
        if x.dim() != dims:
            form = "[T, H, D] with cu_seqlens" if packed else "[B, S, H, D] without cu_seqlens"
            raise ValueError(f"{name} has shape {list(x.shape)}: it must be {form}")
    if k.shape[:-1] != v.shape[:-1]:
        raise ValueError(f"k {list(k.shape)} and v {list(v.shape)}: may differ in the last dim, the head dim, only")
    alike = slice(1) if decode else slice(-2)
    if q.shape[alike] != k.shape[alike] or q.shape[-1] != k.shape[-1]:
        rule = "tokens and heads only" if decode else f"the number of heads only; {decodes()} take fewer queries"
        raise ValueError(f"q {list(q.shape)} and k {list(k.shape)}: may differ in {rule}")
    needed = q.shape[-2:] if decode else q.shape  # a decode may have no queries or no keys yet
    if not all(needed):
        raise ValueError(f"q has shape {list(q.shape)}: no dimension may be 0; leave out the call for an empty input")
    if not v.shape[-1]:
        raise ValueError(f"v has shape {list(v.shape)}: its head dim must be at least 1; give [.., Hk, Dv]")
    if not q.dtype == k.dtype == v.dtype or not q.device == k.device == v.device:
        raise ValueError(
            f"q, k, v are {q.dtype} on {q.device}, {k.dtype} on {k.device}, {v.dtype} on {v.device}: "
            "one dtype and one device are needed; for instance q.to(v)"
        )
    if q.dtype not in DTYPES:
        raise ValueError(
            f"q, k, v are {q.dtype}: attention needs a bf16, fp16, fp32 or fp64 floating-point dtype; "
            "give q.to(torch.bfloat16), ..."
        )
    check_heads(q.shape[-2], k.shape[-2])


def check_flag(name: str, value: object) -> bool:
    """The flag as a bool. Raises ValueError unless it is one."""
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    raise ValueError(f"{name}={_text(value)}: must be True or False")


def check_scale(scale: float | None) -> float | None:
    """The scale as a float, or None. Raises ValueError unless it is a number that fp32 can hold."""
    if scale is None or abs(number := _number(scale)) <= FP32.max:
        return None if scale is None else number
    raise ValueError(
        f"scale={_text(scale)}: must be a finite number, at most {FP32.max:.1e}; leave it out for head_dim ** -0.5, or "
        "give a float"
    )


def check_softcap(softcap: float | None) -> float | None:
    """The softcap as a float, or None. Raises ValueError unless it is a positive number that fp32 can hold."""
    if softcap is None or FP32.tiny <= (number := _number(softcap)) <= FP32.max:
        return None if softcap is None else number
    raise ValueError(
        f"softcap={_text(softcap)}: must be a positive finite number, {FP32.tiny:.1e} to {FP32.max:.1e}; leave it out "
        "for no softcap"
    )


def _number(value: object) -> float:
    """A real number as a float; NaN for anything else."""
    try:
        return float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan
    except OverflowError:
        return math.inf


def check_sinks(sinks: Tensor | None, q: Tensor) -> None:
    """Raises ValueError unless the sinks are one logit for each of q's heads."""
    if sinks is None:
        return
    check_plain("sinks", sinks)
    if sinks.shape != q.shape[-2:-1]:
        raise ValueError(
            f"sinks: {list(sinks.shape)} given: must be a tensor [{q.shape[-2]}], a logit for each head of q"
        )
    if sinks.dtype not in DTYPES or sinks.device != q.device:
        raise ValueError(
            f"sinks are {sinks.dtype} on {sinks.device}: must be bf16, fp16, fp32 or fp64 on {q.device}; "
            "give sinks.to(q.device, torch.float32)"
        )


def positive(scale: float | None, head_dim: int) -> float:
    """The positive scale for a kernel, which goes with the queries from `signed`."""
    return abs(scale) if scale else head_dim**-0.5


def signed(q: Tensor, scale: float | None) -> Tensor:
    """The queries with the sign of the scale moved into them, since kernels assume a positive scale. Differentiable."""
    if scale is None or scale > 0:
        return q
    return -q if scale < 0 else q * 0


def check_window(window: tuple[int, int]) -> tuple[int, int]:
    """(left, right). Raises ValueError for anything but two integers; their range is checked by `Band.of`."""
    try:
        left, right = window
        return index(left), index(right)
    except (TypeError, ValueError):
        raise ValueError(
            f"window={_text(window)}: must be two integers (left, right), -1 for unbounded; for instance window=(512, 0)"
        ) from None


def check_cu_seqlens(cu_seqlens: Lengths, total: int) -> CuSeqlens:
    """The cumulative lengths as integers on the CPU; (0, total) for None. total: the global number of tokens.

    Raises ValueError unless they are integers that rise from 0 to total."""
    return (0, total) if cu_seqlens is None else _rising(whole_lengths(cu_seqlens), total)


def whole_lengths(cu_seqlens: object) -> CuSeqlens:
    """As integers on the CPU. Raises ValueError unless they are integers."""
    return _integers("cu_seqlens", cu_seqlens, "[n + 1], rising from 0 to the total")


def _integers(name: str, values: Any, rule: str) -> tuple[int, ...]:
    """As integers on the CPU. Raises ValueError unless they are integers in one dimension."""
    if isinstance(values, Tensor):
        return on_host(_integer_tensor(name, values, rule))
    try:
        return tuple(map(index, values))  # accepts NumPy's integers
    except TypeError:
        raise ValueError(f"{name}={_text(values)}: must be integers {rule}") from None


def _integer_tensor(name: str, x: Any, rule: str) -> Tensor:
    if x.dim() != 1 or x.dtype not in INTEGERS:
        raise ValueError(
            f"{name} is {x.dtype} of shape {list(x.shape)}: must be an integer tensor {rule}; "
            f"give {name}.to(torch.int32)"
        )
    return x


@lru_cache(maxsize=MOST)
def _rising(cu: CuSeqlens, total: int) -> CuSeqlens:
    """Cached, since all layers of a model pass the same lengths."""
    if len(cu) < 2 or cu[0] != 0 or any(b < a for a, b in pairwise(cu)) or cu[-1] != total:
        raise ValueError(f"cu_seqlens={_shown(cu)}: must rise from 0 to the global number of tokens, {total}")
    return cu


def _shown(cu: tuple[object, ...]) -> str:
    shown = cu if len(cu) < 9 else (*cu[:4], "...", *cu[-3:])
    return f"({', '.join(map(str, shown))})"


def check_kv_lengths(
    lengths: Lengths, batch: int, total: int, device: torch.device, variant: Variant[Any]
) -> tuple[int, ...] | Tensor | None:
    """The number of keys of each batch element: as integers on the CPU, or for a GPU tensor the tensor itself, which is not
    read. Raises ValueError unless there is one for each, from 0 to the total."""
    if lengths is None:
        return None
    if not variant.decode:
        raise ValueError(f"kv_lengths: {variant.name} is no decode; take {decodes()}, or pack the batch by cu_seqlens")
    rule = f"[{batch}], one for each of the {batch} batch elements"
    on_gpu = isinstance(lengths, Tensor) and not lengths.is_cpu
    numbers = (_integer_tensor if on_gpu else _integers)("kv_lengths", lengths, rule)
    if len(numbers) != batch:
        raise ValueError(f"kv_lengths has {len(numbers)} lengths: must be {rule}")
    if isinstance(numbers, tuple):
        return check_range(numbers, total)
    if numbers.device != device:
        raise ValueError(f"kv_lengths is on {numbers.device}: must be on {device}, as q, or on the CPU")
    return numbers


def check_range(kv_lengths: tuple[int, ...], total: int) -> tuple[int, ...]:
    """Raises ValueError unless all lengths are from 0 to the total."""
    for i, n in enumerate(kv_lengths):
        if not 0 <= n <= total:
            raise ValueError(
                f"kv_lengths[{i}]={n}: must be from 0 to the {total} keys of all ranks; give the numbers of keys, and the "
                "size that k and v are padded to as kv_tokens"
            )
    return kv_lengths


def check_prefix(prefix: object, k: Tensor, v: Tensor, variant: Variant[Any]) -> tuple[Tensor, Tensor]:
    """Keys and values `[1, n, Hk, .]` of a prefix that a batch shares. Raises ValueError unless the variant is a decode and they
    have the heads and head dims of k and v."""
    if not variant.decode:
        raise ValueError(f"prefix: {variant.name} is no decode; take {decodes()}, or mask=masks.shared_prompt(...)")
    if not isinstance(prefix, tuple | list) or not all(isinstance(x, Tensor) for x in prefix) or len(prefix) != 2:
        kind = "no prefix" if prefix is None else type(prefix).__name__
        raise ValueError(f"prefix: {kind} given: must be a pair (k, v) of tensors [1, N_p, Hk, D] and [1, N_p, Hk, Dv]")
    keys, values = (x.unsqueeze(0) if x.dim() == 3 else x for x in prefix)
    for name, x, like in (("k", keys, k), ("v", values, v)):
        if x.dim() != 4 or x.shape[0] != 1 or x.shape[2:] != like.shape[2:]:
            raise ValueError(
                f"{name} of the prefix has shape {list(x.shape)}: must be [1, N_p, {', '.join(map(str, like.shape[2:]))}], "
                f"one sequence with the heads of {name}"
            )
    return keys, values


def check_no_window(causal: bool, window: tuple[int, int], mask: object) -> None:
    """Raises ValueError for a window, which a call with a prefix can't have."""
    band = mask_of(Band.of(causal, check_window(window)), (0, 1), check_mask(mask))
    if isinstance(band, Band) and band.windowed:
        raise ValueError(
            f"window=({band.left}, {band.right}): the queries of a call with a prefix see all of it; leave the window out, or give "
            "the prefix as keys of every element"
        )


def check_padding(padding: int, total: int, decode: bool) -> int:
    """Raises ValueError unless `padding`, as `shard(x, pad=True)` returns it, leaves some of the `total` tokens."""
    if isinstance(padding, bool) or not isinstance(padding, int) or padding < 0:
        raise ValueError(f"padding={_text(padding)}: must be a number of tokens, as fn.shard(x, pad=True) returns it")
    if padding and decode:
        raise ValueError(f"padding={padding}: the keys of a decode need not divide; leave padding out")
    if padding and padding >= total:
        raise ValueError(
            f"padding={padding}: there are {total} tokens with it; give what fn.shard(x, pad=True) returned"
        )
    return padding


def token_dim_of(x: Tensor, packed: bool) -> int:
    """The token dimension of a tensor to shard: 1 for `[B, S]` and `[B, S, H, D]`; for a packed batch 0 for `[T]` and
    `[T, H, D]`, and 1 for `[1, T]`.

    Raises ValueError for tensors that are not plain, and for shapes with an ambiguous token dimension."""
    check_plain("x", x)
    dims, shape = x.dim(), list(x.shape)
    if packed:
        if dims in (1, 3):
            return 0
        if dims == 2 and shape[0] == 1:
            return 1
        raise ValueError(
            f"x has shape {shape}: with cu_seqlens it must be [T], [1, T] or [T, H, D]; give [T, C] as x.unsqueeze(1), which is "
            "[T, 1, C]"
        )
    if dims in (2, 4):
        return 1
    if dims == 3:
        raise ValueError(
            f"x has shape {shape}: three dims without cu_seqlens may be [B, S, C] or a packed [T, H, D]; give x.unsqueeze(2), "
            "which is [B, S, 1, C], or cu_seqlens"
        )
    raise ValueError(
        f"x has shape {shape}: must be [B, S] or [B, S, H, D], or with cu_seqlens [T] or [T, H, D]; reshape it"
    )


def check_mask(mask: object) -> Mask | None:
    """The mask. Raises ValueError for anything else, such as a tensor."""
    if mask is None or isinstance(mask, Mask):
        return mask
    what = f"a tensor {list(mask.shape)} of {mask.dtype}" if isinstance(mask, Tensor) else _text(mask)
    raise ValueError(
        f"mask={what}: must be one of attention.masks, for instance masks.chunked(8192), or None; there are "
        f"{', '.join(masks.names())}"
    )
