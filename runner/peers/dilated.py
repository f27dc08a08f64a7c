"""dilated-attention-pytorch 0.2.0 (Odom, 2023): its DilatedAttention over our local kernels, without one of its lines.

The line divides the out of a group of heads by its own sum over all tokens. With it no result is attention: all outs of a
channel sum to 1 / n, and under a causal mask the out of a token depends on later tokens. Without it the code computes what
`dilated` does with head groups, in two sweeps over the outs less than as published."""

from __future__ import annotations

from functools import cache, lru_cache
from importlib.util import find_spec, module_from_spec
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from attention.errors import UnsupportedCall
from attention.executors.plan import Plan
from attention.kernels import Call, Kernel
from attention.masks.band import Band
from attention.variants.dilated import Mixture
from runner.peers.flash_functions import stand_ins

VERSION = "0.2.0"
DIVISION = "x = x / x.sum(dim=(1, 2), keepdim=True)"


class Served(NamedTuple):
    """What the package passes through to its attention function as the operator to use."""

    kernel: Kernel
    deterministic: bool = False


class _Attention(torch.autograd.Function):
    """One kernel call: q, k, v and out `[B, S, H, D]`."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, kernel: Kernel, call: Call) -> Tensor:  # type: ignore[override]
        out, lse = kernel.forward(q, k, v, call)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.kernel, ctx.call = kernel, call
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return *ctx.kernel.backward(dout, *ctx.saved_tensors, ctx.call), None, None


class LowerTriangularMask:
    """xformers' causal mask."""


def memory_efficient_attention(
    query: Tensor, key: Tensor, value: Tensor, op: Served, attn_bias: LowerTriangularMask | None
) -> Tensor:
    """xformers' function as the package calls it, on `[B, S, H, D]`."""
    call = Call(query.shape[-1] ** -0.5, Band.of(attn_bias is not None), deterministic=op.deterministic)
    return _Attention.apply(query, key, value, op.kernel, call)


XFORMERS: dict[str, dict[str, Any]] = {
    "xformers": {"__path__": []},
    "xformers.ops": {
        "AttentionOp": Served,
        "LowerTriangularMask": LowerTriangularMask,
        "memory_efficient_attention": memory_efficient_attention,
    },
}


@cache
def package() -> ModuleType:
    """The package's module without `DIVISION`, kept out of `sys.modules`: others who import the package get all of it.
    Raises UnsupportedCall where the line is not there, as in another version."""
    spec = find_spec("dilated_attention_pytorch.dilated_attention")
    assert spec is not None and spec.loader is not None
    source = spec.loader.get_source(spec.name)  # type: ignore[attr-defined]
    if source.count(DIVISION) != 1:
        raise UnsupportedCall(
            f"dilated-attention-pytorch: external_dilated leaves out the line {DIVISION!r} of {VERSION}, which this version "
            f"lacks; pip install --no-deps dilated-attention-pytorch=={VERSION}"
        )
    module = module_from_spec(spec)
    with stand_ins(XFORMERS):
        exec(compile(source.replace(DIVISION, "pass"), spec.origin or spec.name, "exec"), module.__dict__)
    return module


@lru_cache(maxsize=64)
def module(segments: tuple[int, ...], rates: tuple[int, ...], served: Served) -> nn.Module:
    """The package's module: (q, k, v, is_causal) -> out, all `[B, S, H, D]`."""
    return package().DilatedAttention(segments, rates, op=served)


def attend(q: Tensor, k: Tensor, v: Tensor, plan: Plan, group: dist.ProcessGroup | None) -> Tensor:
    """out, like q `[B, S, H, D]`, of the whole sequence on every rank."""
    mixture = plan.problem.schedule
    assert isinstance(mixture, Mixture)
    segments, rates = zip(*mixture.pairs, strict=True)
    served = Served(plan.kernel, plan.deterministic)
    return module(segments, rates, served)(q, k, v, is_causal=plan.problem.band.causal)
