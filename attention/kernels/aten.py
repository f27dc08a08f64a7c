"""The kernels inside PyTorch, called through aten, the only interface that returns the LSE: `sdpa_flash` (PyTorch's CPU
flash attention, on CUDA FlashAttention-2), `flash2`, which is that FlashAttention-2, `sdpa_cudnn` and `sdpa_efficient`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from attention.dtypes import accumulation_dtype
from attention.gpu import private
from attention.kernels import decompose
from attention.kernels.interface import HALF, Call, Kernel, Pair, Shape, Tensors, Triple, dtype_rule, head_dim_rule
from attention.kernels.math import MATH
from attention.masks.band import Band


class Flash2(Kernel):
    """FlashAttention-2 inside PyTorch, on CUDA. Subclasses run it by other functions, which have its interface and limits."""

    name = "flash2"
    summary = "FlashAttention-2, inside PyTorch"

    def squares(self, x: Tensor, y: Tensor, call: Call) -> bool:
        """It replaces a missing bound of a window by Sk and drops a bound of Sk or more; with more queries than keys either can
        mask wrongly. Chunks of at most Sk queries are safe."""
        mask = call.mask
        if not mask.windowed:
            return False
        lengths = call.sequences(x.shape[1], y.shape[1])
        some = any(n > m for n, m in lengths)
        return some and (mask.right < 0 or max(mask.left, mask.right) >= min(m for _, m in lengths))

    def attend(self, tensors: Tensors, call: Call) -> Pair:
        q, k, v = tensors
        out, lse, *_ = private.aten("_flash_attention_forward")(
            q, k, v, *lengths_of(q, k, call), 0.0, call.mask.causal, False, scale=call.scale, **_window(call.mask)
        )
        return out, lse

    def gradients(self, tensors: Tensors, call: Call) -> Triple:
        dout, q, k, v, out, lse = tensors
        dout, out, lse = dout.contiguous(), out.contiguous(), lse.contiguous()
        seed = torch.zeros(2, dtype=torch.uint64, device=q.device)
        with _deterministic(call.deterministic):
            grads: Triple = private.aten("_flash_attention_backward")(
                *(dout, q, k, v, out, lse, *lengths_of(q, k, call), 0.0, call.mask.causal, seed, seed),
                scale=call.scale,
                **_window(call.mask),
            )
        return grads


FLASH2 = Flash2()


class SdpaFlash(Flash2):
    """On a CPU its causal mask is aligned top-left, so it is used on squares only; a band is given as an explicit mask. Its
    backward has no GQA. With fewer than 16 keys a NaN in q or k may be lost, because PyTorch's maximum over a short row
    skips it."""

    name = "sdpa_flash"
    summary = "PyTorch's own flash attention: FlashAttention-2 on CUDA, its CPU flash attention on a CPU"
    on_cpu = True

    def refuses(self, shape: Shape, mask: Band) -> str | None:
        if shape.device == "cuda":
            return super().refuses(shape, mask)
        return dtype_rule(shape.dtype, (*HALF, torch.float32, torch.float64))

    def squares(self, x: Tensor, y: Tensor, call: Call) -> bool:
        return not x.is_cuda or super().squares(x, y, call)

    def attend(self, tensors: Tensors, call: Call) -> Pair:
        q, k, v = tensors
        if q.is_cuda:
            return super().attend(tensors, call)
        out, lse = private.aten("_scaled_dot_product_flash_attention_for_cpu")(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            0.0,
            call.mask.causal,
            attn_mask=_explicit(call.mask, q, k),
            scale=call.scale,
        )
        return out.transpose(1, 2), lse

    def gradients(self, tensors: Tensors, call: Call) -> Triple:
        dout, q, k, v, out, lse = tensors
        if q.is_cuda:
            return super().gradients(tensors, call)
        keys, values, groups = _repeated(q, k, v)
        dq, dk, dv = private.aten("_scaled_dot_product_flash_attention_for_cpu_backward")(
            dout.transpose(1, 2), q.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2), out.transpose(1, 2),
            lse, 0.0, call.mask.causal, attn_mask=_explicit(call.mask, q, k), scale=call.scale,
        )  # fmt: skip
        return _summed(groups, dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2))


class SdpaCudnn(Kernel):
    """Its causal mask is aligned top-left. It refuses a single query with a single key, which `math` computes instead."""

    name = "sdpa_cudnn"
    summary = "cuDNN's fused attention through PyTorch; packed batches go sequence by sequence"
    features = frozenset({"v_head_dim"})
    windows = False
    only_squares = True

    def missing(self, device: str) -> str | None:
        return super().missing(device) or (None if torch.backends.cudnn.is_available() else "this PyTorch has no cuDNN")

    def refuses(self, shape: Shape, mask: Band) -> str | None:
        d, dv = shape.head_dim, shape.v_head_dim
        if d != dv and max(d, dv) > 128 and not (_hopper() and (d, dv) == (192, 128)):
            return f"head_dim={d} and v_head_dim={dv}: different ones up to 128 only, or 192 and 128 on Hopper"
        return super().refuses(shape, mask) or (head_dim_rule(shape, 128) if shape.backward and not _hopper() else None)

    def attend(self, tensors: Tensors, call: Call) -> Pair:
        q, k, v = tensors
        if q.shape[1] == k.shape[1] == 1:
            return MATH.attend(tensors, call)
        out, lse, *_ = private.aten("_scaled_dot_product_cudnn_attention")(
            *_bhsd(q, k, v), None, True, 0.0, call.mask.causal, False, scale=call.scale
        )
        return out.transpose(1, 2), lse.squeeze(-1)

    def gradients(self, tensors: Tensors, call: Call) -> Triple:
        dout, q, k, v, out, lse = tensors
        if q.shape[1] == k.shape[1] == 1:
            return MATH.gradients(tensors, call)
        # PyTorch finds cuDNN's graphs by the strides of q, k and v: out and dout must follow from those of q
        if not dout.stride() == out.stride() == q.stride():
            dout, q, out = dout.contiguous(), q.contiguous(), out.contiguous()
        lse = lse.contiguous().unsqueeze(-1)
        seed = torch.empty((), dtype=torch.int64, device=q.device)  # not read: there is no dropout
        sizes = None, None, None, q.shape[1], k.shape[1]
        return _bhsd(
            *private.aten("_scaled_dot_product_cudnn_attention_backward")(
                *_bhsd(dout, q, k, v, out), lse, seed, seed, *sizes, 0.0, call.mask.causal, scale=call.scale
            )
        )  # type: ignore[return-value]


class SdpaEfficient(Kernel):
    """xformers' CUTLASS kernels, inside PyTorch. They have no GQA and a causal mask that is aligned top-left, and they pad the
    LSE to a multiple of 32."""

    name = "sdpa_efficient"
    summary = "PyTorch's memory-efficient attention; also fp32; packed batches go sequence by sequence"
    features = frozenset({"v_head_dim"})
    dtypes = (*HALF, torch.float32)
    most_head_dim = 1024
    windows = False
    only_squares = True

    def attend(self, tensors: Tensors, call: Call) -> Pair:
        q, k, v = tensors
        k, v, _ = _repeated(q, k, v)
        sq, sk, causal = q.shape[1], k.shape[1], int(call.mask.causal)
        out, lse, *_ = private.aten("_efficient_attention_forward")(
            q, k, v, None, None, None, sq, sk, 0.0, causal, True, scale=call.scale
        )
        return out, lse[..., :sq]

    def gradients(self, tensors: Tensors, call: Call) -> Triple:
        dout, q, k, v, out, lse = tensors
        k, v, groups = _repeated(q, k, v)
        sq, sk, causal = q.shape[1], k.shape[1], int(call.mask.causal)
        seed = torch.empty((), dtype=torch.int64, device=q.device)  # not read: there is no dropout
        dout, out = dout.contiguous(), out.contiguous()
        lse = torch.nn.functional.pad(lse, (0, -sq % 32), value=torch.inf).contiguous()
        dq, dk, dv, _ = private.aten("_efficient_attention_backward")(
            dout, q, k, v, None, out, None, None, sq, sk, lse, 0.0, seed, seed, causal, False, scale=call.scale
        )
        return _summed(groups, dq, dk, dv)


def _window(mask: Band) -> dict[str, int]:
    return {"window_size_left": mask.left, "window_size_right": mask.right} if mask.windowed else {}


def lengths_of(q: Tensor, k: Tensor, call: Call) -> tuple[Tensor | None, Tensor | None, int, int]:
    """The cumulative lengths of queries and keys, and those of the longest sequences."""
    return call.cu_q, call.cu_k, call.max_q or q.shape[1], call.max_k or k.shape[1]


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


def _repeated(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, int]:
    """Keys and values for a kernel without GQA: a head for each of the queries. And how many share one."""
    groups = q.shape[2] // k.shape[2]
    return (k, v, 1) if groups == 1 else (k.repeat_interleave(groups, 2), v.repeat_interleave(groups, 2), groups)


def _summed(groups: int, dq: Tensor, *grads: Tensor) -> Any:
    """The gradients of what `_repeated` was given, summed in the accumulation dtype."""
    if groups == 1:
        return dq, *grads
    wide = accumulation_dtype(dq.dtype)
    return dq, *(x.unflatten(2, (-1, groups)).sum(3, dtype=wide).to(x.dtype) for x in grads)


def _explicit(mask: Band, q: Tensor, k: Tensor) -> Tensor | None:
    """A window as an additive mask `[Sq, Sk]`; None for other bands."""
    if not mask.windowed:
        return None
    keep = decompose.band_matrix(mask, q.shape[1], k.shape[1], q.device)
    return keep.to(q.dtype).log()  # 0 and -inf


def _hopper() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 9
