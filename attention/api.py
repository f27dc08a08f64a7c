"""The public functions. `make` returns a variant as a differentiable function over a process group."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Hashable
from functools import wraps
from pickle import PicklingError
from typing import Any, Literal, TypeVar, cast, overload

import torch
import torch.distributed as dist
from torch import Tensor

from attention import auto, kernels, transports
from attention.agreement import Calls, calls_over, seconds
from attention.autograd import Unshard, attend, token_range
from attention.batched_copy import copy_all
from attention.call import (
    Lengths,
    check_cu_seqlens,
    check_keywords,
    check_no_window,
    check_padding,
    check_prefix,
    check_transforms,
    process_group,
    rank_and_world,
    signed,
    token_dim_of,
)
from attention.errors import nearest
from attention.executors.plan import Plan
from attention.geometry.layouts import CuSeqlens, Shard, beyond
from attention.geometry.options import Options
from attention.gpu import private
from attention.gpu.cuda_graphs import GraphReplay
from attention.gpu.uploads import hold_for_caller
from attention.kernels.fit import fit
from attention.masks.mask import Mask
from attention.plan import call_spec, padded_layout, plan_of
from attention.plans import NO_WINDOW, Plans, Prepared, call_key, key_of_more
from attention.reduction.lse_merge import merge
from attention.replay import check_old_option, check_replay
from attention.shard_check import check_shards
from attention.tensors import TOKENS, token_indices
from attention.transports import Transport
from attention.variants.base import Variant
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
    choice: auto.Choice | None = None
    group = process_group(group)
    rank_and_world(group)
    check_old_option(options)
    check_replay(replay)
    if name == AUTO:
        _check_names(kernel, transport)

        def candidate(name: str, replay: str) -> ContextParallel:
            chosen = variant(name)
            return ContextParallel(chosen, group, kernel, transport, deterministic, chosen.parse(), replay, agreement)

        choice = auto.choose(options, group, replay, candidate)
        name, replay, options = choice.variant, choice.replay, {}
    chosen = variant(name)
    for option in options:
        if option.startswith("dropout"):
            raise ValueError(f"{option}={options[option]!r}: dropout is not supported by any variant; leave it out")
    _check_names(kernel, transport)
    parsed = chosen.parse(options)
    fn = ContextParallel(chosen, group, kernel, transport, deterministic, parsed, replay, agreement, check)
    fn.choice = choice
    return fn


def _check_names(kernel: str, transport: str) -> None:
    if kernel not in kernels.names():
        raise ValueError(f"kernel={kernel!r} is not a kernel; {nearest(kernel, kernels.names())}")
    if transport not in transports.names():
        raise ValueError(f"transport={transport!r} is not a transport; {nearest(transport, transports.names())}")


Method = TypeVar("Method", bound=Callable[..., Any])


def _not_compiled(call: Method) -> Method:
    """`torch.compile` leaves the call out of its graphs, since ranks communicate in it. `torch.compiler.disable` would
    do the same, but imports the compiler at once: that takes seconds, and after `init_process_group` it keeps the
    process group alive."""
    disabled = private.disable_dynamo(call)

    @wraps(call)
    def inner(*args: Any, **options: Any) -> Any:
        return disabled(*args, **options) if "torch._dynamo" in sys.modules else call(*args, **options)

    return cast(Method, inner)


def _noted(call: Method) -> Method:
    """Errors of the call reach the ranks that wait for this one (see `attention.agreement`)."""

    @wraps(call)
    def inner(self: ContextParallel, *args: Any, **options: Any) -> Any:
        with self.calls:
            return call(self, *args, **options)

    return cast(Method, inner)


class ContextParallel:
    """A context-parallel attention function; `make` builds it. It can be copied, and it can be pickled if it is over
    the default group. So can a module that contains it. Unpickled in a process without a process group, such as a worker
    of a DataLoader, it can shard as on the rank that pickled it, and refuses calls.

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
        replay: str = "none",
        agreement: bool | float = True,
        check: bool = False,
    ):
        self.variant = variant
        self.group = group
        self.kernel_name = kernel
        self.transport_name = transport
        self.deterministic = deterministic
        self.options = options
        self.choice: auto.Choice | None = None  # of attention=auto
        self.replay = replay
        self.agreement_s = seconds(agreement)
        self.check = check
        self.rank, self.world = rank_and_world(group)
        self.alone = not dist.is_initialized()  # there was no process group yet
        self.layout = variant.border(self.world, options)
        self._begin()

    def _begin(self) -> None:
        """Start without plans, transports and CUDA graphs."""
        self.transports: dict[torch.device, Transport] = {}
        self.plans = Plans()
        self.graphs = GraphReplay(copy_all, or_eager=self.replay == "auto")
        compared = self.world > 1 and self.agreement_s > 0 and not self.alone
        self.calls = calls_over(self.group) if compared else Calls()

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
        """A pickle contains the arguments of `make`, and rank and world size, which hold where there is no process group.
        Elsewhere the unpickled function is over the default group. Raises PicklingError for a function over a given
        group."""
        if self.group is not None:
            raise PicklingError(
                f"{self!r}: its process group can't be pickled; make it over the default group (group=None), or "
                "make it again in the process that would unpickle it"
            )
        return _unpickled, (
            self.rank,
            self.world,
            self.choice,
            self.variant.name,
            self.kernel_name,
            self.transport_name,
            self.deterministic,
            self.options,
            self.replay,
            self.agreement_s or False,
            self.check,
        )

    def __repr__(self) -> str:
        return f"{self.variant.name}(rank {self.rank} of {self.world}, kernel={self.kernel_name})"

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
            raise ValueError(f"{error}, or fn.shard(x, pad=True)") from None
        part = _part(x, dim, shards[self.rank])
        return (part, added) if pad else part

    @_not_compiled
    @_noted
    def unshard(self, x: Tensor, cu_seqlens: Lengths = None, padding: int = 0) -> Tensor:
        """The inverse of `shard`: the global tensor, on every rank, from the parts of all ranks. x: this rank's part of
        out, of a gradient of q, k or v, or of anything else that `shard` takes. The out of a decode is already global.
        padding: the tokens that `shard(x, pad=True)` added, which are cut off.

        Differentiable once. The backward does not communicate: it cuts this rank's part out of this rank's gradient of
        the global tensor. So all ranks should compute the same loss. Raises ValueError for shapes that `shard` does not
        take."""
        dim = token_dim_of(x, cu_seqlens is not None)
        self._check_group(communicates=True)
        whole = self.layout.replicated or self.variant.decode or self.world == 1
        total = x.shape[dim] * (1 if whole else self.world)
        real = total - check_padding(padding, total, self.variant.decode)
        if not whole:
            shards = self._shards(check_cu_seqlens(cu_seqlens, real), padding)
            x, _ = Unshard.apply(x, shards, self.rank, dim, self._transport(x.device))
        return x.narrow(dim, 0, real) if padding else x

    def _shards(self, cu_seqlens: CuSeqlens, padding: int = 0) -> tuple[Shard, ...]:
        """By rank, the tokens that it holds; with padding the whole is split like one sequence."""
        lengths = (0, cu_seqlens[-1] + padding) if padding else cu_seqlens
        return padded_layout(self, padding).shards(lengths, self.world)

    @_not_compiled
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
        with self.calls:
            self.calls.begin(self.agreement_s)
            check_transforms()
            if dropout or unknown:
                check_keywords(unknown, inspect.signature(ContextParallel.__call__).parameters)
                raise ValueError(f"dropout={dropout}: not supported; use dropout=0")
            key: Hashable = None
            prepared: Prepared | None = None
            if kv_tokens is kv_lengths is prefix is prefix_tokens is None and not self.variant.decode:
                more: Hashable = ()
                usual = window is NO_WINDOW and scale is softcap is mask is sinks is cu_seqlens is None
                if not usual or type(padding) is not int or padding:
                    more = key_of_more(scale, window, softcap, mask, sinks, cu_seqlens, padding)
                key = call_key(q, k, v, causal, return_lse, more)
                prepared = self.plans.prepared.get(key)
            if prepared is None:
                given = {
                    "causal": causal, "scale": scale, "window": window, "cu_seqlens": cu_seqlens, "mask": mask,
                    "kv_tokens": kv_tokens, "kv_lengths": kv_lengths, "padding": padding, "sinks": sinks, "softcap": softcap,
                }  # fmt: skip
                if prefix is not None or prefix_tokens is not None:
                    out, lse = self._with_prefix(q, k, v, given, prefix, prefix_tokens)
                    return (out, lse) if return_lse else out
                prepared = self._prepared(q, k, v, **given, return_lse=return_lse)
                if key is not None:
                    self.plans.prepare(key, prepared)
            elif prepared.packed is not None:
                self.plans.use_packed(prepared.packed)
            out, lse = self._attend(q, k, v, sinks, prepared)
            return (out, lse) if return_lse else out

    def _prepared(self, q: Tensor, k: Tensor, v: Tensor, **given: Any) -> Prepared:
        """A checked call, with its plan."""
        self._check_group(communicates=True)
        spec = call_spec(self, q, k, v, **given)
        plan = plan_of(spec, 1 if spec.packed else len(q), self, self.plans, self._transport)
        real = spec.cu_seqlens[-1]
        padded = beyond(self._shards((0, real), spec.padding)[self.rank], real) if spec.padding else ()
        return Prepared(plan, given.get("scale"), tuple(padded), spec.mask, spec if spec.packed else None)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, prepared: Prepared
    ) -> tuple[Tensor, Tensor | None]:
        """(out, LSE); the LSE is valid only if the call returns it."""
        plan = prepared.plan
        hold_for_caller(plan.transport.captured)
        at = None
        if (
            prepared.padding
        ):  # NaN there would reach other tokens, because a kernel multiplies what a mask excludes by 0
            at = token_indices(prepared.padding, q.device)
            q, k, v = (x.index_fill(TOKENS, at, 0) for x in (q, k, v))
        if self.check and self.world > 1 and not self.layout.replicated:
            check_shards({"k": k, "v": v} if self.variant.decode else {"q": q, "k": k, "v": v}, self.group)
        if prepared.scale is not None:
            q = signed(q, prepared.scale)
        q, k, v = fit((q, k, v), plan.kernel.align)
        out, lse = attend(q, k, v, sinks, plan, self.graphs if plan.graphs else None)
        if at is not None:  # a band does not exclude the padding's queries
            out = out.index_fill(TOKENS, at, 0)
            lse = None if lse is None else lse.index_fill(-1, at, -torch.inf)
        return out, lse

    def _with_prefix(
        self, q: Tensor, k: Tensor, v: Tensor, given: dict[str, Any], prefix: object, tokens: int | None
    ) -> tuple[Tensor, Tensor | None]:
        """(out, lse) over the keys of each element and those of the prefix. given: arguments of the call on each element's
        keys. Sinks are applied in this call only."""
        shared = check_prefix(prefix, k, v, self.variant)
        check_no_window(given["causal"], given["window"], given["mask"])
        out, lse = self(q, k, v, **given, return_lse=True)
        batch, n, heads, head_dim = q.shape
        queries = q.reshape(1, batch * n, heads, head_dim)
        found = self(
            queries, *shared, scale=given["scale"], softcap=given["softcap"], kv_tokens=tokens, return_lse=True
        )
        merge(out, lse, out, lse, found[0].view(out.shape), found[1].view(heads, batch, n).transpose(0, 1))
        return out, lse

    @_noted
    def plan(self, q: Tensor, k: Tensor, v: Tensor, **given: Any) -> Plan:
        """The plan of a call with these arguments: the schedule bound to this rank, its kernel and its transport."""
        return self._prepared(q, k, v, **given).plan

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

    def _transport(self, device: torch.device) -> Transport:
        """The device's transport, connected at its first use."""
        if device not in self.transports:
            name = transports.resolve(self.transport_name, device)
            # a baseline runs in a larger world with self.world = 1: nothing to move
            made = transports.select(name, device, self.group) if self.world > 1 else transports.Transport()
            made.follow(self.calls)
            self.transports[device] = made
        return self.transports[device]


def _part(x: Tensor, dim: int, mine: Shard) -> Tensor:
    """The tokens of a shard, contiguous; zeros for those beyond the end of x."""
    parts = []
    for r in mine:
        parts.append(token_range(x, dim, r))
        if lacking := len(r) - parts[-1].shape[dim]:
            shape = list(x.shape)
            shape[dim] = lacking
            parts.append(x.new_zeros(shape))
    if len(parts) > 1:
        return torch.cat(parts, dim)
    whole = parts[0].shape == x.shape
    return x.contiguous() if whole else parts[0].clone(memory_format=torch.contiguous_format)


def _unpickled(rank: int, world: int, choice: auto.Choice | None, name: str, *settings: Any) -> ContextParallel:
    fn = ContextParallel(variant(name), None, *settings)
    fn.choice = choice
    if fn.alone:
        fn.rank, fn.world, fn.layout = rank, world, fn.variant.border(world, fn.options)
    return fn
