"""The kernels inside PyTorch, called through aten, the only interface that returns the LSE: `sdpa_flash` (PyTorch's CPU
flash attention, on CUDA FlashAttention-2), `sdpa_cudnn` and `sdpa_efficient`. Also `flash2`, which is the package flash-attn where
that is installed, else the same FlashAttention-2."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import metadata
from threading import Lock
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from attention.dtypes import accumulation_dtype
from attention.gpu import private
from attention.kernels import decompose
from attention.kernels.interface import Call, Into, Kernel, Pair, Shape, Triple
from attention.kernels.math import PLAIN
from attention.masks.band import Band

HALF = (torch.bfloat16, torch.float16)


# Rules of kernels: why they do not run on a device, or do not take a call; None where they do.


def half_only(shape: Shape) -> str | None:
    return None if shape.dtype in HALF else f"dtype={name_of(shape.dtype)}: bf16 and fp16 only"


def head_dim_rule(shape: Shape, most: int, multiple: int = 8) -> str | None:
    for name, size in (("head_dim", shape.head_dim), ("v_head_dim", shape.v_head_dim)):
        if size > most or size % multiple:
            return f"{name}={size}: multiples of {multiple} up to {most} only"
    return None


def name_of(dtype: torch.dtype) -> str:
    """The short name of a dtype: "bf16", "fp32"."""
    return {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64"}.get(
        dtype, str(dtype)
    )


class _CpuRectangles(decompose.Decomposed):
    """PyTorch's CPU flash attention. Its causal mask is aligned top-left, so it is used on squares only; a band is
    given as an explicit mask. Its backward has no GQA, so KV heads are repeated and their gradients summed. With fewer
    than 16 keys a NaN in q or k may be lost, because PyTorch's maximum over a short row skips it."""

    def rectangle(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Pair:
        out, lse = private.aten("_scaled_dot_product_flash_attention_for_cpu")(
            *_bhsd(q, k, v), 0.0, call.mask.causal, attn_mask=_explicit(call.mask, q, k), scale=call.scale
        )
        return out.transpose(1, 2), lse

    def rectangle_backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: Call
    ) -> Triple:
        groups = q.shape[2] // k.shape[2]
        k_, v_ = repeat_heads(k, groups), repeat_heads(v, groups)
        dq, dk, dv = private.aten("_scaled_dot_product_flash_attention_for_cpu_backward")(
            *_bhsd(dout, q, k_, v_, out),
            lse,
            0.0,
            call.mask.causal,
            attn_mask=_explicit(call.mask, q, k),
            scale=call.scale,
        )
        dq, dk, dv = _bhsd(dq, dk, dv)
        return dq, sum_groups(dk, groups), sum_groups(dv, groups)


CPU_RECTANGLES = _CpuRectangles()


class SdpaFlash(Kernel):
    name = "sdpa_flash"
    summary = "PyTorch's own flash attention: FlashAttention-2 on CUDA, its CPU flash attention on a CPU"

    def missing(self, device: str) -> str | None:
        return None

    def refuses(self, shape: Shape, mask: Band) -> str | None:
        if shape.device == "cuda":
            return half_only(shape) or head_dim_rule(shape, 256)
        if shape.dtype not in (*HALF, torch.float32, torch.float64):
            return f"dtype={name_of(shape.dtype)}: bf16, fp16, fp32 and fp64 only"
        return None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call, into: Pair | None) -> Pair:
        if q.is_cuda:
            return FLASH_ATTENTION_2.attend(q, k, v, call, into)
        return CPU_RECTANGLES.attend(q, k, v, call, into)

    def gradients(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: Call, into: Into
    ) -> Triple:
        if q.is_cuda:
            return FLASH_ATTENTION_2.gradients(dout, q, k, v, out, lse, call, into)
        return CPU_RECTANGLES.gradients(dout, q, k, v, out, lse, call, into)


class SdpaCudnn(decompose.Decomposed):
    """Its causal mask is aligned top-left, so it is used on squares only. It refuses a single query with a single key,
    which `math` computes instead."""

    name = "sdpa_cudnn"
    summary = "cuDNN's fused attention through PyTorch; packed batches go sequence by sequence"
    features = frozenset({"v_head_dim"})

    def missing(self, device: str) -> str | None:
        return super().missing(device) or (None if torch.backends.cudnn.is_available() else "this PyTorch has no cuDNN")

    def refuses(self, shape: Shape, mask: Band) -> str | None:
        if mask.windowed:
            return f"window=({mask.left}, {mask.right}): no sliding window"
        d, dv = shape.head_dim, shape.v_head_dim
        if d != dv and max(d, dv) > 128 and not (_hopper() and (d, dv) == (192, 128)):
            return f"head_dim={d} and v_head_dim={dv}: different ones up to 128 only, or 192 and 128 on Hopper"
        return half_only(shape) or head_dim_rule(shape, 256 if not shape.backward or _hopper() else 128)

    def rectangle(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Pair:
        if q.shape[1] == k.shape[1] == 1:
            return PLAIN.rectangle(q, k, v, call)
        out, lse, *_ = private.aten("_scaled_dot_product_cudnn_attention")(
            *_bhsd(q, k, v), None, True, 0.0, call.mask.causal, False, scale=call.scale
        )
        return out.transpose(1, 2), lse.squeeze(-1)

    def rectangle_backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: Call
    ) -> Triple:
        if q.shape[1] == k.shape[1] == 1:
            return PLAIN.rectangle_backward(dout, q, k, v, out, lse, call)
        # PyTorch finds cuDNN's graphs by the strides of q, k and v: out and dout must follow from those of q
        if not dout.stride() == out.stride() == q.stride():
            dout, q, out = dout.contiguous(), q.contiguous(), out.contiguous()
        seed = torch.empty((), dtype=torch.int64, device=q.device)  # not read: there is no dropout
        sizes = None, None, None, q.shape[1], k.shape[1]
        grads = private.aten("_scaled_dot_product_cudnn_attention_backward")(
            *_bhsd(dout, q, k, v, out),
            lse.contiguous().unsqueeze(-1),
            seed,
            seed,
            *sizes,
            0.0,
            call.mask.causal,
            scale=call.scale,
        )
        return _bhsd(*grads)  # type: ignore[return-value]


class SdpaEfficient(decompose.Decomposed):
    """xformers' CUTLASS kernels, inside PyTorch. They have no GQA, so KV heads are repeated and their gradients summed,
    and they pad the LSE to a multiple of 32."""

    name = "sdpa_efficient"
    summary = "PyTorch's memory-efficient attention; also fp32; packed batches go sequence by sequence"
    features = frozenset({"v_head_dim"})

    def refuses(self, shape: Shape, mask: Band) -> str | None:
        if mask.windowed:
            return f"window=({mask.left}, {mask.right}): no sliding window"
        if shape.dtype not in (*HALF, torch.float32):
            return f"dtype={name_of(shape.dtype)}: bf16, fp16 and fp32 only"
        return head_dim_rule(shape, 1024, 4 if shape.dtype == torch.float32 else 8)

    def rectangle(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Pair:
        groups = q.shape[2] // k.shape[2]
        k_, v_ = repeat_heads(k, groups), repeat_heads(v, groups)
        out, lse, *_ = private.aten("_efficient_attention_forward")(
            q, k_, v_, None, None, None, q.shape[1], k.shape[1], 0.0, int(call.mask.causal), True, scale=call.scale
        )
        return out, lse[..., : q.shape[1]]

    def rectangle_backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: Call
    ) -> Triple:
        groups = q.shape[2] // k.shape[2]
        k_, v_ = repeat_heads(k, groups), repeat_heads(v, groups)
        padding = -q.shape[1] % 32
        lse = torch.nn.functional.pad(lse, (0, padding), value=torch.inf).contiguous()
        seed = torch.empty((), dtype=torch.int64, device=q.device)  # not read: there is no dropout
        dq, dk, dv, _ = private.aten("_efficient_attention_backward")(
            dout.contiguous(),
            q,
            k_,
            v_,
            None,
            out.contiguous(),
            None,
            None,
            q.shape[1],
            k.shape[1],
            lse,
            0.0,
            seed,
            seed,
            int(call.mask.causal),
            False,
            scale=call.scale,
        )
        return dq, sum_groups(dk, groups), sum_groups(dv, groups)


class FlashAttention2(decompose.Decomposed):
    """FlashAttention-2 inside PyTorch, on CUDA. Subclasses run it by other functions, which have its interface and limits."""

    def refuses(self, shape: Shape, mask: Band) -> str | None:
        return half_only(shape) or head_dim_rule(shape, 256)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call, into: Pair | None) -> Pair:
        if bound_lost(q, k, call):
            return super().attend(q, k, v, call, into)
        return self.rectangle(q, k, v, call)

    def gradients(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: Call, into: Into
    ) -> Triple:
        if bound_lost(q, k, call):
            return super().gradients(dout, q, k, v, out, lse, call, into)
        return self.rectangle_backward(dout, q, k, v, out, lse, call)

    def rectangle(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Pair:
        out, lse, *_ = private.aten("_flash_attention_forward")(
            q,
            k,
            v,
            *lengths_of(q, k, call),
            0.0,
            call.mask.causal,
            False,
            scale=call.scale,
            **_flash2_window(call.mask),
        )
        return out, lse

    def rectangle_backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: Call
    ) -> Triple:
        dout, out, lse = dout.contiguous(), out.contiguous(), lse.contiguous()
        return self.run_backward((dout, q, k, v, out, lse), call)

    def run_backward(self, tensors: tuple[Tensor, ...], call: Call) -> Triple:
        """tensors: dout, q, k, v and the final out and lse, of which dout, out and lse are contiguous."""
        _, q, k, *_ = tensors
        seed = torch.zeros(2, dtype=torch.uint64, device=q.device)
        causal = call.mask.causal
        with _deterministic(call.deterministic):
            grads: Triple = private.aten("_flash_attention_backward")(
                *tensors,
                *lengths_of(q, k, call),
                0.0,
                causal,
                seed,
                seed,
                scale=call.scale,
                **_flash2_window(call.mask),
            )
        return grads


FLASH_ATTENTION_2 = FlashAttention2()


class Flash2(FlashAttention2):
    name = "flash2"

    @property
    def summary(self) -> str:  # type: ignore[override]
        return f"FlashAttention-2: {self.note or 'inside PyTorch, as the package flash-attn is not installed'}"

    @property
    def note(self) -> str | None:  # type: ignore[override]
        return None if flash_attn() is None else f"the package flash-attn {metadata.version('flash-attn')}"

    def rectangle(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Pair:
        package = flash_attn()
        if package is None:
            return super().rectangle(q, k, v, call)
        options = _package_options(call) | {"return_softmax": False}
        if call.packed:
            out, lse, *_ = package.varlen_forward(q, k, v, *lengths_of(q, k, call), **options)
        else:
            out, lse, *_ = package.forward(q, k, v, **options)
        return out, lse

    def run_backward(self, tensors: tuple[Tensor, ...], call: Call) -> Triple:
        package = flash_attn()
        if package is None:
            return super().run_backward(tensors, call)
        _, q, k, v, *_ = tensors
        grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        options = _package_options(call) | {"deterministic": call.deterministic}
        if call.packed:
            package.varlen_backward(*tensors, *grads, *lengths_of(q, k, call), **options)
        else:
            package.backward(*tensors, *grads, **options)
        return grads


@cache
def flash_attn() -> SimpleNamespace | None:
    """The low-level functions of the package flash-attn 2, or None. flash-attn-4 installs a `flash_attn`, too, but
    without this module."""
    if importlib.util.find_spec("flash_attn") is None:
        return None
    try:
        from flash_attn import flash_attn_interface as package
    except ImportError:
        return None
    wrong = private.FLASH2.wrong(package)
    if wrong:
        warnings.warn(wrong, stacklevel=2)
    return None if wrong else private.FLASH2.of(package)


def _package_options(call: Call) -> dict[str, Any]:
    return {
        "dropout_p": 0.0,
        "softmax_scale": call.scale,
        "causal": call.mask.right == 0,
        "window_size_left": call.mask.left,
        "window_size_right": call.mask.right,
        "softcap": 0.0,
        "alibi_slopes": None,
    }


def _flash2_window(mask: Band) -> dict[str, int]:
    return {"window_size_left": mask.left, "window_size_right": mask.right} if mask.windowed else {}


def lengths_of(q: Tensor, k: Tensor, call: Call) -> tuple[Tensor | None, Tensor | None, int, int]:
    """The cumulative lengths of queries and keys, and those of the longest sequences."""
    return call.cu_q, call.cu_k, *((call.max_q, call.max_k) if call.packed else (q.shape[1], k.shape[1]))


def _lengths(q: Tensor, k: Tensor, call: Call) -> list[tuple[int, int]]:
    """(queries, keys) of each sequence."""
    if call.q_lengths is None or call.k_lengths is None:
        return [(q.shape[1], k.shape[1])]
    return list(zip(call.q_lengths, call.k_lengths, strict=True))


def bound_lost(q: Tensor, k: Tensor, call: Call) -> bool:
    """Whether FlashAttention-2 would mask this window wrongly. It replaces a missing bound by Sk and drops a bound of
    Sk or more; with more queries than keys either can be wrong. Chunks of at most Sk queries are safe."""
    mask = call.mask
    if not mask.windowed or all(sq <= sk for sq, sk in _lengths(q, k, call)):
        return False
    return mask.right < 0 or max(mask.left, mask.right) >= min(sk for _, sk in _lengths(q, k, call))


_switch = Lock()


@contextmanager
def _deterministic(on: bool) -> Iterator[None]:
    """Sets PyTorch's global switch, which aten's flash backward reads. One thread at a time: another's end would reset it."""
    if not on:
        yield
        return
    with _switch:
        before = torch.are_deterministic_algorithms_enabled()
        if not before:
            torch.use_deterministic_algorithms(True)
        try:
            yield
        finally:
            if not before:
                torch.use_deterministic_algorithms(False)


def _bhsd(*xs: Tensor) -> tuple[Tensor, ...]:
    return tuple([x.transpose(1, 2) for x in xs])


def repeat_heads(x: Tensor, groups: int) -> Tensor:
    """`[B, S, Hk, D]` to `[B, S, Hk * groups, D]`, for kernels without GQA."""
    return x.repeat_interleave(groups, 2) if groups > 1 else x


def sum_groups(x: Tensor, groups: int) -> Tensor:
    """The gradient of `repeat_heads`, summed in the accumulation dtype."""
    return x.unflatten(2, (-1, groups)).sum(3, dtype=accumulation_dtype(x.dtype)).to(x.dtype) if groups > 1 else x


def _explicit(mask: Band, q: Tensor, k: Tensor) -> Tensor | None:
    """A window as an additive mask `[Sq, Sk]`; None for other bands."""
    if not mask.windowed:
        return None
    keep = decompose.band_matrix(mask, q.shape[1], k.shape[1], q.device)
    return torch.zeros(keep.shape, dtype=q.dtype).masked_fill_(~keep, -torch.inf)


def _hopper() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 9
