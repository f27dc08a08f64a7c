"""`make`: a variant as a differentiable function over a process group."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Hashable
from functools import wraps
from pickle import PicklingError
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from attention import kernels, transports
from attention.arguments import (
    Packs,
    check_cu_seqlens,
    check_scale,
    check_tensors,
    check_window,
    positive,
    rank_and_world,
    signed,
    token_dim_of,
)
from attention.autograd import Unshard, attend, stretch, wants_gradient
from attention.autotune import machine as automatic
from attention.autotune.model import AUTO, SUMMARY, Choice, check_graphs
from attention.errors import nearest
from attention.executors import nested_prefixes
from attention.executors.plan import Plan, plan_steps, resized
from attention.external import calls
from attention.geometry.layouts import CuSeqlens, Shard, sizes_of
from attention.geometry.options import Options
from attention.geometry.schedules import masks
from attention.kernels import Shape, UnsupportedCall
from attention.kernels.fit import fit
from attention.masks.band import Mask
from attention.runtime.cuda_graphs import Replays
from attention.tensors import token_dim
from attention.transports import Transport
from attention.variants.base import Variant
from attention.variants.external import External
from attention.variants.registry import everything, variant

__all__ = ["ContextParallel", "make", "names"]

MOST_PLANS = 256
MOST_PACKS = 64  # plans of packs, which hold a lot, and their tapes the numbers of tokens that copies are by


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
    rank_and_world(group)
    check_graphs(name, graphs)
    if name == AUTO:
        _check_names(kernel, transport)
        choice = automatic.decide(
            group, kernel, transport, {**options, "graphs": graphs, "deterministic": deterministic}
        )
        best = choice.best
        name, transport, options = best.candidate.variant, best.transport, best.candidate.options.plain()
        graphs = graphs if best.graphs else False
    chosen = variant(name)
    for option in options:
        if option.startswith("dropout"):
            raise ValueError(f"{option}={options[option]!r}: dropout is not supported by any variant; leave it out")
    _check_names(kernel, transport)
    fn = ContextParallel(chosen, group, kernel, transport, deterministic, chosen.parse(options), graphs)
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
    """A context-parallel attention function; `make` builds it. It can be copied and, over the default group, pickled, so that a
    module that holds it can.

    Dense tensors are `[B, S, H, D]`, packed ones `[T, H, D]` with the global `cu_seqlens`; k and v have Hk heads,
    `H % Hk == 0`."""

    def __init__(
        self,
        variant: Variant[Any],
        group: dist.ProcessGroup | None,
        kernel: str,
        transport: str,
        deterministic: bool,
        options: Options,
        graphs: bool | str = False,
    ):
        self.variant = variant
        self.group = group
        self.kernel_name = kernel
        self.transport_name = transport
        self.deterministic = deterministic
        self.options = options
        self.choice: Choice | None = None  # of auto: what was estimated
        self.graphs = graphs
        self.rank, self.world = rank_and_world(group)
        self.alone = not dist.is_initialized()  # there was no world when it was made
        self.layout = variant.border(self.world, options)
        self._begin()

    def _begin(self) -> None:
        """Nothing planned, connected or captured yet."""
        self.transports: dict[torch.device, Transport] = {}
        self.plans: dict[Any, Plan] = {}
        self.packs: OrderedDict[Any, None] = OrderedDict()  # of which there are plans, those used last at the end
        self.known: set[Hashable] = set()  # forms of passes that there are tapes of
        self.replays = Replays(asked=self.graphs is True) if self.graphs else None

    def __copy__(self) -> ContextParallel:
        """The same function over the same group, which plans and connects anew; so is a deep copy."""
        other = object.__new__(type(self))
        other.__dict__ = dict(self.__dict__)
        other._begin()
        return other

    def __deepcopy__(self, memo: dict[int, Any]) -> ContextParallel:
        return self.__copy__()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled is what `make` was given: unpickled, it is a function over the default group there. Raises PicklingError for a
        function over a group that was given."""
        if self.group is not None:
            raise PicklingError(
                f"{self!r}: its process group can't be pickled; make it with group=None, over the default group, or again "
                "where it is unpickled"
            )
        name, options = self.variant.name, self.options
        return _again, (
            name,
            self.kernel_name,
            self.transport_name,
            self.deterministic,
            options,
            self.graphs,
            self.choice,
        )

    def __repr__(self) -> str:
        return f"{self.variant.name}(rank {self.rank} of {self.world}, kernel={self.kernel_name})"

    @_outside_graphs
    def shard(self, x: Tensor, cu_seqlens: Packs = None, role: str | None = None) -> Tensor:
        """This rank's part of a global `[B, S, H, D]`, `[B, S]` (token ids, labels, positions), or with cu_seqlens of a packed
        `[T, H, D]` or `[T]`, of any dtype, in the variant's layout; differentiable. A copy that keeps nothing of the rest alive,
        or x itself where the part is all of it. Hidden states `[B, S, C]` are to be given as `[B, S, 1, C]`.

        role: "q" or "kv", needed for a decode, where every rank has all queries.
        Raises ValueError for other shapes, and when the sequences do not divide."""
        dim = token_dim_of(x, cu_seqlens is not None)
        if self.variant.decode:
            if role not in ("q", "kv"):
                raise ValueError(
                    f'role={role!r}: {self.variant.name} shards keys and values only; give role="q" or "kv"'
                )
            if role == "q":
                return x
        mine = self._shards(check_cu_seqlens(cu_seqlens, x.shape[dim]))[self.rank]
        parts = [stretch(x, dim, r) for r in mine]
        if len(parts) > 1:
            return torch.cat(parts, dim)
        whole = parts[0].shape == x.shape
        return x.contiguous() if whole else parts[0].clone(memory_format=torch.contiguous_format)

    @_outside_graphs
    def unshard(self, x: Tensor, cu_seqlens: Packs = None) -> Tensor:
        """The global tensor from every rank's part, on every rank; for out, the gradients of q, k and v, and whatever else `shard`
        takes (a decode's out is whole already). Differentiable once: the gradient of a rank's part is its part of the gradient, so
        each rank should compute the same loss. Raises ValueError for shapes that `shard` does not take."""
        dim = token_dim_of(x, cu_seqlens is not None)
        if self.layout.replicated or self.variant.decode or self.world == 1:
            return x
        shards = self._shards(check_cu_seqlens(cu_seqlens, x.shape[dim] * self.world))
        whole, _ = Unshard.apply(x, shards, self.rank, dim, self._transport(x.device))
        return whole

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

        q: `[B, s, H, D]` or packed `[t, H, D]`, this rank's shard; k, v: with Hk heads; bf16, fp16, fp32 or fp64, which is
        computed in under autocast, too. A tensor is copied if its last dim is strided, its rows overlap (as those of `expand`) or,
        with most kernels, they do not lie on multiples of 16 bytes. `cu_seqlens`: the global ones, integers, for packed tensors;
        a list or a CPU tensor never synchronises, a GPU tensor does when it is new or was written (`tensors.on_host`). `scale`:
        any finite number, by default D^-0.5. `window` (left, right) in tokens, -1 unbounded. `kv_tokens`: of a decode, how many
        keys there are on all ranks; by default this rank's times the world size.
        All ranks must give the same causal, scale, window, cu_seqlens, kv_tokens and return_lse: with another on one rank the
        call may fail, wait for ever or be wrong.
        Returns out like q; with `return_lse` also the fp32 log-sum-exp `[B, H, s]` or `[H, t]` (fp64 for fp64), not
        differentiable. Out is differentiable once (a second derivative raises UnsupportedCall), and its backward needs it:
        write `out = out + x`, not `out += x`.
        Raises ValueError for shapes, masks or lengths that the variant can't do, and UnsupportedCall (a ValueError)
        when the kernel can't."""
        if dropout:
            raise ValueError(f"dropout={dropout}: not supported; use dropout=0")
        plan = self.plan(
            q, k, v, causal=causal, scale=scale, window=window, cu_seqlens=cu_seqlens, kv_tokens=kv_tokens,
            return_lse=return_lse,
        )  # fmt: skip
        q, k, v = fit((signed(q, scale), k, v), plan.kernel.align)
        if isinstance(self.variant, External):
            return calls.attend(q, k, v, plan, self.group)
        out, lse = attend(q, k, v, plan, self.replays)
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
        check_tensors(q, k, v, cu_seqlens is not None, self.variant.decode)
        scale, window = check_scale(scale), check_window(window)
        held = k.shape[token_dim(k)]
        total = kv_tokens if kv_tokens is not None else held * (1 if self.layout.replicated else self.world)
        cu = check_cu_seqlens(cu_seqlens, total)
        shape = Shape.of(q, k, wants_gradient(q, k, v))
        scale = positive(scale, shape.head_dim)
        q_tokens = q.shape[token_dim(q)]
        # a decode's plan is one for all lengths at which the same ranks hold keys, and follows them as they grow
        sizes = sizes_of(self.layout, cu, self.world) if self.variant.decode else ()
        lengths = tuple(n > 0 for n in sizes) if self.variant.decode else cu
        key = (shape, lengths, causal, scale, window, cu_seqlens is not None, q.device, return_lse, q_tokens)
        if key not in self.plans:
            mask = Mask.of(causal, window)
            problem = self.variant.problem(cu, self.world, mask, self.options, q_tokens)
            self._check_share(held, cu)
            self.options.check(shape.heads, shape.kv_heads, self.world)
            if self.variant.decode and shape.backward:
                raise ValueError(f"requires_grad=True: {self.variant.name} has no backward; call it under no_grad")
            nested_prefixes.check(self.options, q.device, shape.head_dim)
            if getattr(self.options, "reduce", None) == "fused" and self.world > 1 and q.device.type != "cuda":
                raise UnsupportedCall("reduce=fused: needs CUDA GPUs with symmetric memory; reduce=packed works here")
            if isinstance(self.variant, External):
                calls.check(self.variant, shape, q.shape[0], self.transport_name, return_lse)
                kernel = calls.kernel(self.variant, self.kernel_name, shape, masks(problem))
            else:
                kernel = kernels.select(self.kernel_name, shape, masks(problem), self.variant.decode)
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
                self.options.resolved(writable),
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
            if self.alone and dist.is_initialized() and dist.get_world_size() > 1:
                raise ValueError(
                    f"{self!r} was made or unpickled before init_process_group, for a world of 1; there are "
                    f"{dist.get_world_size()} ranks now: make it after init_process_group"
                )
            name = transports.resolve(self.transport_name, device)
            if isinstance(self.variant, External):  # brings its own exchange; ours only gathers what unshard wants
                name = "nccl" if device.type == "cuda" else "gloo"
            # a function made for one rank of a larger world, as a baseline is, moves nothing
            made = transports.select(name, device, self.group) if self.world > 1 else None
            self.transports[device] = made or transports.Nothing()
        return self.transports[device]


def _again(
    name: str,
    kernel: str,
    transport: str,
    deterministic: bool,
    options: Options,
    graphs: bool | str,
    choice: Choice | None,
) -> ContextParallel:
    fn = ContextParallel(variant(name), None, kernel, transport, deterministic, options, graphs)
    fn.choice = choice
    return fn


def _check_graphs(
    variant: Variant[Any], options: Options, transport: Transport, device: torch.device, world: int
) -> None:
    """Raises UnsupportedCall for what is not captured."""
    reason = None
    if device.type != "cuda":
        reason = f"a {device.type} has no CUDA graphs"
    elif isinstance(variant, External):
        reason = f"{variant.name} brings its own exchange"
    elif variant.decode:
        reason = "a decode's keys grow from call to call; capture the call yourself, between two lengths"
    elif options.uncapturable is not None:
        reason = options.uncapturable
    elif world > 1 and not transport.pulls:
        reason = f"transport={transport.name} may hang in a graph; symm is needed"
        reason += f" ({transport.note})" if transport.note else ""
    if reason is not None:
        raise UnsupportedCall(f"graphs=True: {reason}")
