"""`flash4`: FlashAttention-4 (`flash_attn.cute`, the package flash-attn-4), for Hopper and newer. It takes GQA, packed
batches and bands directly, and writes into given tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attention.gpu.uploads import held
from attention.kernels import flash4_sparse
from attention.kernels.flash4_package import as_taken, package, softcap_mods, writable
from attention.kernels.interface import (
    HALF,
    Call,
    Into,
    Kernel,
    Pair,
    Shape,
    Tensors,
    Triple,
    dtype_rule,
    head_dim_rule,
    settle,
)
from attention.kernels.packages import kv_heads_rule, wrong_gpu
from attention.masks.band import Band
from attention.masks.pattern import Pattern
from attention.tensors import dense_like, empty_lse, result_like

RIGHT_BACKWARDS = (64, 128, 256)  # head dims whose backward was checked on sm90; at 80 dq is wrong (4.0.0b36)
RIGHT_PAIRS = ((128, 64), (192, 128))  # different head dims of keys and of values that were checked on sm90


class Flash4(Kernel):
    name = "flash4"
    summary = "FlashAttention-4 (flash_attn.cute), for Hopper and newer"
    features = frozenset({"softcap", "v_head_dim"})
    writes = True

    def missing(self, device: str) -> str | None:
        return super().missing(device) or wrong_gpu((9, 0), (99, 0), "needs sm90 (Hopper) or newer") or package()[1]

    def refuses(self, shape: Shape, mask: Band) -> str | None:
        # sm10x and sm11x: the package supports head dims up to 128 there, and also 256
        blackwell = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] in (10, 11)
        d, dv = shape.head_dim, shape.v_head_dim
        if reason := dtype_rule(shape.dtype, HALF):
            return reason
        if shape.softcap and blackwell:
            return "softcap: checked on Hopper (sm90) alone"
        if d != dv and (blackwell or (d, dv) not in RIGHT_PAIRS):
            pairs = ", ".join(f"{d} and {dv}" for d, dv in RIGHT_PAIRS)
            return f"head_dim={d} and v_head_dim={dv}: checked with {pairs} on Hopper (sm90) alone"
        if d != dv:
            return kv_heads_rule(shape) if shape.backward else None
        if shape.backward and not blackwell and d not in RIGHT_BACKWARDS:
            right = ", ".join(map(str, RIGHT_BACKWARDS))
            return f"head_dim={d}: the backward was checked for {right} only; for some others its dq is wrong"
        return None if blackwell and d == 256 else head_dim_rule(shape, 128 if blackwell else 256)

    def refuses_pattern(self, shape: Shape, pattern: Pattern, deterministic: bool) -> str | None:
        return flash4_sparse.why_not(shape, pattern, deterministic)

    def attend(self, tensors: Tensors, call: Call, into: Pair | None = None) -> Pair:
        q, k, v = tensors
        out, lse = into or (dense_like(result_like(q, v)), empty_lse(q))
        arguments, copies = _arguments(call, q.device, False)
        result = package()[0].forward(
            q if copies is None else copies.added(q),
            k,
            v,
            softmax_scale=call.scale,
            **arguments,
            out=out if copies is None and writable(out) and out.dtype == q.dtype else None,
            lse=lse if copies is None and writable(lse, align=4) else None,
            return_lse=True,
        )
        merged = result[:2] if copies is None else copies.merged(result[0], result[1], q.shape[1])
        return settle(merged, (out, lse))

    def gradients(self, tensors: Tensors, call: Call, into: Into = None) -> Triple:
        dout, q, k, v, out, lse = tensors
        dq, dk, dv = into or (dense_like(q), dense_like(k), dense_like(v))
        arguments, copies = _arguments(call, q.device, True)
        grads = package()[0].backward(
            q,
            k if copies is None else copies.added(k),
            v if copies is None else copies.added(v),
            out,
            dout,
            as_taken(lse),
            softmax_scale=call.scale,
            **arguments,
            dq=dq if writable(dq) else None,
            dk=dk if copies is None and writable(dk) else None,
            dv=dv if copies is None and writable(dv) else None,
        )[:3]
        if copies is not None:
            grads = grads[0], *(copies.summed(x, k.shape[1]) for x in grads[1:])
        return settle(grads, (dq, dk, dv))


def _arguments(call: Call, device: torch.device, backward: bool) -> tuple[dict[str, Any], flash4_sparse.Copies | None]:
    """A call's arguments of the forward or the backward, and the copies of tiles that a pattern's lists need."""
    if (pattern := call.pattern) is not None:
        made = pattern.keep(("flash4", device, backward), lambda: flash4_sparse.arguments(pattern, device, backward))
        return held(made, device)
    arguments: dict[str, Any] = {**pack_lengths(call), **window(call.mask)}
    if backward:
        arguments["deterministic"] = call.deterministic
    if call.softcap is not None:
        arguments["score_mod"], gradient = softcap_mods(call.softcap)
        if backward:
            arguments["score_mod_bwd"] = gradient
    return arguments, None


def window(mask: Band) -> dict[str, int | bool | None]:
    """A band as the kernel's arguments. The kernel aligns it to the bottom right, too; for the kernel, None is
    unbounded."""
    if mask.causal:
        return {"causal": True, "window_size_left": None, "window_size_right": None}
    left, right = (None if bound < 0 else bound for bound in (mask.left, mask.right))
    return {"causal": False, "window_size_left": left, "window_size_right": right}


def pack_lengths(call: Call) -> dict[str, Tensor | int]:
    """The cumulative lengths of a packed batch, int32 `[n + 1]`, and the lengths of its longest sequences, by the names
    that FlashAttention-3 and -4 give them."""
    if call.cu_q is None or call.cu_k is None:
        return {}
    return {
        "cu_seqlens_q": call.cu_q,
        "cu_seqlens_k": call.cu_k,
        "max_seqlen_q": call.max_q,
        "max_seqlen_k": call.max_k,
    }
