"""Jobs that use a function as a model does: trained, compiled, copied."""

from __future__ import annotations

import copy
import gc
import logging
import pickle
import warnings
from typing import Any

import torch
import torch.distributed as dist

import attention
from runner.launch.rank import Rank
from tests.support.cases import Case, compute, wrong


def _shards(me: Rank, fn: Any, tokens: int = 8, head_dim: int = 16) -> list[torch.Tensor]:
    """q, k and v of so many tokens a rank."""
    torch.manual_seed(0)
    return [fn.shard(torch.randn(1, tokens * me.world, 4, head_dim)).requires_grad_() for _ in range(3)]


def _apart(xs: Any, ys: Any) -> float:
    return max(float((x - y).detach().abs().max()) for x, y in zip(xs, ys, strict=True))


class _NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> None:  # type: ignore[override]
        return None


def without_a_gradient(me: Rank, name: str) -> float:
    """Only rank 0's out has no gradient. The largest difference of any rank's gradients from those with zeros in its
    place."""
    fn = attention.make(name)
    shards = _shards(me, fn)
    expected = torch.autograd.grad((float(me.rank > 0) * fn(*shards, causal=True)).sum(), shards)
    out = fn(*shards, causal=True)
    gradients = torch.autograd.grad((out if me.rank else _NoGradient.apply(out)).sum(), shards)
    assert float(expected[1].abs().max()) > 0  # a rank's keys have a gradient from the others' queries
    return max(me.gather(_apart(gradients, expected)))


def compiled(me: Rank, name: str, forms: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A model around the function, eager and compiled, for each form: the largest difference of out and gradients over shapes that
    repeat and change, the graphs that were compiled, and the warnings. A form has arguments of the call, `masked` a name of a mask,
    `documents` their number, `checkpoint`, and `inside`: the model itself shards and unshards, which breaks its graph."""
    from torch._dynamo.testing import CompileCounterWithBackend
    from torch.utils.checkpoint import checkpoint

    fn = attention.make(name)
    return [_compiled(me, fn, CompileCounterWithBackend, checkpoint, **form) for form in forms]


def _compiled(
    me: Rank, fn: Any, counter: Any, checkpoint: Any, backend: str = "aot_eager", chunk: int = 0, documents: int = 0,
    recompute: bool = False, inside: bool = False, with_sinks: bool = False, padding: int = 0, **options: Any,
) -> dict[str, Any]:  # fmt: skip
    torch.manual_seed(0)
    decode, messages, error = fn.variant.decode, [], 0.0  # type: ignore[var-annotated]
    options |= {"causal": not decode, "padding": padding} | ({"mask": attention.masks.chunked(chunk)} if chunk else {})
    sinks = torch.randn(4).requires_grad_() if with_sinks else None

    def model(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **lengths: Any) -> torch.Tensor:
        def call(*qkv: torch.Tensor) -> torch.Tensor:
            return fn(*qkv, **options, **lengths, **({"sinks": sinks} if with_sinks else {}))

        qkv = q * 2, k.tanh(), v
        if inside:
            qkv = fn.shard(qkv[0], role="q"), fn.shard(qkv[1], role="kv"), fn.shard(v, role="kv")
        out = checkpoint(call, *qkv, use_reentrant=False) if recompute else call(*qkv)
        if inside or decode:
            return (fn.unshard(out) if inside else out).relu() + 1
        again = out.relu() + 1  # which may take the memory of what is not kept for the backward
        return call(again, again, again).sigmoid()

    torch.compiler.reset()
    gc.collect()  # an earlier job's models
    before = len(attention.compiled.kept)
    compiler = counter(backend)
    again = torch.compile(model, fullgraph=not (inside or decode), backend=compiler)
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        logging.getLogger("torch").addHandler(handler)
        for tokens in (8, 8, 16, 24) if backend == "aot_eager" else (8, 8):
            whole = [torch.randn(1, tokens * me.world, 4, 16) for _ in range(3)]
            xs = [x if inside else fn.shard(x, role=role) for x, role in zip(whole, ("q", "kv", "kv"), strict=True)]
            lengths = {}
            if documents:
                xs = [x[0] for x in xs]
                lengths = {"cu_seqlens": torch.arange(0, tokens * me.world + 1, tokens * me.world // documents)}
            xs = [x.detach().requires_grad_(not decode) for x in xs]
            wanted = [*xs, sinks] if with_sinks else xs
            runs = []
            for run in (model, again):
                out = run(*xs, **lengths)
                grads = () if decode else torch.autograd.grad(out.sum(), wanted)
                with torch.no_grad():
                    runs.append((out, run(*xs, **lengths), *grads))
            error = max(error, _apart(*runs))
    logging.getLogger("torch").removeHandler(handler)
    messages += [str(warning.message) for warning in warned]
    return {
        "error": error,
        "graphs": compiler.frame_count,
        "kept": len(attention.compiled.kept) - before,
        "warnings": messages,
    }


def trained_after_inference(me: Rank, name: str, transport: str) -> list[str | None]:
    """By rank, what is wrong with a training step of a group whose first call, and an `unshard`, were under inference mode."""
    group = dist.new_group(list(range(me.world)))
    case = Case(name, me.world, 32 * me.world, 4, 4, 64, 0, transport=transport)
    fn, x = attention.make(name, group=group, transport=transport), torch.arange(32.0 * me.world)[None]
    with torch.inference_mode():
        part = fn.shard(x)
        qkv = part[:, :, None, None].expand(-1, -1, 4, 64)
        fn(qkv, qkv, qkv, causal=True)
        assert torch.equal(fn.unshard(part), x)
    return me.gather(wrong(case, compute(case, group)))


def second_derivatives(me: Rank, names: list[str]) -> list[list[Any]]:
    """For each variant, whether the gradients are the same with create_graph=True, and how second derivatives are
    refused, for each input and for `unshard`."""
    found = []
    for name in names:
        fn = attention.make(name, kernel="math")
        qkv = _shards(me, fn)
        first = torch.autograd.grad(fn(*qkv, causal=True).square().sum(), qkv)
        again = torch.autograd.grad(fn(*qkv, causal=True).square().sum(), qkv, create_graph=True)
        refusals = [_refusal(sum(x.square().sum() for x in again), x) for x in qkv]  # type: ignore[arg-type]
        if fn.layout.replicated:
            refusals.append("create_graph=True: unshard has no second derivative")
        else:
            (grad,) = torch.autograd.grad(fn.unshard(qkv[0]).sum() ** 3, qkv[0], create_graph=True)
            refusals.append(_refusal(grad.sum(), qkv[0]))
        found.append([name, all(map(torch.equal, first, again)), refusals])
    return found


def _refusal(loss: torch.Tensor, x: torch.Tensor) -> str:
    try:
        torch.autograd.grad(loss, x, retain_graph=True, allow_unused=True)
    except attention.UnsupportedCall as error:
        return str(error).split(";")[0]
    return "not refused"


def copied(me: Rank) -> tuple[bool, bool, str]:
    """Whether copies of a module keep their function's group, and whether pickles over the default group give the same out; the
    refusal to pickle a function over a given group."""
    layer, group = torch.nn.Module(), dist.new_group(list(range(me.world)))
    layer.fn = fn = attention.make("ring", group=group, transport="gloo")  # type: ignore[assignment]
    x = torch.randn(1, 8, 4, 16)
    out, same_group = fn(x, x, x), copy.deepcopy(layer).fn.group is group
    layer.fn = attention.make("ring", transport="gloo")  # type: ignore[assignment]
    same = torch.equal(pickle.loads(pickle.dumps(layer)).fn(x, x, x), layer.fn(x, x, x))
    try:
        pickle.dumps(fn)
    except pickle.PicklingError as error:
        return same_group, same and torch.equal(copy.deepcopy(fn)(x, x, x), out), str(error)
    return same_group, same, ""
