"""The plan of a call: looked up by the call's checked arguments, or built."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from attention import kernels, transports
from attention.agreement import Asked
from attention.call import CallSpec, check_range
from attention.executors import nested_prefixes
from attention.executors.plan import Plan, PlannedStep, part_plan, plan_steps, resized
from attention.geometry.layouts import CuSeqlens, sizes_of
from attention.geometry.options import Options
from attention.geometry.schedules import Problem, Subproblem, masks
from attention.kernels import Call, Kernel
from attention.kernels.patterns import ForPatterns
from attention.kernels.tile_lists import most_at_once
from attention.masks.band import FULL, Band
from attention.masks.mask import Mask, Padded
from attention.masks.pattern import Pattern
from attention.masks.sequences import mask_of, of_sequences
from attention.padding import Padding
from attention.replay import takes_graphs
from attention.tensors import on_host
from attention.variants.base import Variant, takers

if TYPE_CHECKING:
    from attention.api import ContextParallel

MOST_PLANS = 256
MOST_PACKED_PLANS = 64  # plans of packed batches: index tables make them large
MOST_LENGTHS = 9  # of cu_seqlens that an error message shows
NAMES = {"backward": "gradient", "tokens": "queries", "value_dim": "v_head_dim"}  # in messages
UNCOMPARED = ("shape", "kv_tokens", "kv_lengths", "agreement_s")  # which ranks may have different ones of


class Prepared(NamedTuple):
    """A checked call. gradient: whether it may have a backward. scale: its sign is moved into the queries. mask: kept alive, since the key has its identity."""

    plan: Plan
    gradient: bool
    scale: float | None
    padding: Padding | None
    mask: Mask | None


class Plans(dict[CallSpec, Plan]):
    """A function's plans by their calls, and `prepared` calls by keys that are cheap to make: a call is checked once, and a later one
    with an equal key has the same plan. Beyond `MOST_PLANS`, or `MOST_PACKED_PLANS`, the plan of the kind that was used least
    recently is dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.made = 0  # plans so far, also those that are gone
        self.prepared: dict[Hashable, Prepared] = {}

    def add(self, spec: CallSpec, plan: Plan) -> None:
        self.made += 1
        alike = [other for other in self if other.shape.packed == spec.shape.packed]
        if len(alike) >= (MOST_PACKED_PLANS if spec.shape.packed else MOST_PLANS):
            del self[alike[0]]
            self.prepared.clear()
        self[spec] = plan

    def prepare(self, key: Hashable, call: Prepared) -> None:
        if len(self.prepared) >= MOST_PLANS:  # of equal masks, for instance
            self.prepared.clear()
        self.prepared[key] = call


def plan_of(fn: ContextParallel, spec: CallSpec) -> Plan:
    """The plan of a call, one of the function's or new. Raises as `_build` does."""
    decode = fn.variant.decode
    # a decode keeps its plan while the keys grow and lengths change: it is resized, and ranks agree once
    key = replace(spec, cu_seqlens=(), kv_tokens=0, kv_lengths=None) if decode else spec
    plan = fn.plans.get(key)
    if plan is None:
        plan = _build(fn, spec)
        fn.plans.add(key, plan)
    else:  # dropping a plan forgets all prepared calls, so one that is still used comes here before the next is dropped
        fn.plans[key] = fn.plans.pop(key)
    if not decode:
        return plan
    _check_share(fn, spec)
    lengths = spec.kv_lengths
    if isinstance(lengths, Tensor) and "kv_lengths" not in plan.kernel.features:
        lengths = check_range(on_host(lengths), spec.cu_seqlens[-1])
    same = plan.lengths is lengths or (
        isinstance(lengths, tuple) and isinstance(plan.lengths, tuple) and plan.lengths == lengths
    )
    if plan.problem.cu_seqlens != spec.cu_seqlens or not same:
        plan = fn.plans[key] = resized(plan, spec.cu_seqlens, _like(fn, spec), lengths, spec.device)
    return plan


def _build(fn: ContextParallel, spec: CallSpec) -> Plan:
    """A new plan: the schedule bound to this rank, its kernel and its transport. Raises ValueError, UnsupportedCall for what the
    kernel or replay=graphs can't do, and Disagreement where ranks ask for different plans."""
    variant, shape, settings = fn.variant, spec.shape, fn.settings
    mask = _whole_mask(fn, spec)
    _check_padded_lengths(fn, spec, mask)
    options = fn.options.padded(spec.padding)
    problem = variant.problem(_divided(spec), fn.world, mask, options, shape.tokens)
    _check_share(fn, spec)
    fn.options.check(shape.heads, shape.kv_heads, fn.world)
    if variant.decode and shape.backward:
        raise ValueError(f"requires_grad=True: {variant.name} has no backward; call it under no_grad")
    fn.options.check_call(shape.device, fn.world, spec.sinks)
    nested_prefixes.check(fn.options, shape)
    place, head = divmod(fn.rank, problem.ulysses)
    parts = problem.schedule.parts(problem, shape.heads, shape.kv_heads)
    problems = [(_part_spec(spec, c), c.problem, place % c.problem.world) for c in parts] or [(spec, problem, place)]
    bound = [_bound(fn, *of_part) for of_part in problems]
    kernel, steps = bound[0]
    if fn.calls.store is not None:  # before the transport, which is collective
        fn.calls.check(_asked(fn, spec, kernel))
    transport = fn.transport(spec.device)
    # whether one rank's kernel can write into another's memory
    writable = fn.world > 1 and spec.device.type == "cuda" and transport.pulls and shape.dtype != torch.float64
    plan = Plan(
        variant=variant,
        problem=problem,
        rank=place,
        head=head,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        scale=spec.scale,
        packed=shape.packed,
        deterministic=settings.deterministic,
        want_lse=spec.return_lse,
        sinks=spec.sinks,
        kernel=kernel,
        transport=transport,
        options=options.resolved(writable),
        steps=() if parts else steps,
    )
    plan = replace(plan, parts=tuple((c, part_plan(plan, c, *made)) for c, made in zip(parts, bound, strict=False)))
    return replace(plan, graphs=takes_graphs(settings.replay, plan, spec.device))


def _bound(fn: ContextParallel, spec: CallSpec, problem: Problem, place: int) -> tuple[Kernel, tuple[PlannedStep, ...]]:
    """The kernel and the steps of a problem. Raises UnsupportedCall for patterns that the kernel can't do, which differ by rank, so
    ranks agree afterwards."""
    kernel = _kernel(fn, spec, problem)
    steps = plan_steps(problem, place, _like(fn, spec), spec.shape.packed, spec.device)
    if isinstance(kernel, ForPatterns):
        for call in (call for step in steps for call in step.calls):
            kernel.check(call.call)
    return kernel, steps


def _part_spec(spec: CallSpec, part: Subproblem) -> CallSpec:
    tokens = part.fold * part.problem.cu_seqlens[-1] // part.problem.world
    shape = replace(spec.shape, heads=part.heads, kv_heads=part.kv_heads, packed=False, tokens=tokens)
    return replace(spec, shape=shape)


def _like(fn: ContextParallel, spec: CallSpec) -> Call:
    """The settings shared by all kernel calls of a plan."""
    return Call(spec.scale, deterministic=fn.settings.deterministic, softcap=spec.softcap)


def _divided(spec: CallSpec) -> CuSeqlens:
    """The cumulative lengths that the layout divides: with padding the whole is one sequence."""
    return (0, spec.cu_seqlens[-1] + spec.padding) if spec.padding else spec.cu_seqlens


def _whole_mask(fn: ContextParallel, spec: CallSpec) -> Band | Mask:
    """The mask of the call. Padding comes last, so a causal band over one sequence can stay; else the mask becomes `Padded`."""
    other = fn.options.mask if spec.mask is None else spec.mask
    mask = mask_of(Band.of(spec.causal, spec.window), spec.cu_seqlens, other)
    if not spec.padding:
        return mask
    if isinstance(mask, Band):
        stays = len(spec.cu_seqlens) == 2 and mask.right == 0 and not fn.variant.mixes
        if stays and isinstance(fn.variant.form(mask, spec.cu_seqlens), Band):
            return mask
        mask = of_sequences(mask, spec.cu_seqlens)
    return Padded(mask, spec.padding)


def _check_share(fn: ContextParallel, spec: CallSpec) -> None:
    """Raises ValueError unless k has this rank's share of the tokens."""
    lengths = _divided(spec)
    share = sizes_of(fn.padded_layout(spec.padding), lengths, fn.world)[fn.rank]
    if spec.kv_tokens != share:
        raise ValueError(f"k has {spec.kv_tokens} tokens: rank {fn.rank} of {fn.world} holds {share} of {lengths[-1]}")


def _check_padded_lengths(fn: ContextParallel, spec: CallSpec, mask: Band | Mask) -> None:
    """Raises ValueError for padding of a packed batch whose sequences the layout would have to cut, each by itself."""
    variant = fn.variant
    any_padding = variant.any_mask or variant.mixes
    if not spec.padding or any_padding or len(spec.cu_seqlens) == 2 or isinstance(mask, Band):
        return
    try:
        fn.layout.check(spec.cu_seqlens, fn.world)
    except ValueError as error:
        raise ValueError(
            f"cu_seqlens with padding={spec.padding}: {variant.name} pads single sequences, not packed batches, and without "
            f"padding {error}; {takers(mask, _divided(spec)[-1])} take this"
        ) from None


def _kernel(fn: ContextParallel, spec: CallSpec, problem: Problem) -> Kernel:
    """The local kernel. Raises UnsupportedCall if it can't do this call."""
    wanted = fn.settings.kernel
    if problem.is_cut:
        total = problem.cu_seqlens[-1]
        rows = problem.mask.rectangles(total)
        kernel = kernels.select_for_patterns(wanted, spec.shape, masks(problem), most_at_once(rows) <= 1)
        if kernel.refuses(spec.shape, FULL):  # it has no packed calls: all ranks see here whether it can do the mask
            kernel.check(_like(fn, spec).under(Pattern(total, total, rows)))
        return kernel
    return kernels.select(wanted, spec.shape, masks(problem), fn.variant.decode)


def _asked(fn: ContextParallel, spec: CallSpec, kernel: Kernel) -> Asked:
    """What must be equal on all ranks, by field: the settings and the call's arguments."""
    settings = fn.settings
    asked = {**vars(settings), **vars(spec.shape), **vars(spec)} | {
        "kernel": f"{kernel.name} (of {settings.kernel})",
        "transport": transports.resolve(settings.transport, spec.device),
        "device": spec.shape.device,
        "tokens of all ranks": spec.cu_seqlens[-1],
        "mask of make": settings.options.mask,
        "plan of this function": fn.plans.made + 1,
    }
    return {NAMES.get(name, name): _text(value) for name, value in asked.items() if name not in UNCOMPARED}


def _text(value: object) -> str:
    """Equal on all ranks for equal values."""
    if isinstance(value, Mask):
        return f"{value.describe()} (hash {_hash(value)})"
    if isinstance(value, Options):
        return str(value.plain())
    if isinstance(value, tuple) and len(value) > MOST_LENGTHS:
        return f"{len(value) - 1} sequences (hash {_hash(value)})"
    return value.name if isinstance(value, Variant) else str(value).removeprefix("torch.")


def _hash(value: object) -> str:
    """Equal on all ranks for equal values, whose `repr` is complete."""
    return hashlib.blake2b(repr(value).encode(), digest_size=6).hexdigest()
