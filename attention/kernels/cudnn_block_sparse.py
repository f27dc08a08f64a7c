"""`cudnn_block_sparse`: cuDNN's block-sparse attention, for patterns of whole tiles of 128 queries and keys, on Hopper. Its
backward has no GQA, so KV heads are repeated and their gradients summed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attention.errors import UnsupportedCall
from attention.kernels import cudnn_package
from attention.kernels.aten import half_only, repeat_heads, sum_groups
from attention.kernels.fit import fitted
from attention.kernels.flash4_package import as_taken
from attention.kernels.interface import Call, Into, Pair, Shape, Triple, settle
from attention.kernels.tile_lists import TILE, by_queries, tiles_of
from attention.masks.band import Band
from attention.masks.pattern import Pattern
from attention.runtime.uploads import held, uploaded


@fitted
class CudnnBlockSparse:
    name = "cudnn_block_sparse"
    summary = "cuDNN's block-sparse attention: patterns of whole tiles of 128, on Hopper"
    align = 16

    def missing(self, device: str) -> str | None:
        return cudnn_package.missing("block_sparse_attention", device)

    def refuses(self, shape: Shape, mask: Band) -> str | None:
        return f"mask={mask.describe()}: patterns of whole tiles of {TILE} alone"

    def refuses_pattern(self, shape: Shape, pattern: Pattern, deterministic: bool) -> str | None:
        if deterministic and shape.backward:
            return "deterministic=True: it adds gradients up in any order"
        if partial := len(tiles_of(pattern).partial):
            return f"{partial} tiles of {TILE} queries and keys are seen in part: whole tiles alone"
        if shape.backward and (shape.head_dim != 128 or shape.dtype != torch.bfloat16):
            return f"head_dim={shape.head_dim}, {shape.dtype}: its backward is for head_dim=128 in bf16"
        if shape.head_dim not in (64, 96, 128):
            return f"head_dim={shape.head_dim}: 64, 96 and 128 only"
        return half_only(shape)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: Call, into: Pair | None = None) -> Pair:
        if q.dim() == 3:
            out, lse = self.forward(q[None], k[None], v[None], call)
            return settle((out[0], lse[0]), into)
        pattern = _pattern(call)
        if not len(pattern.rectangles) or q.numel() == 0:
            lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), -torch.inf, device=q.device)
            return settle((torch.zeros_like(q), lse), into)
        found = _functions().block_sparse_attention_forward(
            q, k, v, **_lists(pattern, q), sparse_block_size=TILE, softmax_scale=call.scale, layout="bshd"
        )
        return settle((found["o_tensor"], found["lse_tensor"]), into)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: Call, into: Into = None
    ) -> Triple:
        if q.dim() == 3:
            dq, dk, dv = self.backward(dout[None], q[None], k[None], v[None], out[None], lse[None], call)
            return settle((dq[0], dk[0], dv[0]), into)
        pattern = _pattern(call)
        if not len(pattern.rectangles) or q.numel() == 0:
            return settle((torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)), into)
        groups = q.shape[2] // k.shape[2]
        if groups > 1:
            k, v = repeat_heads(k, groups), repeat_heads(v, groups)
        found = _functions().block_sparse_attention_backward(
            dout,
            q,
            k,
            v,
            out,
            as_taken(lse),
            **_lists(pattern, q),
            sparse_block_size=TILE,
            softmax_scale=call.scale,
            layout="bshd",
        )
        dq, dk, dv = found["dq_tensor"], found["dk_tensor"], found["dv_tensor"]
        return settle((dq, sum_groups(dk, groups), sum_groups(dv, groups)), into)


def _functions() -> Any:
    return cudnn_package.function("cudnn_block_sparse", "block_sparse_attention")


def _pattern(call: Call) -> Pattern:
    pattern = call.pattern
    if pattern is None:
        raise UnsupportedCall(f"kernel=cudnn_block_sparse: mask={call.mask.describe()}: patterns of whole tiles alone")
    return pattern


def _lists(pattern: Pattern, q: Tensor) -> dict[str, Tensor]:
    """The package's lists of a pattern, the same for every head; kept with it."""
    key = ("cudnn_block_sparse", q.device, q.shape[0], q.shape[2])
    if key not in pattern.kept:
        full = by_queries(tiles_of(pattern)).full
        heads = (q.shape[0], q.shape[2])
        pattern.kept[key] = {
            "q2k_block_index": uploaded(full.indices, q.device).expand(*heads, -1, -1).contiguous(),
            "q2k_block_nums": uploaded(full.counts, q.device).expand(*heads, -1).contiguous(),
        }
    found: dict[str, Tensor] = held(pattern.kept[key], q.device)
    return found
