"""`make`: a variant as a differentiable function over a process group."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache, wraps
from itertools import pairwise
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import forward_ad

from attention import automatic, kernels, transports
from attention.choice import AUTO, SUMMARY, Choice, check_graphs
from attention.executors import EXECUTORS, grouping
from attention.executors.plan import Plan, plan_steps, resized
from attention.graphs import Replays
from attention.kernels import Shape, UnsupportedCall
from attention.layouts import CuSeqlens, Shard, sizes_of
from attention.masks import Mask
from attention.peers import calls
from attention.schedules import masks
from attention.tape import Run
from attention.tensors import on_host, token_dim
from attention.transports import Transport
from attention.variants import Variant, check_heads, everything, nearest, variant

__all__ = ["ContextParallel", "make", "names"]

MOST_PLANS = 256
MOST_PACKS = 64  # plans of packs, which hold a lot, and their tapes the numbers of tokens that copies are by

Packs = Tensor | list[int] | tuple[int, ...] | None


def names() -> dict[str, str]:
    """Every variant, with a line of what it is."""
    return {AUTO: SUMMARY} | {name: v.summary for name, v in everything().items()}


def make(
    name: str,
    group: dist.ProcessGroup | None = None,
    kernel: str = "auto",
    transport: str = "auto",
    deterministic: bool = False,
    graphs: bool | str = False,
    **options: Any,
) -> ContextParallel:
    """The variant `name` as a function over `group` (default: the default group; without one, a world of one).

    graphs: forward and backward of a call whose shapes (of a pack the lengths) came before are replayed from CUDA graphs, so
    that the host launches each at once: for few tokens a GPU, where it takes longer than the GPU. Costs memory for copies of
    inputs and results. "auto", of attention "auto" only: where that should be faster.
    options: the variant's own, see `python -m runner.catalog attention`; of "auto", which gives the variant that should be
    fastest, the problem's shapes (`automatic.decide`), and the function's `choice` then says why.
    Raises ValueError for an unknown name, kernel, transport or option."""
    choice: Choice | None = None
    check_graphs(name, graphs)
    if name == AUTO:
        _check_names(kernel, transport)
        choice = automatic.decide(
            group, kernel, transport, {**options, "graphs": graphs, "deterministic": deterministic}
        )
        best = choice.best
        name, transport, options = best.candidate.variant, best.transport, dict(best.candidate.options)
        graphs = graphs if best.graphs else False
    chosen = variant(name)
    for option in options:
        if option.startswith("dropout"):
            raise ValueError(f"{option}={options[option]!r}: dropout is not supported by any variant; leave it out")
        if option not in chosen.options:
            known = ", ".join(chosen.options) or "none"
            raise ValueError(f"{option}={options[option]!r}: {name} has no such option; its options: {known}")
    _check_names(kernel, transport)
    fn = ContextParallel(chosen, group, kernel, transport, deterministic, {**chosen.options, **options}, graphs)
    fn.choice = choice
    return fn


def _check_names(kernel: str, transport: str) -> None:
    if kernel not in kernels.names():
        raise ValueError(f"kernel={kernel!r} is not a kernel; {nearest(kernel, kernels.names())}")
    if transport not in transports.names():
        raise ValueError(f"transport={transport!r} is not a transport; {nearest(transport, transports.names())}")


Method = TypeVar("Method", bound=Callable[..., Any])


def _outside_graphs(call: Method) -> Method:
    """The exchange between ranks runs outside a compiled graph. As `torch.compiler.disable`, which would import the compiler
    right here: that takes seconds, and after `init_process_group` holds on to the process group for good."""
    disabled = torch._disable_dynamo(call)

    @wraps(call)
    def inner(*args: Any, **options: Any) -> Any:
        return disabled(*args, **options) if "torch._dynamo" in sys.modules else call(*args, **options)

    return cast(Method, inner)


class ContextParallel:
    """A context-parallel attention function; `make` builds it.

    Dense tensors are `[B, S, H, D]`, packed ones `[T, H, D]` with the global `cu_seqlens`; k and v have Hk heads,
    `H % Hk == 0`."""

    def __init__(
        self,
        variant: Variant,
        group: dist.ProcessGroup | None,
        kernel: str,
        transport: str,
        deterministic: bool,
        options: dict[str, Any],
        graphs: bool | str = False,
    ):
        self.variant = variant
        self.group = group
        self.kernel_name = kernel
        self.transport_name = transport
        self.deterministic = deterministic
        self.options = options
        self.choice: Choice | None = None  # of auto: what was estimated
        self.world = dist.get_world_size(group) if dist.is_initialized() else 1
        self.rank = dist.get_rank(group) if dist.is_initialized() else 0
        self.layout = variant.border(self.world, options)
        self.transports: dict[torch.device, Transport] = {}
        self.plans: dict[Any, Plan] = {}
        self.packs: OrderedDict[Any, None] = OrderedDict()  # of which there are plans, those used last at the end
        self.known: set[Hashable] = set()  # forms of passes that there are tapes of
        self.replays = Replays(asked=graphs is True) if graphs else None

    def __repr__(self) -> str:
        return f"{self.variant.name}(rank {self.rank} of {self.world}, kernel={self.kernel_name})"

    @_outside_graphs
    def shard(self, x: Tensor, cu_seqlens: Packs = None, role: str | None = None) -> Tensor:
        """This rank's part of a global `[B, S, H, D]` or packed `[T, H, D]`, in the variant's layout; differentiable. A copy
        that keeps nothing of the rest alive, or x itself where the part is all of it.

        role: "q" or "kv", needed for a decode, where every rank has all queries.
        Raises ValueError when the sequences do not divide."""
        if self.variant.decode:
            if role not in ("q", "kv"):
                raise ValueError(
                    f'role={role!r}: {self.variant.name} shards keys and values only; give role="q" or "kv"'
                )
            if role == "q":
                return x
        mine = self._shards(_host(cu_seqlens, x))[self.rank]
        dim = token_dim(x)
        parts = [_stretch(x, dim, r) for r in mine]
        if len(parts) > 1:
            return torch.cat(parts, dim)
        whole = parts[0].shape == x.shape
        return x.contiguous() if whole else parts[0].clone(memory_format=torch.contiguous_format)

    @_outside_graphs
    def unshard(self, x: Tensor, cu_seqlens: Packs = None) -> Tensor:
        """The global tensor from every rank's part, on every rank; for out and the gradients of q, k and v (a decode's
        out is whole already). Differentiable: the gradient of a rank's part is its part of the gradient, so each rank
        should compute the same loss."""
        if self.layout.replicated or self.variant.decode or self.world == 1:
            return x
        total = x.shape[token_dim(x)] * self.world
        return _Unshard.apply(x, self, self._shards(_host(cu_seqlens, x, total)))

    def _shards(self, cu_seqlens: CuSeqlens) -> tuple[Shard, ...]:
        return self.layout.shards(cu_seqlens, self.world)

    @_outside_graphs
    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        causal: bool = False,
        scale: float | None = None,
        window: tuple[int, int] = (-1, -1),
        cu_seqlens: Packs = None,
        kv_tokens: int | None = None,
        dropout: float = 0.0,
        return_lse: bool = False,
    ) -> Any:
        """Attention of this rank's queries over the global keys.

        q: `[B, s, H, D]` or packed `[t, H, D]`, this rank's shard; k, v: with Hk heads. `cu_seqlens`: the global ones,
        for packed tensors; a list or a CPU tensor never synchronises, a GPU tensor does when it is new or was written
        (`tensors.on_host`). `scale` defaults to D^-0.5. `window` (left, right) in tokens, -1 unbounded. `kv_tokens`: of a
        decode, how many keys there are on all ranks; by default this rank's times the world size.
        Returns out like q; with `return_lse` also the fp32 log-sum-exp `[B, H, s]` or `[H, t]`, not differentiable.
        Raises ValueError for shapes, masks or lengths that the variant can't do, and UnsupportedCall (a ValueError)
        when the kernel can't."""
        if dropout:
            raise ValueError(f"dropout={dropout}: not supported; use dropout=0")
        plan = self.plan(
            q, k, v, causal=causal, scale=scale, window=window, cu_seqlens=cu_seqlens, kv_tokens=kv_tokens,
            return_lse=return_lse,
        )  # fmt: skip
        if self.variant.exchange == "peer":
            return calls.attend(q, k, v, plan, self.group)
        if _trained(q, k, v) or _transformed():
            out, lse = _Attention.apply(q, k, v, plan, self.replays)
        else:
            with torch.no_grad():
                out, lse, *_ = _forward(q, k, v, plan, self.replays, False)
        return (out, lse) if return_lse else out

    def plan(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        causal: bool = False,
        scale: float | None = None,
        window: tuple[int, int] = (-1, -1),
        cu_seqlens: Packs = None,
        kv_tokens: int | None = None,
        return_lse: bool = False,
    ) -> Plan:
        """What a call with these arguments will do: the schedule bound to this rank, its kernel and its transport."""
        _check_shapes(q, k, v, cu_seqlens, self.variant.decode)
        held = k.shape[token_dim(k)]
        total = kv_tokens if kv_tokens is not None else held * (1 if self.layout.replicated else self.world)
        cu = _host(cu_seqlens, k, total)
        shape = Shape.of(q, k, _trained(q, k, v))
        q_tokens = q.shape[token_dim(q)]
        window = (window[0], window[1])
        # a decode's plan is one for all lengths at which the same ranks hold keys, and follows them as they grow
        sizes = sizes_of(self.layout, cu, self.world) if self.variant.decode else ()
        lengths = tuple(n > 0 for n in sizes) if self.variant.decode else cu
        key = (shape, lengths, causal, scale, window, cu_seqlens is not None, q.device, return_lse, q_tokens)
        if key not in self.plans:
            mask = Mask.of(causal, window)
            problem = self.variant.problem(cu, self.world, mask, self.options, q_tokens)
            self._check_share(held, cu)
            self.variant.check_options(self.options, shape.heads, shape.kv_heads, self.world)
            if self.variant.decode and shape.backward:
                raise ValueError(f"requires_grad=True: {self.variant.name} has no backward; call it under no_grad")
            grouping.check(self.options, q.device, shape.head_dim)
            if self.options.get("reduce") == "fused" and self.world > 1 and q.device.type != "cuda":
                raise UnsupportedCall("reduce=fused: needs CUDA GPUs with symmetric memory; reduce=packed works here")
            if self.variant.exchange == "peer":
                calls.check(self.variant.name, shape, q.shape[0], self.transport_name, return_lse)
                kernel = calls.kernel(self.variant.name, self.kernel_name, shape, masks(problem))
            else:
                kernel = kernels.select(self.kernel_name, shape, masks(problem), self.variant.decode)
            scale = shape.head_dim**-0.5 if scale is None else scale
            transport = self._transport(q.device)
            if self.replays is not None:
                _check_graphs(self.variant, self.options, transport, q.device, self.world)
            writable = self.world > 1 and q.device.type == "cuda" and transport.pulls and q.dtype != torch.float64
            packed = cu_seqlens is not None
            place, head = divmod(self.rank, problem.ulysses)
            while len(self.plans) >= MOST_PLANS:
                self.plans.pop(next(iter(self.plans)))
            self.plans[key] = Plan(
                self.variant,
                problem,
                place,
                head,
                shape.heads,
                shape.kv_heads,
                scale,
                packed,
                self.deterministic,
                return_lse,
                kernel,
                transport,
                self.variant.settled(self.options, writable),
                plan_steps(problem, place, scale, packed, self.deterministic, q.device),
                self.known,
            )
        if self.variant.decode:
            self._check_share(held, cu)
            if self.plans[key].problem.cu_seqlens != cu:
                self.plans[key] = resized(self.plans[key], cu, sizes)
        if cu_seqlens is not None:
            self._latest(key)
        return self.plans[key]

    def _latest(self, key: Any) -> None:
        self.packs[key] = None
        self.packs.move_to_end(key)
        if len(self.packs) > MOST_PACKS:
            self.plans.pop(self.packs.popitem(last=False)[0], None)

    def _check_share(self, held: int, cu_seqlens: CuSeqlens) -> None:
        share = sizes_of(self.layout, cu_seqlens, self.world)[self.rank]
        if held != share:
            raise ValueError(f"k has {held} tokens: rank {self.rank} of {self.world} holds {share} of {cu_seqlens[-1]}")

    def _transport(self, device: torch.device) -> Transport:
        if device not in self.transports:
            name = transports.resolve(self.transport_name, device)
            if self.variant.exchange == "peer":  # brings its own exchange; ours only gathers what unshard wants
                name = "nccl" if device.type == "cuda" else "gloo"
            # a function made for one rank of a larger world, as a baseline is, moves nothing
            made = transports.select(name, device, self.group) if self.world > 1 else None
            self.transports[device] = made or transports.Nothing()
        return self.transports[device]


def _check_graphs(
    variant: Variant, options: dict[str, Any], transport: Transport, device: torch.device, world: int
) -> None:
    """Raises UnsupportedCall for what is not captured."""
    reason = None
    if device.type != "cuda":
        reason = f"a {device.type} has no CUDA graphs"
    elif variant.exchange == "peer":
        reason = f"{variant.name} brings its own exchange"
    elif variant.decode:
        reason = "a decode's keys grow from call to call; capture the call yourself, between two lengths"
    elif options.get("grouping") == "packed":
        reason = "grouping=packed sends lengths to the GPU in each pass; take separate or fused"
    elif world > 1 and not transport.pulls:
        reason = f"transport={transport.name} may hang in a graph; symm is needed"
        reason += f" ({transport.note})" if transport.note else ""
    if reason is not None:
        raise UnsupportedCall(f"graphs=True: {reason}")


def _trained(q: Tensor, k: Tensor, v: Tensor) -> bool:
    return torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)


def _transformed() -> bool:
    """Within forward-mode differentiation or a function transform, which autograd refuses for a call of ours."""
    return forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active()


def _check_shapes(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Packs, decode: bool) -> None:
    if decode and cu_seqlens is not None:
        raise ValueError("cu_seqlens: a decode takes a batch of single sequences, [B, Sq, H, D] and [B, N, Hk, D]")
    expected = 3 if cu_seqlens is not None else 4
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != expected:
            form = "[T, H, D] with cu_seqlens" if expected == 3 else "[B, S, H, D] without cu_seqlens"
            raise ValueError(f"{name} has shape {list(x.shape)}: it must be {form}")
    if k.shape != v.shape:
        raise ValueError(f"k {list(k.shape)} and v {list(v.shape)}: must have the same shape")
    same = (
        (q.shape[0], q.shape[-1]) == (k.shape[0], k.shape[-1])
        if decode
        else ((*q.shape[:-2], q.shape[-1]) == (*k.shape[:-2], k.shape[-1]))
    )
    if not same:
        raise ValueError(f"q {list(q.shape)} and k {list(k.shape)}: may differ in the number of heads only")
    if not q.dtype == k.dtype == v.dtype or not q.device == k.device == v.device:
        raise ValueError(
            f"q, k, v are {q.dtype} on {q.device}, {k.dtype} on {k.device}, {v.dtype} on {v.device}: "
            "one dtype and one device are needed"
        )
    if not q.dtype.is_floating_point:  # neither whole numbers nor complex ones
        raise ValueError(
            f"q, k, v are {q.dtype}: attention needs a floating-point dtype; give q.to(torch.bfloat16), ..."
        )
    check_heads(q.shape[-2], k.shape[-2])


def _host(cu_seqlens: Packs, x: Tensor, total: int | None = None) -> CuSeqlens:
    total = x.shape[token_dim(x)] if total is None else total
    if cu_seqlens is None:
        return (0, total)
    cu = on_host(cu_seqlens) if isinstance(cu_seqlens, Tensor) else tuple(cu_seqlens)
    return _checked(cu if cu and type(cu[0]) is int else tuple(map(int, cu)), total)


@lru_cache(maxsize=MOST_PLANS)
def _checked(cu_seqlens: CuSeqlens, total: int) -> CuSeqlens:
    """A model's layers all come with the same."""
    cu = tuple(map(int, cu_seqlens))
    if len(cu) < 2 or cu[0] != 0 or any(b < a for a, b in pairwise(cu)) or cu[-1] != total:
        shown = cu if len(cu) < 9 else (*cu[:4], "...", *cu[-3:])
        raise ValueError(f"cu_seqlens={shown}: must rise from 0 to the global number of tokens, {total}")
    return cu


class _Unshard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, fn: ContextParallel, shards: tuple[Shard, ...]) -> Tensor:
        ctx.shard, ctx.dim = shards[fn.rank], token_dim(x)
        transport = fn._transport(x.device)
        gathered = x.new_empty((fn.world, *x.shape))
        transport.all_gather(gathered, x.contiguous(), "out", 0).wait()
        shape = list(x.shape)
        shape[ctx.dim] *= fn.world
        out = x.new_empty(shape)
        for rank, shard in enumerate(shards):
            at = 0
            for r in shard:
                _stretch(out, ctx.dim, r).copy_(gathered[rank].narrow(ctx.dim, at, len(r)))
                at += len(r)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return torch.cat([_stretch(grad, ctx.dim, r) for r in ctx.shard], ctx.dim), None, None


def _stretch(x: Tensor, dim: int, r: range) -> Tensor:
    index: list[Any] = [slice(None)] * x.dim()
    index[dim] = slice(r.start, r.stop, r.step)
    return x[tuple(index)]


def _passed(
    name: Hashable, run: Run, inputs: Sequence[Tensor], plan: Plan, replays: Replays | None
) -> tuple[Tensor, ...]:
    if replays is not None:
        plan.transport.begin()  # of a replay, which does not do it itself
        return replays((plan, name), run, inputs)
    return plan.launches(name, plan.state, run, inputs)


def _forward(q: Tensor, k: Tensor, v: Tensor, plan: Plan, replays: Replays | None, keep: bool) -> tuple[Tensor, ...]:
    """(out, lse) and, to keep for a backward, what that needs."""

    def run(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        plan.transport.begin()
        out, lse, saved = EXECUTORS[plan.variant.exchange].forward(q, k, v, plan)
        plan.transport.join()
        return (out, lse, *saved) if keep else (out, lse)

    return _passed(keep, run, (q, k, v), plan, replays)


def _backward(dout: Tensor, saved: Sequence[Tensor], plan: Plan, replays: Replays | None) -> tuple[Tensor, ...]:
    def run(dout: Tensor, *saved: Tensor) -> tuple[Tensor, ...]:
        plan.transport.begin()
        grads = EXECUTORS[plan.variant.exchange].backward(dout, saved, plan)
        plan.transport.join()
        return grads

    if torch.is_grad_enabled():  # of which a gradient may be wanted
        return run(dout, *saved)
    return _passed("backward", run, (dout, *saved), plan, replays)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, plan: Plan, replays: Replays | None
    ) -> tuple[Tensor, Tensor]:
        out, lse, *saved = _forward(q, k, v, plan, replays, True)
        ctx.save_for_backward(*saved)
        ctx.plan, ctx.replays = plan, replays
        ctx.mark_non_differentiable(lse)
        ctx.set_materialize_grads(False)  # zeros for the LSE's would be made each time
        ctx.like = out.shape, out.dtype, out.device
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        if dout is None:  # peers may have one, and exchange with this rank
            shape, dtype, device = ctx.like
            dout = torch.zeros(shape, dtype=dtype, device=device)
        replays = ctx.replays
        if replays is not None and replays.asked and torch.is_grad_enabled():
            raise UnsupportedCall(
                "graphs=True: create_graph=True: a replay has no gradient of its own; use graphs=False"
            )
        return *_backward(dout.contiguous(), ctx.saved_tensors, ctx.plan, replays), None, None
