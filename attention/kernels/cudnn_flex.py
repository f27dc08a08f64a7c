"""`cudnn_flex`: cuDNN's flex attention, for exact masks of few intervals of keys a query, on Hopper. Bands and packed
batches are treated alike, as patterns."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attention.gpu.private import CUDNN_FLEX
from attention.gpu.uploads import held
from attention.kernels.flash4_package import as_taken
from attention.kernels.interface import HALF, Call, Kernel, Pair, Shape, Tensors, Triple, dtype_rule, head_dim_rule
from attention.kernels.packages import imported, kv_heads_rule, wrong_gpu
from attention.kernels.tile_lists import most_at_once, row_intervals
from attention.masks.band import Band
from attention.masks.pattern import Pattern

MOST_INTERVALS = 16


class CudnnFlex(Kernel):
    name = "cudnn_flex"
    summary = "cuDNN's flex attention: exact masks of few intervals a query, on Hopper"
    one_batch = True
    features = frozenset({"v_head_dim"})

    def missing(self, device: str) -> str | None:
        return super().missing(device) or wrong_gpu((9, 0), (9, 0), "checked on Hopper (sm90) alone") or package()[1]

    def refuses(self, shape: Shape, mask: Band) -> str | None:
        d, dv = shape.head_dim, shape.v_head_dim
        if d != dv and (reason := kv_heads_rule(shape)):
            return reason
        return dtype_rule(shape.dtype, HALF) or (None if (d, dv) == (192, 128) else head_dim_rule(shape, 128))

    def refuses_pattern(self, shape: Shape, pattern: Pattern, deterministic: bool) -> str | None:
        needed = most_at_once(pattern.rectangles)
        return f"a query sees {needed} intervals of keys: at most {MOST_INTERVALS}" if needed > MOST_INTERVALS else None

    def attend(self, tensors: Tensors, call: Call) -> Pair:
        q, k, v = tensors
        result = package()[0].forward(
            q, k, v, mask_plan=_plan(q, k, v, call), softmax_scale=call.scale, return_lse=True
        )
        return result["o_tensor"], result["lse_tensor"]

    def gradients(self, tensors: Tensors, call: Call) -> Triple:
        dout, q, k, v, out, lse = tensors
        grads = package()[0].backward(
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
        return grads["dq_tensor"], grads["dk_tensor"], grads["dv_tensor"]


def package() -> tuple[Any, str | None]:
    """The functions of `cudnn.flex_attention.execution`, or None and the reason."""
    return imported("cudnn.flex_attention.execution", CUDNN_FLEX, "pip install 'nvidia-cudnn-frontend[cutedsl]>=1.32'")


def _plan(q: Tensor, k: Tensor, v: Tensor, call: Call) -> Any:
    """The package's plan of a pattern; kept with it."""
    pattern = call.as_pattern(q.shape[1], k.shape[1])

    def make() -> Any:
        from cudnn.flex_attention import create_mask_plan

        intervals = row_intervals(pattern.rectangles, pattern.n_q, q.device)[: pattern.n_q]
        ends = torch.zeros(intervals.shape[1] + 1, q.shape[0], pattern.n_q, dtype=torch.int32, device=q.device)
        ends[1:] = intervals.T.unsqueeze(1)  # the first interval of the package starts at key 0: it stays empty
        return create_mask_plan(ends.flatten(1)[None], q.detach(), k.detach(), v.detach(), build_backward=True)

    return held(pattern.keep(("cudnn_flex", q.device, q.dtype, q.shape, k.shape, v.shape), make), q.device)
