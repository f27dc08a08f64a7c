"""`xformers`: the FlashAttention operators of the package xformers. They take bands and packed batches. With GQA the
forward takes five-dimensional tensors; the backward has no such form and gets repeated KV heads."""

from __future__ import annotations

import importlib
import importlib.util
from contextlib import contextmanager
from functools import lru_cache
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attention.errors import UnsupportedCall
from attention.kernels import decompose
from attention.kernels.aten import (
    bound_lost,
    cuda_missing,
    half_only,
    head_dim_rule,
    mark_rows_without_keys,
    repeat_heads,
    sum_groups,
)
from attention.kernels.fit import fitted
from attention.kernels.interface import Call, Into, Pair, Shape, Triple, settle
from attention.masks.band import Band
from attention.runtime import private
from attention.runtime.uploads import held

if TYPE_CHECKING:
    from collections.abc import Iterator

INSTALL = "pip install xformers==0.0.35"


@fitted
class Xformers:
    name = "xformers"
    any_order = "its backward is not deterministic; take flash2 or flash4"
    summary = "the package xformers, by its FlashAttention operators; non-causal windows of packed batches go sequence by sequence"
    align = 16

    def missing(self, device: str) -> str | None:
        if device != "cuda":
            return cuda_missing(device)
        fmha, reason = package()
        return reason if fmha is None else None

    def refuses(self, shape: Shape, mask: Band) -> str | None:
        return half_only(shape) or head_dim_rule(shape, 256)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: Call, into: Pair | None = None) -> Pair:
        if call.packed:
            kind = pack_bias(call)
            if kind is None:
                return decompose.forward(_Rectangles(), q, k, v, call, into)
            out, lse = _forward(q[None], k[None], v[None], call.scale, _pack(kind, call, q.device))
            out, lse = out[0], lse[0]
        elif bound_lost(q, k, call):
            return decompose.forward(_Rectangles(), q, k, v, call, into)
        else:
            out, lse = _forward(q, k, v, call.scale, _band(call.mask, q.shape[1], k.shape[1]))
        mark_rows_without_keys(lse, q, k, call)
        return settle((out, lse), into)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: Call, into: Into = None
    ) -> Triple:
        if call.deterministic:
            raise UnsupportedCall(f"kernel=xformers: deterministic=True: {self.any_order}")
        if call.packed:
            kind = pack_bias(call)
            if kind is None:
                return decompose.backward(_Rectangles(), dout, q, k, v, out, lse, call, into)
            bias = _pack(kind, call, q.device)
            dq, dk, dv = _backward(dout[None], q[None], k[None], v[None], out[None], lse[None], call.scale, bias)
            return settle((dq[0], dk[0], dv[0]), into)
        if bound_lost(q, k, call):
            return decompose.backward(_Rectangles(), dout, q, k, v, out, lse, call, into)
        bias = _band(call.mask, q.shape[1], k.shape[1])
        return settle(_backward(dout, q, k, v, out, lse, call.scale, bias), into)


class _Rectangles:
    """Rectangles in which every query sees a key."""

    def rectangle(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Pair:
        return _forward(q, k, v, call.scale, _band(call.mask, q.shape[1], k.shape[1]))

    def rectangle_backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: Call
    ) -> Triple:
        return _backward(dout, q, k, v, out, lse, call.scale, _band(call.mask, q.shape[1], k.shape[1]))


@lru_cache
def package() -> tuple[ModuleType | None, str]:
    """`xformers.ops.fmha`, or None and the reason.

    Where flash-attn-4 is installed without flash-attn, xformers finds a package `flash_attn`, imports
    `flash_attn.flash_attn_interface` from it, and fails. So that package is hidden during the import, and xformers
    takes the FlashAttention inside PyTorch."""
    try:
        if importlib.util.find_spec("xformers") is None:
            return None, f"needs the package xformers: {INSTALL}"
        with _without_a_partial_flash_attn():
            fmha = importlib.import_module("xformers.ops.fmha")
        built = importlib.import_module("xformers._cpp_lib")
        why = private.xformers_without_cuda(built)
        if why is not None:
            return None, f"xformers' extension does not load here ({why}); take the xformers made for this PyTorch"
        for operator in (fmha.flash.FwOp, fmha.flash.BwOp):
            if not operator.is_available():
                return None, f"this xformers has no operator {operator.NAME} for this PyTorch; {INSTALL}"
    except Exception as error:  # also RuntimeErrors of its extension, built for another PyTorch
        return None, f"xformers does not import ({type(error).__name__}: {error}); {INSTALL}"
    return fmha, ""


@contextmanager
def _without_a_partial_flash_attn() -> Iterator[None]:
    try:
        partial = (
            importlib.util.find_spec("flash_attn") is not None
            and importlib.util.find_spec("flash_attn.flash_attn_interface") is None
        )
    except (ImportError, ValueError):
        partial = False
    if not partial:
        yield
        return
    with private.replaced_modules({"flash_attn": None}):  # find_spec then finds none
        yield


def band_bias(mask: Band, sq: int, sk: int) -> tuple[str, tuple[int, ...]] | None:
    """The bias class of a dense band and its arguments, or None for a full mask. A missing bound of a window becomes a
    bound that cuts nothing, which the kernel treats as missing."""
    if mask.full:
        return None
    if mask.causal:
        return "LowerTriangularFromBottomRightMask", ()
    return "LocalAttentionFromBottomRightMask", tuple(b if b >= 0 else max(sq, sk) for b in (mask.left, mask.right))


def pack_bias(call: Call) -> tuple[str, int] | None:
    """The bias class of a packed batch and its window, or None where the batch must go sequence by sequence: non-causal
    windows, and causal masks over sequences with more queries than keys."""
    mask = call.mask
    if mask.full:
        return "BlockDiagonalMask", 0
    fits = all(sq <= sk for sq, sk in zip(call.q_lengths or (), call.k_lengths or (), strict=True))
    if mask.right != 0 or not fits:
        return None
    if mask.causal:
        return "BlockDiagonalCausalFromBottomRightMask", 0
    return "BlockDiagonalCausalLocalAttentionFromBottomRightMask", mask.left + 1


def _fmha() -> Any:
    fmha, reason = package()
    if fmha is None:
        raise UnsupportedCall(f"kernel=xformers: {reason}")
    return fmha


def _band(mask: Band, sq: int, sk: int) -> Any:
    found = band_bias(mask, sq, sk)
    return None if found is None else getattr(_fmha().attn_bias, found[0])(*found[1])


def _pack(kind: tuple[str, int], call: Call, device: torch.device) -> Any:
    return held(_pack_of(kind, call.q_lengths or (), call.k_lengths or (), device), device)


@lru_cache(maxsize=256)
def _pack_of(
    kind: tuple[str, int], q_lengths: tuple[int, ...], k_lengths: tuple[int, ...], device: torch.device
) -> Any:
    """Cached, since it copies the lengths to the device."""
    name, window = kind
    biases = _fmha().attn_bias
    plain = biases.BlockDiagonalMask.from_seqlens(list(q_lengths), list(k_lengths), device=device)
    if name == "BlockDiagonalMask":
        return plain
    if window == 0:
        return plain.make_causal_from_bottomright()
    return plain.make_local_attention_from_bottomright(window)


def _forward(q: Tensor, k: Tensor, v: Tensor, scale: float, bias: Any) -> Pair:
    """(out, lse) of q `[B, Sq, H, D]` over k and v `[B, Sk, Hk, D]`; packed batches have B = 1."""
    if q.numel() == 0 or k.numel() == 0:
        lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), -torch.inf, device=q.device)
        return torch.zeros_like(q), lse
    fmha = _fmha()
    groups = q.shape[2] // k.shape[2]
    if groups > 1:
        q5 = q.unflatten(2, (-1, groups))
        k, v = (x.unsqueeze(3).expand(-1, -1, -1, groups, -1) for x in (k, v))
        out, lse = fmha.memory_efficient_attention_forward_requires_grad(
            q5, k, v, bias, scale=scale, op=fmha.flash.FwOp
        )
        return out.flatten(2, 3), lse.flatten(1, 2)
    return fmha.memory_efficient_attention_forward_requires_grad(q, k, v, bias, scale=scale, op=fmha.flash.FwOp)


def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, bias: Any
) -> Triple:
    if q.numel() == 0 or k.numel() == 0:
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    fmha = _fmha()
    groups = q.shape[2] // k.shape[2]
    k_, v_ = repeat_heads(k, groups), repeat_heads(v, groups)
    dq, dk, dv = fmha.memory_efficient_attention_backward(
        dout.contiguous(), out.contiguous(), lse.contiguous(), q, k_, v_, bias, scale=scale, op=fmha.flash.BwOp
    )
    return dq, sum_groups(dk, groups), sum_groups(dv, groups)
