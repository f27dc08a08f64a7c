"""The public functions. `make` returns a variant as a differentiable function over a process group."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Hashable, Mapping
from functools import cached_property, partial, wraps
from pickle import PicklingError
from typing import Any, Literal, TypeVar, cast, overload

import torch
import torch.distributed as dist
from torch import Tensor

from attention import auto, compiled, kernels, transports
from attention.agreement import Calls, calls_over, seconds
from attention.autograd import Unshard, attend, token_range
from attention.batched_copy import copy_all
from attention.call import (
    NO_WINDOW,
    Lengths,
    Settings,
    call_spec,
    check_cu_seqlens,
    check_flag,
    check_keywords,
    check_no_window,
    check_padding,
    check_prefix,
    key_of_more,
    process_group,
    rank_and_world,
    signed,
    token_dim_of,
)
from attention.errors import UnsupportedCall, nearest
from attention.executors.plan import Plan
from attention.geometry.layouts import CuSeqlens, Layout, Shard, beyond
from attention.geometry.options import HeadCount
from attention.gpu import private
from attention.gpu.cuda_graphs import GraphReplay
from attention.gpu.uploads import hold_for_caller
from attention.masks.mask import Mask
from attention.padding import Padding
from attention.plan import Plans, Prepared, plan_of
from attention.reduction.parts import merge
from attention.replay import check_replay
from attention.shard_check import check_shards
from attention.tensors import fit
from attention.transports import Transport
from attention.variants.base import ways_out
from attention.variants.registry import AUTO, SUMMARY, everything, variant

__all__ = ["ContextParallel", "make", "names"]


def names() -> dict[str, str]:
    """Every variant, with a line of what it is."""
    return {AUTO: SUMMARY} | {name: v.summary for name, v in everything().items()}


def make(
    name: str,
    group: dist.ProcessGroup | dist.DeviceMesh | None = None,
    kernel: str = "auto",
    transport: str = "auto",
    deterministic: bool = False,
    replay: str = "none",
    agreement: bool | float = True,
    check: bool = False,
    **options: Any,
) -> ContextParallel:
    """The variant `name` as a function over `group`, a process group or a device mesh of one dimension. With group=None it
    is over the default process group, or over this process alone if none was initialized.

    replay: how a call runs if one with the same shapes (for a packed batch, the same lengths) came before. "none": it
    runs the Python of its executor. "graphs": forward and backward are replayed from CUDA graphs. That removes CPU
    launch overhead, which dominates with few tokens a GPU, and costs memory for copies of inputs and results. "auto":
    graphs if a capture works, else none. With name="auto", "auto" means graphs if they should be faster, else none.
    agreement: a call that needs a new plan (new shapes, mask or lengths) first compares what all ranks ask for (see
    `attention.agreement` for the cost). Ranks that disagree raise the same ValueError, and so does a call that raises on
    one of them. A rank waits 300 s for the others, or so many seconds. False: ranks that disagree may fail, hang or
    compute wrong results. Equal on all ranks.
    check: for debugging; every call compares hashes of q, k and v over the ranks, which synchronises, and raises ValueError
    on all ranks if two ranks give equal ones, since they are then not shards. Equal on all ranks.
    options: the variant's own (`python -m runner.catalog attention` lists them). name="auto" runs a few variants for some
    seconds and takes the fastest. Its options are the shapes of the calls (see `attention.auto.AutoRequest`), and
    `choice` of the function has the times.
    Raises ValueError for an unknown name, kernel, transport or option."""
    group = process_group(group)
    rank_and_world(group)
    check_replay(replay, options)
    _check_names(kernel, transport)
    check_flag("deterministic", deterministic)
    check_flag("check", check)

    def made(name: str, replay: str, options: Mapping[str, Any], check: bool = False) -> ContextParallel:
        chosen = variant(name)
        for option in options:
            if option.startswith("dropout"):
                raise ValueError(f"{option}={options[option]!r}: dropout is not supported by any variant; leave it out")
        parsed = chosen.parse(options)
        fixed = Settings(chosen, parsed, kernel, transport, deterministic, replay, seconds(agreement), check)
        return ContextParallel(fixed, group)

    if name != AUTO:
        return made(name, replay, options, check)
    choice = auto.choose(options, group, replay, lambda name, replay: made(name, replay, {}))
    fn = made(choice.variant, choice.replay, {}, check)
    fn.choice = choice
    return fn


def _check_names(kernel: str, transport: str) -> None:
    if kernel not in kernels.names():
        raise ValueError(f"kernel={kernel!r} is not a kernel; {nearest(kernel, kernels.names())}")
    if transport not in transports.names():
        raise ValueError(f"transport={transport!r} is not a transport; {nearest(transport, transports.names())}")


Method = TypeVar("Method", bound=Callable[..., Any])


def _not_compiled(call: Method, instead: Callable[..., Any] | None = None) -> Method:
    """`torch.compile` leaves the call out of its graphs, since ranks communicate in it, unless there is something `instead` for
    its arguments. `torch.compiler.disable` would do the same, but imports the compiler at once: that takes seconds, and after
    `init_process_group` it keeps the process group alive."""

    def on_its_device(*args: Any, **options: Any) -> Any:
        x = args[1] if len(args) > 1 else options.get("q", options.get("x"))
        if isinstance(x, Tensor) and x.is_cuda and private.current_device() != x.get_device():
            with torch.cuda.device(x.device):  # where kernels are launched, and objects gathered
                return call(*args, **options)
        return call(*args, **options)

    disabled = private.disable_dynamo(on_its_device)

    @wraps(call)
    def inner(*args: Any, **options: Any) -> Any:
        if "torch._dynamo" not in sys.modules:
            return on_its_device(*args, **options)
        if instead is not None and torch.compiler.is_compiling() and compiled.takes(args[0], options):
            return instead(*args, **options)
        return disabled(*args, **options)

    return cast(Method, inner)


class ContextParallel:
    """A context-parallel attention function; `make` builds it. It can be copied, and it can be pickled if it is over
    the default group. So can a module that contains it. Unpickled in a process without a process group, such as a worker
    of a DataLoader, it can shard as on the rank that pickled it, and refuses calls.

    Dense tensors are `[B, S, H, D]`, packed ones `[T, H, D]` with the global `cu_seqlens`; k and v have Hk heads,
    `H % Hk == 0`."""

    choice: auto.Choice | None = None  # of attention=auto

    def __init__(self, settings: Settings, group: dist.ProcessGroup | None = None):
        self.settings, self.group = settings, group
        self.variant, self.options = settings.variant, settings.options
        self.rank, self.world = rank_and_world(group)
        self.alone = not dist.is_initialized()  # there was no process group yet
        self._begin()

    def _begin(self) -> None:
        """Start without plans, transports and CUDA graphs."""
        self.transports: dict[torch.device, Transport] = {}
        self.plans = Plans()
        self.graphs = GraphReplay(copy_all, or_eager=self.settings.replay == "auto")
        compared = self.world > 1 and self.settings.agreement_s > 0 and not self.alone
        self.calls = calls_over(self.group) if compared else Calls()
        self.handle = compiled.handle_of(self)

    @cached_property
    def layout(self) -> Layout:
        """How tokens come in and go back."""
        return self.padded_layout(0)

    def padded_layout(self, padding: int) -> Layout:
        """The layout where the last `padding` tokens are padding."""
        return self.variant.border(self.world, self.options.padded(padding))

    def __copy__(self) -> ContextParallel:
        """A function with the same arguments and group, but with plans and transports of its own. Deep copies use
        this."""
        other = object.__new__(type(self))
        other.__dict__ = dict(self.__dict__)
        other._begin()
        return other

    def __deepcopy__(self, memo: dict[int, Any]) -> ContextParallel:
        return self.__copy__()

    def __reduce__(self) -> tuple[Any, ...]:
        """A pickle contains the settings, and rank and world size, which hold where there is no process group.
        Elsewhere the unpickled function is over the default group. Raises PicklingError for a function over a given
        group."""
        if self.group is not None:
            raise PicklingError(
                f"{self!r}: its process group can't be pickled; make it over the default group (group=None), or "
                "make it again in the process that would unpickle it"
            )
        return _unpickled, (self.settings, self.rank, self.world, self.choice)

    def __repr__(self) -> str:
        return f"{self.variant.name}(rank {self.rank} of {self.world}, kernel={self.settings.kernel})"

    @overload
    def shard(
        self, x: Tensor, cu_seqlens: Lengths = None, role: str | None = None, pad: Literal[False] = False
    ) -> Tensor: ...

    @overload
    def shard(
        self, x: Tensor, cu_seqlens: Lengths = None, role: str | None = None, *, pad: Literal[True]
    ) -> tuple[Tensor, int]: ...

    @_not_compiled
    def shard(
        self, x: Tensor, cu_seqlens: Lengths = None, role: str | None = None, pad: bool = False
    ) -> Tensor | tuple[Tensor, int]:
        """This rank's part of a global tensor, in the variant's layout. Differentiable.

        x: `[B, S, H, D]` or `[B, S]` (token ids, labels, positions), or with cu_seqlens a packed `[T, H, D]` or `[T]`;
        any dtype. Give hidden states `[B, S, C]` as `[B, S, 1, C]`. The part is contiguous and is a copy, so that x can
        be freed, unless it is all of x.

        role: "q" or "kv"; a decode needs it, since there every rank has all queries.
        pad: returns (part, added) instead. Where the sequences do not divide, `added` zeros follow the last token of the
        whole, which is then split like one sequence. Give `padding=added` to the call and to `unshard`. A loss must
        leave the added tokens out, which `shard(torch.ones(B, S), pad=True)` marks by 0.
        Raises ValueError for other shapes, for sequences that do not divide by the layout's chunks, and for pad in a
        decode."""
        self._check_group()
        dim = token_dim_of(x, cu_seqlens is not None)
        if self.variant.decode and pad:
            raise ValueError(f"pad=True: the keys of {self.variant.name}, a decode, need not divide; use pad=False")
        if self.variant.decode:
            if role not in ("q", "kv"):
                raise ValueError(
                    f'role={role!r}: {self.variant.name} shards keys and values only; give role="q" or "kv"'
                )
            if role == "q":
                return x
        cu = check_cu_seqlens(cu_seqlens, x.shape[dim])
        added = self.variant.padding(self.options, cu, self.world) if pad else 0
        try:
            shards = self._shards(cu, added)
        except ValueError as error:
            raise ValueError(f"{error}{ways_out(cu, self.world) or ', or fn.shard(x, pad=True)'}") from None
        if added:  # the shards are those of the whole with its padding
            x = torch.cat([x, x.new_zeros((*x.shape[:dim], added, *x.shape[dim + 1 :]))], dim)
        parts = [token_range(x, dim, r) for r in shards[self.rank]] or [x.narrow(dim, 0, 0)]
        part = x.contiguous() if parts[0].shape == x.shape else torch.cat(parts, dim)
        return (part, added) if pad else part

    @_not_compiled
    def unshard(self, x: Tensor, cu_seqlens: Lengths = None, padding: int = 0) -> Tensor:
        """The inverse of `shard`: the global tensor, on every rank, from the parts of all ranks. x: this rank's part of
        out, of a gradient of q, k or v, or of anything else that `shard` takes. The out of a decode is already global.
        padding: the tokens that `shard(x, pad=True)` added, which are cut off.

        Differentiable once. The backward does not communicate: it cuts this rank's part out of this rank's gradient of
        the global tensor. So all ranks should compute the same loss. Raises ValueError for shapes that `shard` does not
        take."""
        self.calls.settle()
        try:
            dim = token_dim_of(x, cu_seqlens is not None)
            self._check_group(communicates=True)
            whole = self.layout.replicated or self.variant.decode or self.world == 1
            total = x.shape[dim] * (1 if whole else self.world)
            real = total - check_padding(padding, total, self.variant.decode)
            if not whole:
                shards = self._shards(check_cu_seqlens(cu_seqlens, real), padding)
                x, _ = Unshard.apply(x, shards, self.rank, dim, self.transport(x.device))
            return x.narrow(dim, 0, real) if padding else x
        except Exception as error:
            self.calls.fail(error)
            raise

    def _shards(self, cu_seqlens: CuSeqlens, padding: int = 0) -> tuple[Shard, ...]:
        """By rank, the tokens that it holds; with padding the whole is split like one sequence."""
        lengths = (0, cu_seqlens[-1] + padding) if padding else cu_seqlens
        return self.padded_layout(padding).shards(lengths, self.world)

    @partial(_not_compiled, instead=compiled.call)
    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None,
        window: tuple[int, int] = NO_WINDOW, cu_seqlens: Lengths = None, mask: Mask | None = None,
        kv_tokens: int | None = None, kv_lengths: Lengths = None, prefix: tuple[Tensor, Tensor] | None = None,
        prefix_tokens: int | None = None, padding: int = 0, sinks: Tensor | None = None, softcap: float | None = None,
        dropout: float = 0.0, return_lse: bool = False, **unknown: Any,
    ) -> Any:  # fmt: skip
        """Attention of this rank's queries over the global keys.

        q: `[B, s, H, D]` or packed `[t, H, D]`, this rank's shard; k: `[B, s, Hk, D]` or `[t, Hk, D]`; v: like k, but its head
        dim Dv may be another; out has it. All bf16, fp16, fp32 or fp64.
        The computation keeps that dtype, also under autocast. A tensor is copied if its last dim is strided, if its
        rows overlap (as after `expand`) or, with most kernels, if they are not aligned to 16 bytes.
        cu_seqlens: the global cumulative lengths of packed tensors, integers. A list or a CPU tensor never
        synchronises; a GPU tensor does when it is new or was written (see `tensors.on_host`).
        scale: any finite number, by default D^-0.5. window: (left, right) in tokens, -1 is unbounded.
        mask: any of `attention.masks`, over the positions of the whole sequence or of the whole packed batch. causal,
        window and cu_seqlens hold beside it: a query sees the keys that all of them allow.
        kv_tokens: for a decode, the number of keys on all ranks together. By default all ranks have as many as this one. Its
        queries are the last tokens, by which causal and window are aligned.
        kv_lengths: for a decode, integers `[B]`: batch element b has the keys up to kv_lengths[b] of all ranks together, 0 to
        kv_tokens, and its queries are the last of these. A list or a CPU tensor is checked. A GPU tensor is read by the kernel
        `decode` alone, without a synchronisation: values out of range are clamped; other kernels read it as a
        list and make a call for each length. Without keys out is 0 and the LSE -inf.
        prefix: for a decode, (k, v) of keys before those of every batch element, which the whole batch shares: this rank's shard
        of `[1, N_p, Hk, D]` or `[N_p, Hk, D]`, v with Dv. They are attended as one sequence of B*Sq queries, so that they are read once.
        It is a call of its own with a reduction of its own; both results are rounded to q's dtype, then merged. causal holds
        within the keys after the prefix; windows are refused. prefix_tokens: as kv_tokens, of the prefix.
        padding: the tokens that `shard(x, pad=True)` added at the end. They contribute nothing, whatever q, k and v hold
        there (q, k and v are copied to set it to 0): their out is 0, their LSE -inf, and they get no gradient. cu_seqlens
        and mask are those of the other tokens.
        sinks: `[H]`, a learned logit a head that joins the softmax's denominator; floating-point, equal on all ranks. Their
        gradient is this rank's part: sum it over the ranks, as that of any other parameter.
        softcap: a positive number c; scaled scores x become `c * tanh(x / c)`.
        All ranks must make the same calls in the same order, with the same arguments except the tensors. Ranks that
        don't are found when a plan is made (see `agreement` of `make`); otherwise a call may fail, hang or be wrong.
        Returns out, like q with v's head dim; with `return_lse` also the log-sum-exp `[B, H, s]` or `[H, t]`, fp32 (fp64 for fp64),
        including the sinks. Out is differentiable once: a second derivative raises UnsupportedCall, as does the backward of a loss that
        uses the LSE undetached. The backward reads out, so write `out = out + x`, not `out += x`.
        Raises ValueError for shapes, masks or lengths that the variant can't do, UnsupportedCall (a ValueError)
        when the kernel can't, and TypeError for an unknown argument."""
        self.calls.begin(self.settings.agreement_s)
        try:
            if private.transformed.function() or dropout or unknown:
                raise _refused(dropout, unknown)
            usual = (
                window is NO_WINDOW and type(padding) is int and not padding and scale is softcap is mask is sinks is cu_seqlens
                is kv_tokens is kv_lengths is prefix is prefix_tokens is None
            )  # fmt: skip
            arguments = {"causal": causal} if usual else {
                "causal": causal, "scale": scale, "window": window, "cu_seqlens": cu_seqlens, "mask": mask, "sinks": sinks,
                "kv_tokens": kv_tokens, "kv_lengths": kv_lengths, "padding": padding, "softcap": softcap,
            }  # fmt: skip
            if prefix is not None or prefix_tokens is not None:
                out, lse = self._with_prefix(q, k, v, arguments, prefix, prefix_tokens)
                return (out, lse) if return_lse else out
            key: Hashable = None  # what decides whether a call was checked before: all but the numbers in its tensors
            prepared: Prepared | None = None
            if kv_tokens is kv_lengths is None and not self.variant.decode:
                try:
                    key = (
                        q.shape, q.dtype, q.device, q.layout, type(q), k.shape, k.dtype, k.device, k.layout, type(k), v.shape,
                        v.dtype, v.device, v.layout, type(v), causal, type(causal), bool(return_lse),
                        torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad),
                        None if usual else key_of_more(arguments),
                    )  # fmt: skip
                    prepared = self.plans.prepared.get(key)
                except (AttributeError, RuntimeError, TypeError):  # what is refused: no tensors, nested ones
                    key = None
            if prepared is None:
                prepared = self._prepared(q, k, v, **arguments, return_lse=return_lse)
                if key is not None:
                    self.plans.prepare(key, prepared)
            plan = prepared.plan
            if q.is_cuda:
                hold_for_caller(plan.transport.captured)
            if prepared.padding is not None:
                q, k, v, sinks = prepared.padding.add(q, k, v, sinks)
            if self.settings.check and self.world > 1 and not self.layout.replicated:
                check_shards({"k": k, "v": v} if self.variant.decode else {"q": q, "k": k, "v": v}, self.group)
            if prepared.scale is not None:
                q = signed(q, prepared.scale)
            q, k, v = fit((q, k, v), plan.kernel.align)
            inputs = (q, k, v) if sinks is None else (q, k, v, sinks.contiguous())
            result = attend(inputs, plan, self.graphs if plan.graphs else None, prepared.gradient)
            if prepared.padding is not None:
                result = prepared.padding.cut(*result)
            return result if return_lse else result[0]
        except Exception as error:
            self.calls.fail(error)
            raise

    def _prepared(self, q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> Prepared:
        """A checked call, with its plan."""
        self._check_group(communicates=True)
        spec = call_spec(self, q, k, v, **arguments)
        plan, real = plan_of(self, spec), spec.cu_seqlens[-1]
        tokens = beyond(self._shards((0, real), spec.padding)[self.rank], real) if spec.padding else ()
        heads = tuple(HeadCount(n, m // n) for n, m in ((k.shape[-2], q.shape[-2]), (plan.kv_heads, plan.heads)))
        padding = Padding(tuple(tokens), *heads) if tokens or heads[0] != heads[1] else None
        return Prepared(plan, spec.shape.backward, arguments.get("scale"), padding, spec.mask)

    def _with_prefix(
        self, q: Tensor, k: Tensor, v: Tensor, arguments: dict[str, Any], prefix: object, tokens: int | None
    ) -> tuple[Tensor, Tensor]:
        """(out, lse) over the keys of each element and those of the prefix. arguments: of the call on each element's
        keys. Sinks are applied in this call only."""
        shared = check_prefix(prefix, k, v, self.variant)
        check_no_window(arguments["causal"], arguments["window"], arguments["mask"])
        out, lse = self(q, k, v, **arguments, return_lse=True)
        batch, n, heads, head_dim = q.shape
        queries = q.reshape(1, batch * n, heads, head_dim)
        alike = {name: arguments[name] for name in ("scale", "softcap")}
        before, before_lse = self(queries, *shared, **alike, kv_tokens=tokens, return_lse=True)
        merge(out, lse, out, lse, before.view(out.shape), before_lse.view(heads, batch, n).transpose(0, 1))
        return out, lse

    def plan(self, q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> Plan:
        """The plan of a call with these arguments: the schedule bound to this rank, its kernel and its transport."""
        self.calls.settle()
        try:
            return self._prepared(q, k, v, **arguments).plan
        except Exception as error:
            self.calls.fail(error)
            raise

    def _check_group(self, communicates: bool = False) -> None:
        """Raises ValueError if the function has no process group, and either there is one now or it needs one."""
        if not self.alone:
            return
        if dist.is_initialized() and dist.get_world_size() > 1:
            raise ValueError(
                f"{self!r} was made or unpickled before init_process_group, and there are {dist.get_world_size()} ranks "
                "now: it must be made after init_process_group; make it again"
            )
        if communicates and self.world > 1:
            raise ValueError(
                f"{self!r} was unpickled in a process without a process group: it can only shard there; call it on the "
                "ranks, or make it again"
            )

    def transport(self, device: torch.device) -> Transport:
        """The device's transport, connected at its first use."""
        if device not in self.transports:
            name = transports.resolve(self.settings.transport, device)
            # a baseline runs in a larger world with self.world = 1: nothing to move
            made = transports.select(name, device, self.group) if self.world > 1 else transports.Transport()
            made.follow(self.calls)
            self.transports[device] = made
        return self.transports[device]


def _refused(dropout: float, unknown: dict[str, Any]) -> ValueError:
    """Why no call is made with such arguments, or here. Raises TypeError for an unknown one."""
    if private.transformed.function():
        return UnsupportedCall(
            "torch.func: grad, vmap, jvp and forward-mode differentiation do not go through a call; use "
            "torch.autograd.grad, and give a batch as the first dim"
        )
    check_keywords(unknown, inspect.signature(ContextParallel.__call__).parameters.keys() - {"self", "unknown"})
    return ValueError(f"dropout={dropout}: not supported; use dropout=0")


def _unpickled(settings: Settings, rank: int, world: int, choice: auto.Choice | None) -> ContextParallel:
    fn = ContextParallel(settings)
    fn.choice = choice
    if fn.alone:
        fn.rank, fn.world = rank, world
    return fn
