"""Makes the plan of a call: checks its arguments, then looks the plan up or builds it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from attention import kernels, transports
from attention.agreement import Asked, Calls
from attention.autograd import wants_gradient
from attention.call import (
    Lengths,
    check_causal,
    check_cu_seqlens,
    check_kv_lengths,
    check_mask,
    check_padding,
    check_range,
    check_scale,
    check_sinks,
    check_softcap,
    check_tensors,
    check_window,
    positive,
)
from attention.executors import nested_prefixes
from attention.executors.plan import KeyLengths, Plan, PlannedStep, part_plan, plan_steps, resized
from attention.geometry.layouts import CuSeqlens, Layout, sizes_of
from attention.geometry.options import Options
from attention.geometry.schedules import Problem, Subproblem, masks
from attention.kernels import Call, Kernel, Shape
from attention.kernels.patterns import ForPatterns
from attention.kernels.tile_lists import most_at_once
from attention.masks.band import FULL, Band
from attention.masks.mask import Mask
from attention.masks.padded import Padded
from attention.masks.pattern import Pattern
from attention.masks.sequences import mask_of, of_sequences
from attention.plans import Plans
from attention.replay import takes_graphs
from attention.tensors import on_host, tokens
from attention.transports import Transport
from attention.variants.base import Variant, takers

Connect = Callable[[torch.device], Transport]

MOST_LENGTHS = 9  # of cu_seqlens that an error message shows


class Settings(Protocol):
    """What `make` fixed for all calls of a function."""

    variant: Variant[Any]
    options: Options
    kernel_name: str
    transport_name: str
    deterministic: bool
    replay: str
    rank: int
    world: int
    layout: Layout
    group: dist.ProcessGroup | None
    calls: Calls


class CallSpec(NamedTuple):
    """The arguments that determine a plan, in addition to the function's settings."""

    shape: Shape
    q_tokens: int  # of this rank
    kv_tokens: int  # of this rank
    cu_seqlens: CuSeqlens  # without padding
    packed: bool
    causal: bool
    window: tuple[int, int]
    mask: Mask | None
    padding: int
    scale: float
    softcap: float | None
    sinks: bool
    kv_lengths: KeyLengths  # of a decode
    lengths_on: str | None  # where these are known
    device: torch.device
    want_lse: bool


def call_spec(
    settings: Settings,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: tuple[int, int] = (-1, -1),
    cu_seqlens: Lengths = None,
    mask: Mask | None = None,
    kv_tokens: int | None = None,
    padding: int = 0,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    kv_lengths: Lengths = None,
    return_lse: bool = False,
) -> CallSpec:
    """The checked arguments of a call (see `ContextParallel.__call__`). Raises ValueError."""
    packed = cu_seqlens is not None
    check_tensors(q, k, v, packed, settings.variant.decode)
    scale, window, softcap = check_scale(scale), check_window(window), check_softcap(softcap)
    check_sinks(sinks, q)
    held = tokens(k)
    total = kv_tokens if kv_tokens is not None else held * (1 if settings.layout.replicated else settings.world)
    cu = check_cu_seqlens(cu_seqlens, total - check_padding(padding, total, settings.variant.decode))
    lengths = check_kv_lengths(kv_lengths, len(q), total, q.device, settings.variant)
    shape = Shape.of(q, k, v, wants_gradient(q, k, v, sinks), softcap is not None)
    return CallSpec(
        shape=shape,
        q_tokens=tokens(q),
        kv_tokens=held,
        cu_seqlens=cu,
        packed=packed,
        causal=check_causal(causal),
        window=window,
        mask=check_mask(mask),
        padding=padding,
        scale=positive(scale, shape.head_dim),
        softcap=softcap,
        sinks=sinks is not None,
        kv_lengths=lengths,
        lengths_on=None if lengths is None else "GPU" if isinstance(lengths, Tensor) else "CPU",
        device=q.device,
        want_lse=return_lse,
    )


def plan_of(spec: CallSpec, batch: int, settings: Settings, plans: Plans, connect: Connect) -> Plan:
    """The plan of a call, from `plans` or new; `connect` gives a device's transport. batch: the batch size; a plan
    serves any, but ranks agree on a new plan only if theirs are equal. Raises as `build` does."""
    if settings.variant.decode:
        return _decode_plan(spec, batch, settings, plans, connect)
    found = plans.get(spec)
    if found is None:
        found = build(spec, batch, settings, plans.made, connect)
        plans.add(spec, found)
    if spec.packed:
        plans.use_packed(spec)
    return found


def _decode_plan(spec: CallSpec, batch: int, settings: Settings, plans: Plans, connect: Connect) -> Plan:
    """A decode keeps its plan while the keys grow and lengths change: the plan is resized, and ranks agree once."""
    key = spec._replace(cu_seqlens=(), kv_tokens=0, kv_lengths=None)
    found = plans.get(key)
    if found is None:
        found = build(spec, batch, settings, plans.made, connect)
        plans.add(key, found)
    _check_share(spec, settings)
    lengths = spec.kv_lengths
    if isinstance(lengths, Tensor) and "kv_lengths" not in found.kernel.features:
        lengths = check_range(on_host(lengths), spec.cu_seqlens[-1])
    if found.problem.cu_seqlens != spec.cu_seqlens or not _same(found.lengths, lengths):
        found = resized(found, spec.cu_seqlens, _like(spec, settings), lengths, spec.device)
        plans[key] = found
    return found


def _same(a: KeyLengths, b: KeyLengths) -> bool:
    return a is b or (isinstance(a, tuple) and isinstance(b, tuple) and a == b)


def build(spec: CallSpec, batch: int, settings: Settings, made: int, connect: Connect) -> Plan:
    """A new plan: the schedule bound to this rank, its kernel and its transport. made: how many plans the function made
    before. Raises ValueError, UnsupportedCall for what the kernel or replay=graphs can't do, and Disagreement where
    ranks ask for different plans."""
    variant, shape = settings.variant, spec.shape
    _check_padded_lengths(spec, settings)
    options = settings.options.padded(spec.padding)
    problem = variant.problem(_divided(spec), settings.world, _whole_mask(spec, settings), options, spec.q_tokens)
    _check_share(spec, settings)
    _check_call(spec, settings)
    place, head = divmod(settings.rank, problem.ulysses)
    parts = problem.schedule.parts(problem, shape.heads, shape.kv_heads)
    problems = [(_part_spec(spec, c), c.problem, place % c.problem.world) for c in parts] or [(spec, problem, place)]
    bound = [_bound(of, settings, mine, at) for of, mine, at in problems]
    kernel, steps = bound[0]
    if settings.calls.compare:  # before `connect`, which is collective
        settings.calls.check(_asked(spec, batch, settings, made, kernel))
    transport = connect(spec.device)
    # whether one rank's kernel can write into another's memory
    writable = settings.world > 1 and spec.device.type == "cuda" and transport.pulls and shape.dtype != torch.float64
    plan = Plan(
        variant=variant,
        problem=problem,
        rank=place,
        head=head,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        scale=spec.scale,
        packed=spec.packed,
        deterministic=settings.deterministic,
        want_lse=spec.want_lse,
        sinks=spec.sinks,
        kernel=kernel,
        transport=transport,
        options=options.resolved(writable),
        steps=() if parts else steps,
    )
    plan = replace(plan, parts=tuple((c, part_plan(plan, c, *made)) for c, made in zip(parts, bound, strict=False)))
    return replace(plan, graphs=takes_graphs(settings.replay, plan, spec.device))


def _bound(spec: CallSpec, settings: Settings, problem: Problem, place: int) -> tuple[Kernel, tuple[PlannedStep, ...]]:
    """The kernel and the steps of a problem. Raises UnsupportedCall for patterns that the kernel can't do, which differ by rank, so
    ranks agree afterwards."""
    kernel = _kernel(spec, settings, problem)
    steps = plan_steps(problem, place, _like(spec, settings), spec.packed, spec.device)
    if isinstance(kernel, ForPatterns):
        for call in (call for step in steps for call in step.calls):
            kernel.check(call.call)
    return kernel, steps


def _part_spec(spec: CallSpec, c: Subproblem) -> CallSpec:
    tokens = c.fold * c.problem.cu_seqlens[-1] // c.problem.world
    shape = replace(spec.shape, heads=c.heads, kv_heads=c.kv_heads, packed=False, tokens=tokens)
    return spec._replace(shape=shape, packed=False)


def _like(spec: CallSpec, settings: Settings) -> Call:
    """The settings shared by all kernel calls of a plan."""
    return Call(spec.scale, deterministic=settings.deterministic, softcap=spec.softcap)


def _divided(spec: CallSpec) -> CuSeqlens:
    """The cumulative lengths that the layout divides: with padding the whole is one sequence."""
    return (0, spec.cu_seqlens[-1] + spec.padding) if spec.padding else spec.cu_seqlens


def _whole_mask(spec: CallSpec, settings: Settings) -> Band | Mask:
    """The mask of the call. Padding comes last, so a causal band over one sequence can stay; else the mask becomes `Padded`."""
    variant = settings.variant
    given = settings.options.mask if spec.mask is None else spec.mask
    mask = mask_of(Band.of(spec.causal, spec.window), spec.cu_seqlens, given)
    if not spec.padding:
        return mask
    if isinstance(mask, Band):
        stays = len(spec.cu_seqlens) == 2 and mask.right == 0 and not variant.mixes
        if stays and isinstance(variant.form(mask, spec.cu_seqlens), Band):
            return mask
        mask = of_sequences(mask, spec.cu_seqlens)
    return Padded(mask, spec.padding)


def _check_share(spec: CallSpec, settings: Settings) -> None:
    """Raises ValueError unless k has this rank's share of the tokens."""
    rank, world = settings.rank, settings.world
    layout, lengths = padded_layout(settings, spec.padding), _divided(spec)
    share = sizes_of(layout, lengths, world)[rank]
    if spec.kv_tokens != share:
        raise ValueError(f"k has {spec.kv_tokens} tokens: rank {rank} of {world} holds {share} of {lengths[-1]}")


def _check_padded_lengths(spec: CallSpec, settings: Settings) -> None:
    """Raises ValueError for padding of a packed batch whose sequences the layout would have to cut, each by itself."""
    variant, mask = settings.variant, _whole_mask(spec, settings)
    any_padding = variant.any_mask or variant.mixes
    if not spec.padding or any_padding or len(spec.cu_seqlens) == 2 or isinstance(mask, Band):
        return
    try:
        settings.layout.check(spec.cu_seqlens, settings.world)
    except ValueError as error:
        raise ValueError(
            f"cu_seqlens with padding={spec.padding}: {variant.name} pads single sequences, not packed batches, and without "
            f"padding {error}; {takers(mask, _divided(spec)[-1])} take this"
        ) from None


def padded_layout(settings: Settings, padding: int) -> Layout:
    """How tokens come in and go back where the last `padding` of them are padding."""
    variant, options = settings.variant, settings.options
    return variant.border(settings.world, options.padded(padding)) if padding else settings.layout


def _check_call(spec: CallSpec, settings: Settings) -> None:
    """Raises ValueError for options that do not fit this call, UnsupportedCall for what this device lacks."""
    variant, options, shape = settings.variant, settings.options, spec.shape
    options.check(shape.heads, shape.kv_heads, settings.world)
    if variant.decode and shape.backward:
        raise ValueError(f"requires_grad=True: {variant.name} has no backward; call it under no_grad")
    options.check_call(shape.device, settings.world, spec.sinks)
    nested_prefixes.check(options, shape)


def _kernel(spec: CallSpec, settings: Settings, problem: Problem) -> Kernel:
    """The local kernel. Raises UnsupportedCall if it can't do this call."""
    variant, wanted = settings.variant, settings.kernel_name
    if problem.is_cut:
        tokens = problem.cu_seqlens[-1]
        rows = problem.mask.rectangles(tokens)
        kernel = kernels.select_for_patterns(wanted, spec.shape, masks(problem), most_at_once(rows) <= 1)
        if kernel.refuses(spec.shape, FULL):  # it has no packed calls: all ranks see here whether it can do the mask
            kernel.check(_like(spec, settings).under(Pattern(tokens, tokens, rows)))
        return kernel
    return kernels.select(wanted, spec.shape, masks(problem), variant.decode)


def _asked(spec: CallSpec, batch: int, settings: Settings, made: int, kernel: Kernel) -> Asked:
    """What must be equal on all ranks, by field."""
    variant, shape, total = settings.variant, spec.shape, spec.cu_seqlens[-1]
    asked = {
        "variant": variant.name,
        "plan of this function": made + 1,
        "options": settings.options.plain(),
        "kernel": f"{kernel.name} (of {settings.kernel_name})",
        "transport": transports.resolve(settings.transport_name, spec.device),
        "deterministic": settings.deterministic,
        "replay": settings.replay,
        "device": shape.device,
        "dtype": str(shape.dtype).removeprefix("torch."),
        "batch": batch,
        "heads": shape.heads,
        "kv_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "v_head_dim": shape.v_head_dim,
        "tokens of all ranks": total,
        "queries": spec.q_tokens if variant.decode else "all",
        "cu_seqlens": _lengths(spec.cu_seqlens) if spec.packed else "none",
        "causal": spec.causal,
        "window": spec.window,
        "mask": _mask(spec.mask),
        "mask of make": _mask(settings.options.mask),
        "padding": spec.padding,
        "scale": spec.scale,
        "softcap": spec.softcap,
        "sinks": spec.sinks,
        "kv_lengths": "none" if spec.lengths_on is None else f"on {spec.lengths_on}",
        "return_lse": spec.want_lse,
        "gradient": shape.backward,
    }
    return {field: str(value) for field, value in asked.items()}


def _lengths(cu_seqlens: CuSeqlens) -> str:
    if len(cu_seqlens) <= MOST_LENGTHS:
        return str(list(cu_seqlens))
    return f"{len(cu_seqlens) - 1} sequences (hash {_hash(cu_seqlens)})"


def _mask(mask: Mask | None) -> str:
    return "none" if mask is None else f"{mask.describe()} (hash {_hash(mask)})"


def _hash(value: object) -> str:
    """Equal on all ranks for equal values, whose `repr` is complete."""
    return hashlib.blake2b(repr(value).encode(), digest_size=6).hexdigest()
