"""The in-place merge of a partial attention as one Triton kernel: a program takes `ROWS` tokens of one head."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 32


@triton.jit
def _merge(  # type: ignore[no-untyped-def]
    out,
    lse,
    part,
    part_lse,
    n_tokens,
    head_dim,
    out_b,
    out_t,
    out_h,
    part_b,
    part_t,
    part_h,
    lse_b,
    lse_h,
    lse_t,
    part_lse_b,
    part_lse_h,
    part_lse_t,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    h = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    live = t < n_tokens
    mask = live[:, None] & (d < head_dim)[None, :]
    t = t.to(tl.int64)
    lse_at = lse + b * lse_b + h * lse_h + t * lse_t
    old = tl.load(lse_at, mask=live, other=float("-inf"))
    new = tl.load(part_lse + b * part_lse_b + h * part_lse_h + t * part_lse_t, mask=live, other=float("-inf"))
    top = tl.maximum(old, new)
    safe = tl.where(top == float("-inf"), 0.0, top)
    w_old = tl.exp(old - safe)
    w_new = tl.exp(new - safe)
    total = w_old + w_new
    norm = tl.where(total == 0.0, 1.0, total)
    out_at = out + b * out_b + t[:, None] * out_t + h * out_h + d[None, :]
    part_at = part + b * part_b + t[:, None] * part_t + h * part_h + d[None, :]
    x = tl.load(out_at, mask=mask, other=0.0)
    y = tl.load(part_at, mask=mask, other=0.0).to(x.dtype)
    tl.store(out_at, x * (w_old / norm)[:, None] + y * (w_new / norm)[:, None], mask=mask)
    tl.store(lse_at, tl.where(total == 0.0, float("-inf"), safe + tl.log(norm)), mask=live)


def merge_cuda_(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """As `attention.merge.merge_`, on CUDA (or on a CPU under Triton's interpreter); out and lse are fp32 (fp64 for fp64)."""
    if out.dim() == 3:
        out, part, lse, part_lse = (x.unsqueeze(0) for x in (out, part, lse, part_lse))
    if out.stride(-1) != 1 or part.stride(-1) != 1:
        raise ValueError(f"strides {out.stride()}, {part.stride()}: the merge needs the head dim contiguous")
    batch, n_tokens, heads, head_dim = out.shape
    grid = (triton.cdiv(n_tokens, ROWS), heads, batch)
    if out.numel():
        with torch.cuda.device(out.device) if out.is_cuda else _nothing():
            _merge[grid](
                out,
                lse,
                part,
                part_lse,
                n_tokens,
                head_dim,
                *out.stride()[:3],
                *part.stride()[:3],
                *lse.stride(),
                *part_lse.stride(),
                ROWS=ROWS,
                BLOCK_D=triton.next_power_of_2(head_dim),
            )


class _nothing:
    def __enter__(self) -> None: ...

    def __exit__(self, *exc: object) -> None: ...
