"""The plan of a call: its schedule bound to one rank and device, with blocks as kernel calls and the messages of each step."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from attention.executors import executor
from attention.geometry.intervals import joined, length
from attention.geometry.layouts import CuSeqlens, ceiled, sizes_of
from attention.geometry.schedules import Problem, Subproblem, steps
from attention.geometry.steps import SEQUENCE, Block, Repeated, Step
from attention.geometry.transfers import Route, step_routes
from attention.gpu.uploads import held, uploaded
from attention.kernels import Call, Kernel
from attention.kernels.interface import KvLengths
from attention.masks.band import Interval, Intervals
from attention.masks.pattern import Pattern
from attention.transports import Transport

if TYPE_CHECKING:
    from attention.variants.base import Variant

T = TypeVar("T")
KeyLengths = tuple[int, ...] | Tensor | None  # a tensor if only the device knows them


@dataclass(frozen=True)
class LocalCall:
    """One kernel call: its queries as intervals of the rank's queries, its keys as intervals of the step's keys."""

    q: Intervals
    k: Intervals
    call: Call


@dataclass(frozen=True)
class PlannedStep:
    """keys: the owner's tokens that the step needs; n_keys: their number. The step on the local KV uses the shard in
    place. most: the largest number of keys that any rank pulls or gathers for its step with this index."""

    owner: int
    keys: Intervals
    n_keys: int
    calls: tuple[LocalCall, ...]
    route: Route
    most: int


@dataclass(frozen=True, eq=False, kw_only=True)
class Plan:
    """rank: this rank's place in the schedule; within an all-to-all, `problem.ulysses` ranks share a place, and `head`
    is this rank's number among them. options: an instance of the class that the executor reads. parts: where the
    call consists of several problems, each with a plan of its own. lengths: in a decode whose batch elements have different numbers of keys, these numbers."""

    variant: Variant[Any]
    problem: Problem
    rank: int
    head: int
    heads: int
    kv_heads: int
    scale: float
    packed: bool
    deterministic: bool = False
    want_lse: bool = False
    sinks: bool = False  # whether calls have sinks
    kernel: Kernel
    transport: Transport
    options: Any
    steps: tuple[PlannedStep, ...] = ()
    parts: tuple[tuple[Any, Plan], ...] = ()
    lengths: KeyLengths = None
    graphs: bool = False  # calls are replayed from CUDA graphs

    @cached_property
    def executor(self) -> Any:
        return executor(self.variant.executor)

    @cached_property
    def derived(self) -> dict[Hashable, Any]:
        """What an executor keeps with the plan, for all calls."""
        return {}

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """What `make` returned when this was first called with `key`."""
        made = self.derived.get(key)
        if made is None:
            made = self.derived[key] = make()
        return made  # type: ignore[no-any-return]

    @property
    def gathers(self) -> bool:
        """Whether the last step has the keys of all ranks."""
        return self.steps[-1].owner == SEQUENCE

    @cached_property
    def moves_queries(self) -> bool:
        """Whether queries lie otherwise in the shards than while they are computed on."""
        return self.gathers and self.problem.layout != self.problem.q_layout

    @cached_property
    def only_call(self) -> Call | None:
        """The call of a plan that is one call of all its queries and all its local KV, of which no rank pulls."""
        if len(self.steps) != 1 or len(self.steps[0].calls) != 1 or self.steps[0].most:
            return None
        (local,), problem = self.steps[0].calls, self.problem
        tokens = sizes_of(problem.layout, problem.cu_seqlens, problem.world)[self.rank]
        return local.call if local.q == local.k == ((0, tokens),) else None

    def takes_whole(self, q: Tensor, k: Tensor) -> bool:
        """Whether the kernel takes the only call as it is, of tensors that fit: its `attend` and `gradients` can be called. The
        first answer holds for all batches but an empty one."""
        whole: bool | None = self.derived.get("whole")
        if whole is None:
            assert self.only_call is not None
            whole = self.derived["whole"] = self.kernel.takes_whole(q, k, self.only_call)
        return whole and q.shape[0] > 0 and not torch.is_autocast_enabled("cuda" if q.is_cuda else "cpu")


def plan_steps(problem: Problem, rank: int, like: Call, packed: bool, device: torch.device) -> tuple[PlannedStep, ...]:
    """The steps of one rank, from its own steps and those of the ranks that read its keys. like: a call with the settings
    that all calls share."""
    planned = []
    most, routes = problem.schedule.most_keys(problem), step_routes(problem, rank)
    known: dict[int, tuple[LocalCall, ...]] = {}  # most steps of a ring share their blocks
    for i, step in enumerate(steps(problem, rank)):
        alike = id(step.blocks)
        if alike not in known:
            known[alike] = tuple(_calls(step, like, packed, device))
        planned.append(PlannedStep(step.owner, step.keys, length(step.keys), known[alike], routes[i], most[i]))
    return tuple(planned)


def part_plan(plan: Plan, part: Subproblem, kernel: Kernel, steps: tuple[PlannedStep, ...]) -> Plan:
    """The plan of one of the problems that a call consists of."""
    return replace(
        plan,
        problem=part.problem,
        rank=plan.rank % part.problem.world,
        packed=False,
        want_lse=True,
        sinks=False,
        kernel=kernel,
        steps=steps,
    )


def resized(plan: Plan, cu_seqlens: CuSeqlens, like: Call, lengths: KeyLengths, device: torch.device) -> Plan:
    """A decode's plan for another number of keys. like: as in `plan_steps`. lengths: as in `Plan`."""
    total, ends = cu_seqlens[-1], None
    if isinstance(lengths, Tensor):  # only the device knows them
        ends, tensor = (0, total), lengths
    elif lengths is not None:
        there = device if "kv_lengths" in plan.kernel.features else torch.device("cpu")
        ends, tensor = (min(filter(None, lengths), default=0), max(lengths)), held(_uploaded(lengths, there), there)
    problem = replace(plan.problem, cu_seqlens=cu_seqlens, ends=ends)
    planned = plan_steps(problem, plan.rank, like, False, device)
    if ends is not None:
        planned = tuple(_of_lengths(step, problem, tensor) for step in planned)
    return replace(plan, problem=problem, steps=planned, lengths=lengths)


def _of_lengths(step: PlannedStep, problem: Problem, lengths: Tensor) -> PlannedStep:
    """A decode's step whose call reads the number of keys of each batch element."""
    if not step.calls:
        return step
    (local,), ((first, _),), total = step.calls, step.keys, problem.cu_seqlens[-1]
    before = ceiled(total, problem.world, step.owner).start
    call = replace(local.call, lengths=KvLengths(lengths, before + first, total))
    return replace(step, calls=(replace(local, call=call),))


@lru_cache(maxsize=16)
def _uploaded(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """Cached, because all layers of a model pass the same lengths."""
    return uploaded(np.array(lengths, np.int32), device)


def _calls(step: Step, like: Call, packed: bool, device: torch.device) -> Iterator[LocalCall]:
    """Under a pattern, or in a dense batch: one call for each block. In a packed batch: one call over all sequences for all
    blocks with the same mask and group."""
    blocks, kinds = step.blocks, list[tuple[Any, list[Interval], list[Interval]]]()
    if isinstance(blocks, Repeated):
        kinds = [(b.mask, blocks.slices(b.q), blocks.slices(b.k)) for b in blocks.unit]
    elif not packed or (blocks and isinstance(blocks[0].mask, Pattern)):
        yield from (LocalCall((b.q,), step.where([b.k]), like.under(b.mask)) for b in blocks)
        return
    else:
        alike: dict[tuple[int, int], list[Block]] = {}
        for block in blocks:
            alike.setdefault((id(block.mask), block.group), []).append(block)  # equal bands of a step are one object
        kinds = [(b[0].mask, [x.q for x in b], [x.k for x in b]) for b in alike.values()]
    for mask, q, k in kinds:
        call = like.of_packed(mask, [b - a for a, b in q], [b - a for a, b in k], device)
        yield LocalCall(joined(q), step.where(k), call)
