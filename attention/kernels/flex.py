"""`flex`: PyTorch's flex attention, compiled for each shape (some seconds, once per process).

Bands, packed batches and patterns are treated alike: a query sees some intervals of keys. They are a tensor, so another mask
over the same shape needs no new compilation. The tiles of keys that a tile of queries needs, wholly or in part, follow from
the mask. No tensor of queries times keys is ever held.

PyTorch's backward belongs to its own forward; it cannot start from a given out and lse. So the backward runs the
forward over its keys again and scales the gradients that it passes in. Let `o`, `l`, `p` be this part's out, lse and
probabilities, and `O`, `L` the final out and lse. The final probabilities are `w p` with `w = exp(l - L)` per row, and

    dv = (w p)^T dO,  ds = w p (dO v - sum(dO O)) = p (do v - sum(do o) + dl)

for `do = w dO` and `dl = w (sum(dO o) - sum(dO O))`. These are the exact gradients of these keys, for one more forward.

Source: Dong et al., "FlexAttention" (2024)."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from attention.errors import UnsupportedCall
from attention.gpu import private
from attention.gpu.uploads import held, uploaded
from attention.kernels.interface import Call, Kernel, Pair, Shape, Tensors, Triple
from attention.kernels.tile_lists import TILE, listed, row_intervals, tiles_of
from attention.masks.pattern import Pattern


class Flex(Kernel):
    name = "flex"
    summary = "PyTorch's flex attention, compiled for each shape; its backward runs the forward again"
    one_batch = True
    head_bytes = 32
    features = frozenset({"softcap", "v_head_dim"})

    def missing(self, device: str) -> str | None:
        return None if device == "cuda" else "needs a CUDA GPU: PyTorch has no backward of it on a CPU"

    def refuses_pattern(self, shape: Shape, pattern: Pattern, deterministic: bool) -> str | None:
        return None

    def attend(self, tensors: Tensors, call: Call) -> Pair:
        q, k, v = tensors
        with torch.no_grad():
            out, lse = _attend(q, k, v, call)
        if call.pattern:
            out = out.masked_fill((lse == -torch.inf).unsqueeze(-1), 0)
        return out.transpose(1, 2), lse

    def gradients(self, tensors: Tensors, call: Call) -> Triple:
        dout, q, k, v, out, lse = tensors
        q, k, v = inputs = [x.detach().requires_grad_() for x in (q, k, v)]
        with torch.enable_grad():
            part, part_lse = _attend(q, k, v, call)
        final = out.transpose(1, 2), lse
        fed = share(dout.transpose(1, 2), final, (part.detach(), part_lse.detach()))
        dq, dk, dv = torch.autograd.grad((part, part_lse), inputs, fed)
        return dq, dk, dv


def share(dout: Tensor, final: Pair, part: Pair) -> Pair:
    """The gradients of a part's out and lse with which its own backward gives its share of the final gradients.

    dout and both outs `[B, H, S, D]`, both lses `[B, H, S]`."""
    (out, lse), (own, own_lse) = final, part
    w = (own_lse - lse.masked_fill(lse == -torch.inf, 0)).exp()  # 0 for a row that sees none of these keys
    own = own.to(w.dtype).masked_fill((own_lse == -torch.inf).unsqueeze(-1), 0)  # such rows may hold anything
    wide_dout = dout.to(w.dtype)
    dlse = w * (wide_dout * (own - out.to(w.dtype))).sum(-1)
    return (w.unsqueeze(-1) * wide_dout).to(dout.dtype), dlse


def block_mask(pattern: Pattern, device: torch.device) -> Any:
    """The BlockMask of a pattern. Its lists are padded to all tiles: with shorter ones PyTorch 2.11 gives wrong results."""
    tiles = tiles_of(pattern)
    rows = tiles.cut if device.type == "cuda" else pattern.rectangles  # uncompiled, it ignores the lists
    intervals = row_intervals(rows, pattern.n_q, device)

    def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        seen = (j >= intervals[i, 0]) & (j < intervals[i, 1])
        for slot in range(2, intervals.shape[1], 2):
            seen = seen | (j >= intervals[i, slot]) & (j < intervals[i, slot + 1])
        return seen

    def padded(counts: Any, indices: Any) -> tuple[Tensor, Tensor]:
        width = tiles.shape[1]
        every = np.pad(indices, ((0, 0), (0, width)))[None, None, :, :width]
        return uploaded(counts[None, None], device), uploaded(every.copy(), device)

    lists = listed(tiles)
    return BlockMask.from_kv_blocks(
        *padded(*lists.partial),
        *padded(*lists.full),
        BLOCK_SIZE=TILE,
        mask_mod=visible,
        seq_lengths=(pattern.n_q, pattern.n_k),
    )


def _attend(q: Tensor, k: Tensor, v: Tensor, call: Call) -> Pair:
    """(out `[B, H, Sq, Dv]`, lse `[B, H, Sq]`), differentiable; packed batches have B = 1.

    Raises UnsupportedCall where PyTorch's compiler has no kernel for these lengths."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    intervals, mask = 0, None  # of a query: what the compiled code depends on
    if call.pattern or call.packed or not call.mask.full:
        pattern = call.as_pattern(q.shape[2], k.shape[2])
        intervals = max(1, tiles_of(pattern).intervals)
        mask = held(pattern.keep(("flex", q.device), lambda: block_mask(pattern, q.device)), q.device)
    arguments = q, k, v, mask, call.scale, call.softcap
    if not q.is_cuda:
        return _call(*arguments)
    shapes = (x for tensor in (q, k, v) for x in (tensor.shape, tensor.stride()))
    key = q.dtype, *shapes, intervals, call.scale, call.softcap, q.requires_grad, q.device
    try:
        return _compiled(key)(*arguments)
    except private.inductor_errors() as error:  # it finds no kernel for some lengths
        raise UnsupportedCall(
            f"kernel=flex: {q.shape[2]} queries, {k.shape[2]} keys: {str(error).splitlines()[0]}"
        ) from None


def _call(q: Tensor, k: Tensor, v: Tensor, mask: Any, scale: float, softcap: float | None) -> Pair:
    out, aux = flex_attention(  # type: ignore[misc]
        q,
        k,
        v,
        score_mod=None if softcap is None else _capped(softcap),
        block_mask=mask,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
        return_aux=AuxRequest(lse=True),
    )
    return out, aux.lse  # type: ignore[union-attr,return-value]


def _capped(softcap: float) -> Callable[..., Tensor]:
    def capped(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return capped


@cache
def _compiled(key: tuple[Any, ...]) -> Callable[..., Pair]:
    """The compiled call of one shape. PyTorch limits the compilations per code object: past the limit it would run
    uncompiled and hold all scores at once."""
    own = private.with_own_code(_call, f"flex_{_compiled.cache_info().currsize}")
    return torch.compile(own, dynamic=False, fullgraph=True)
