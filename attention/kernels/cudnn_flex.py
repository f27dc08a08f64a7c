"""`cudnn_flex`: cuDNN's flex attention, for exact masks of few intervals of keys a query, on Hopper. Bands and packed
batches are treated alike, as patterns."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attention.errors import UnsupportedCall
from attention.gpu.private import CUDNN_FLEX
from attention.gpu.uploads import held
from attention.kernels import cudnn_package
from attention.kernels.flash4_package import as_taken
from attention.kernels.interface import HALF, Call, Into, Kernel, Pair, Shape, Triple, dtype_rule, head_dim_rule
from attention.kernels.tile_lists import most_at_once, row_intervals, tiles_of
from attention.masks.band import Band
from attention.masks.pattern import Pattern

MOST_INTERVALS = 16


class CudnnFlex(Kernel):
    name = "cudnn_flex"
    summary = "cuDNN's flex attention: exact masks of few intervals a query, on Hopper"
    one_batch = True
    features = frozenset({"v_head_dim"})

    def missing(self, device: str) -> str | None:
        return cudnn_package.missing("flex_attention.execution", device)

    def refuses(self, shape: Shape, mask: Band) -> str | None:
        d, dv = shape.head_dim, shape.v_head_dim
        if d != dv and shape.heads != shape.kv_heads:
            return (
                f"v_head_dim={dv}: its backward needs as many KV heads as heads, not {shape.kv_heads} of {shape.heads}"
            )
        return dtype_rule(shape.dtype, HALF) or (None if (d, dv) == (192, 128) else head_dim_rule(shape, 128))

    def refuses_pattern(self, shape: Shape, pattern: Pattern, deterministic: bool) -> str | None:
        needed = most_at_once(tiles_of(pattern).rows)
        return f"a query sees {needed} intervals of keys: at most {MOST_INTERVALS}" if needed > MOST_INTERVALS else None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call, into: Pair | None) -> Pair:
        found = _functions().forward(q, k, v, mask_plan=_plan(q, k, v, call), softmax_scale=call.scale, return_lse=True)
        return found["o_tensor"], found["lse_tensor"]

    def gradients(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: Call, into: Into
    ) -> Triple:
        found = _functions().backward(
            q,
            k,
            v,
            out,
            dout,
            as_taken(lse),
            mask_plan=_plan(q, k, v, call),
            softmax_scale=call.scale,
            deterministic=call.deterministic,
        )
        return found["dq_tensor"], found["dk_tensor"], found["dv_tensor"]


def _functions() -> Any:
    module = cudnn_package.function("cudnn_flex", "flex_attention.execution")
    wrong = CUDNN_FLEX.wrong(module)
    if wrong:
        raise UnsupportedCall(wrong)
    return CUDNN_FLEX.of(module)


def _plan(q: Tensor, k: Tensor, v: Tensor, call: Call) -> Any:
    """The package's plan of a pattern; kept with it."""
    pattern = call.as_pattern(q.shape[1], k.shape[1])
    key = ("cudnn_flex", q.device, q.dtype, q.shape, k.shape, v.shape)
    if key not in pattern.kept:
        rows = tiles_of(pattern).rows
        intervals = row_intervals(rows, pattern.n_q, q.device)[: pattern.n_q]
        ends = torch.zeros(intervals.shape[1] + 1, q.shape[0], pattern.n_q, dtype=torch.int32, device=q.device)
        ends[1:] = intervals.T.unsqueeze(1)  # the first interval of the package starts at key 0: it stays empty
        create = cudnn_package.function("cudnn_flex", "flex_attention").create_mask_plan
        pattern.kept[key] = create(ends.flatten(1)[None], q.detach(), k.detach(), v.detach(), build_backward=True)
    return held(pattern.kept[key], q.device)
