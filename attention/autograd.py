"""The differentiable functions: attention by a plan's executor, and the gathering of shards. A second derivative is
refused, since the communication in a backward is not differentiable."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attention.errors import UnsupportedCall
from attention.executors.plan import Plan
from attention.geometry.layouts import Shard
from attention.gpu import private
from attention.gpu.cuda_graphs import GraphReplay
from attention.gpu.uploads import hold_for_caller
from attention.tensors import fit
from attention.transports import Transport

OUT = 3  # the place of the result in what executors save: q, k, v, out, lse


def attend(
    inputs: tuple[Tensor, ...], plan: Plan, graphs: GraphReplay | None, gradient: bool
) -> tuple[Tensor, Tensor | None]:
    """(out, lse) of this rank's shards q, k and v, whose strides and alignment the plan's kernel accepts, and of sinks if the plan has
    them; the lse if the plan wants it. gradient: whether there may be a backward.
    The same function serves all calls of a plan: a checkpointed layer must save as many tensors each time."""
    if gradient:
        out, lse, _ = _Attention.apply(plan, graphs, *inputs)
        return out, lse
    out, lse, *_ = _run(_forward if graphs is None else _results, plan, graphs, inputs)
    # autograd forbids in-place changes to a view that was made under no_grad
    return (out.data if private.is_view.function(out) and not out.is_inference() else out), lse


def _run(
    stage: Callable[..., tuple[Tensor, ...]], plan: Plan, graphs: GraphReplay | None, inputs: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    if graphs is None:
        return stage(plan, *inputs)
    return graphs((plan, stage), plan.transport.begin, partial(stage, plan), inputs)


def _forward(plan: Plan, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> tuple[Tensor, ...]:
    """(out, lse) and the tensors that the backward needs."""
    transport = plan.transport
    transport.begin()
    out, lse, saved = plan.executor.forward(q, k, v, plan, sinks)
    transport.join()
    return out, lse, *saved


def _results(plan: Plan, *inputs: Tensor) -> tuple[Tensor, ...]:
    """(out, lse): a graph copies all that it returns."""
    return _forward(plan, *inputs)[:2]


def _backward(plan: Plan, dout: Tensor, *saved: Tensor) -> tuple[Tensor, ...]:
    transport = plan.transport
    transport.begin()
    grads = plan.executor.backward(dout, saved, plan)
    transport.join()
    return grads


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, plan: Plan, graphs: GraphReplay | None, *inputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        out, lse, *saved = _run(_forward, plan, graphs, inputs)
        # a saved result connects the gradients to autograd's graph; where no result is saved, an empty one does
        node = None if saved[OUT] is out else out.new_empty(0)
        ctx.save_for_backward(*saved, node)
        ctx.call = plan, graphs, plan.transport.calls.number, out.shape
        ctx.set_materialize_grads(False)  # an LSE that no loss uses has no gradient, rather than zeros
        return out, lse if plan.want_lse else None, node

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        plan, graphs, number, shape = ctx.call
        *saved, node = ctx.saved_tensors
        if dout is None:  # other ranks may have a gradient, and communicate with this rank
            dout = saved[0].new_zeros(shape)
        if dout.is_cuda:
            hold_for_caller(plan.transport.captured)
        calls = plan.transport.calls
        calls.backward(number)
        try:
            if dlse is not None:
                raise UnsupportedCall(
                    "lse: the loss depends on it, and it has no gradient; give lse.detach() to treat it as a constant"
                )
            (fitting,) = fit((dout.contiguous(),), plan.kernel.align)
            if not torch.is_grad_enabled():
                return None, None, *_run(_backward, plan, graphs, (fitting, *saved))
            with torch.no_grad():  # enabled to create a graph
                grads = _run(_backward, plan, graphs, (fitting, *saved))
        except Exception as error:
            calls.fail(error)
            raise
        return None, None, *_first_order(grads, dout, saved[OUT] if node is None else node, plan.variant.name)


class Unshard(torch.autograd.Function):
    """The global tensor from all ranks' shards, along the token dimension `dim`."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: Tensor, shards: tuple[Shard, ...], rank: int, dim: int, transport: Transport
    ) -> tuple[Tensor, Tensor]:
        ctx.shard, ctx.dim = shards[rank], dim
        node = x.new_empty(0)
        ctx.save_for_backward(node)
        ctx.set_materialize_grads(False)
        gathered = x.new_empty((len(shards), *x.shape))
        transport.all_gather(gathered, x.contiguous(), "out", 0).wait()
        shape = list(x.shape)
        shape[dim] *= len(shards)
        out = x.new_empty(shape)
        for part, shard in zip(gathered, shards, strict=True):
            at = 0
            for r in shard:
                token_range(out, dim, r).copy_(part.narrow(dim, at, len(r)))
                at += len(r)
        return out, node

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        if grad is None:
            return None, None, None, None, None
        (node,) = ctx.saved_tensors
        with torch.no_grad():
            mine = torch.cat([token_range(grad, ctx.dim, r) for r in ctx.shard], ctx.dim)
        return *_first_order((mine,), grad, node, "unshard"), None, None, None, None


def token_range(x: Tensor, dim: int, r: range) -> Tensor:
    """The tokens `r` of x along `dim`: a view."""
    return x[(*[slice(None)] * dim, slice(r.start, r.stop, r.step))]


class _FirstOrder(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, what: str, dout: Tensor, node: Tensor, *grads: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        ctx.what = what
        return tuple(x.view_as(x) for x in grads)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> tuple[None, ...]:  # type: ignore[override]
        raise UnsupportedCall(
            f"create_graph=True: {ctx.what} has no second derivative; detach the first, or use "
            "torch.nn.functional.scaled_dot_product_attention with torch's math backend on whole sequences"
        )


def _first_order(grads: Sequence[Tensor], dout: Tensor, node: Tensor, what: str) -> Sequence[Tensor]:
    """The gradients of a function, such that their own derivatives, by dout or by the function's inputs, are refused.

    node: a result of the function. It connects to the inputs in autograd's graph."""
    return _FirstOrder.apply(what, dout, node, *grads) if torch.is_grad_enabled() else grads
