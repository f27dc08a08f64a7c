"""A call within `torch.compile`: an operator of the compiler's graph, which runs the eager call. So ranks communicate within a
graph without a break, and a compiled call does what an eager one does.

What the eager forward keeps for its backward stays with a small tensor on the CPU, the operator's third result: the compiler saves it
like any other result, and what is kept ends with it. Where it is gone, as in a checkpoint that saves nothing, the backward runs the
forward again."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from itertools import count
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor

from attention.call import whole_lengths
from attention.gpu import private
from attention.masks.mask import Mask
from attention.tensors import dense_like

if TYPE_CHECKING:
    from attention.api import ContextParallel

ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor? lengths, str fn, str mask, bool causal, float? scale, "
    "SymInt left, SymInt right, SymInt padding, float? softcap, bool gradient"
)
# by handles, which stand for them in a graph
functions: WeakValueDictionary[str, ContextParallel] = WeakValueDictionary()
masks: dict[str, Mask | Callable[[tuple[int, ...] | None], Mask]] = {}  # or of a batch's lengths
kept: WeakValueDictionary[int, Kept] = WeakValueDictionary()  # by the number that the operator's third result holds
numbers = count()
OPTIONS = {"sinks", "cu_seqlens", "mask", "window", "padding", "causal", "scale", "softcap", "return_lse"}


class Kept(np.ndarray):
    """A number in memory that a tensor shares, with the inputs and the result of the eager call that has it."""

    inputs: list[Tensor]
    out: Tensor


def handle_of(fn: ContextParallel) -> str:
    """Stands for the function as long as it lives."""
    handle = f"{fn.variant.name} {next(numbers)}"
    functions[handle] = fn
    return handle


@private.constant_in_graphs
def _handle_of_mask(address: int) -> str:
    """The handle of a mask by its `id`: the compiler of PyTorch 2.11 gives a constant function no dataclass."""
    mask = ctypes.cast(address, ctypes.py_object).value
    if not isinstance(mask, Mask):  # an object of the compiler
        raise ValueError("mask: made within the compiled function; make it before")
    masks[handle := f"{mask!r} {next(numbers)}"] = mask
    return handle


def takes(fn: ContextParallel, options: dict[str, Any]) -> bool:
    """Whether a call with these options is one operator. A decode breaks the graph, and so does an LSE that may get a gradient,
    which is refused."""
    with_lse = options.get("return_lse", False) and torch.is_grad_enabled()
    return not fn.variant.decode and not with_lse and OPTIONS.issuperset(options)


def call(
    fn: ContextParallel, q: Tensor, k: Tensor, v: Tensor, *, sinks: Tensor | None = None, cu_seqlens: Any = None,
    mask: Mask | str | None = None, window: tuple[int, int] = (-1, -1), padding: int = 0, causal: bool = False,
    scale: float | None = None, softcap: float | None = None, return_lse: bool = False,
) -> Any:  # fmt: skip
    """A call of `fn`, as the compiler traces it: arguments and results are those of `ContextParallel.__call__`. mask: also a handle
    in `masks`."""
    gradient = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, v, sinks))
    handle = mask or ""
    if isinstance(handle, Mask):
        handle = _handle_of_mask(id(handle))  # by which the compiler checks at each call that it is still this object
    lengths = cu_seqlens if cu_seqlens is None or isinstance(cu_seqlens, Tensor) else torch.tensor(cu_seqlens)
    if gradient:  # PyTorch 2.11 gives a tensor that comes twice a wrong gradient, 2.13 refuses it
        k, v = k.view_as(k) if k is q else k, v.view_as(v) if v is q or v is k else v
    arguments = q, k, v, sinks, lengths, fn.handle, handle, causal, scale, *window, padding, softcap, gradient
    out, lse, *_ = _Call.apply(*arguments) if gradient else torch.ops.attention.call(*arguments)
    return (out, lse) if return_lse else out


class _Call(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Any, lengths: Any, *arguments: Any
    ) -> tuple[Tensor, ...]:  # type: ignore[override]
        out, lse, state = torch.ops.attention.call(q, k, v, sinks, lengths, *arguments)
        ctx.save_for_backward(out, lse, state, q, k, v, sinks, lengths)
        ctx.arguments = arguments
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor, _: Any) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        # out and lse are inputs, too: the compiler could give the memory of what is not saved to other results
        grads = torch.ops.attention.call_backward(dout, *ctx.saved_tensors, *ctx.arguments)
        sinks = None if ctx.saved_tensors[-2] is None else grads[3]
        return *grads[:3], sinks, None, *(None for _ in ctx.arguments)


def _run(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, lengths: Tensor | None, fn: str, mask: str, causal: bool,
    scale: float | None, left: int, right: int, padding: int, softcap: float | None, gradient: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    made = masks.get(mask)
    if not isinstance(made, Mask | None):
        made = made(None if lengths is None else whole_lengths(lengths))
    with private.eager_autograd(), torch.set_grad_enabled(gradient):
        inputs = [x.detach().requires_grad_(gradient) for x in (q, k, v, sinks) if x is not None]
        out, lse = functions[fn](
            *inputs[:3], sinks=None if sinks is None else inputs[3], cu_seqlens=lengths, mask=made, causal=causal, scale=scale,
            window=(left, right), padding=padding, softcap=softcap, return_lse=True,
        )  # fmt: skip
    state = np.array([next(numbers)]).view(Kept)
    if gradient:
        state.inputs, state.out = inputs, out
        kept[int(state[0])] = state
    return out.detach().contiguous(), lse.detach().contiguous(), torch.from_numpy(state)


def _run_backward(dout: Tensor, out: Tensor, lse: Tensor, state: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    made = kept.get(int(state))
    if made is None:
        _, _, state = _run(*arguments)
        made = kept[int(state)]
    with private.eager_autograd():
        grads = torch.autograd.grad(made.out, made.inputs, dout, retain_graph=True)
    return *(x.contiguous() for x in grads), *([] if len(grads) == 4 else [dout.new_empty(0)])


def _shapes(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    tokens, heads = q.shape[-3:-1]
    return out, q.new_empty((*q.shape[:-3], heads, tokens), dtype=lse_dtype), torch.empty(1, dtype=torch.int64)


def _shapes_backward(
    dout: Tensor,
    out: Tensor,
    lse: Tensor,
    state: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    *_: Any,
) -> tuple[Tensor, ...]:
    return *(dense_like(x) for x in (q, k, v)), (dout.new_empty(0) if sinks is None else torch.empty_like(sinks))


def _register(name: str, arguments: str, results: str, run: Any, shapes: Any) -> None:
    torch.library.define(f"attention::{name}", f"({arguments}) -> ({results})")
    torch.library.impl(f"attention::{name}", "CompositeExplicitAutograd", run)
    torch.library.register_fake(f"attention::{name}", shapes)


_register("call", ARGUMENTS, "Tensor, Tensor, Tensor", _run, _shapes)
_register(
    "call_backward",
    f"Tensor dout, Tensor out, Tensor lse, Tensor state, {ARGUMENTS}",
    "Tensor, Tensor, Tensor, Tensor",
    _run_backward,
    _shapes_backward,
)
