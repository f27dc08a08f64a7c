"""What a call does on one rank, found by running its executor on tensors without data (device "meta"): no process group, no
GPU. The kernel counts, the transport records, and every tensor is followed until it is freed."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from attention import profiling
from attention.executors import executor
from attention.executors.plan import Plan, PlannedStep, part_plan, plan_steps
from attention.geometry.counts import Shapes, backward_flops, forward_flops
from attention.geometry.intervals import length
from attention.geometry.layouts import sizes_of
from attention.geometry.options import Options
from attention.geometry.schedules import Problem
from attention.gpu.streams import Inline
from attention.kernels.interface import Call, Into, Kernel, Pair, Tensors, Triple
from attention.kernels.scratch import backward_scratch
from attention.masks.band import FULL, Band
from attention.profiling import NO_STEP
from attention.tensors import dense_like, empty_lse, result_like
from attention.transports.collective import Collective
from attention.transports.interface import Handle, Messages, Publication, Transport
from attention.transports.symmetric import DEPTHS, arrange
from attention.variants.base import Variant
from runner.costs.topology import Pattern, Transfer

META = torch.device("meta")
DTYPES = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}  # by bytes of an element
INDICES = (torch.int32, torch.int64)  # dtypes of tables that calls share
RING = ("kv", "dkv", "comp_block", "comp_merge")  # phases that a ring numbers by its steps
KEPT = 4  # of a row of equal steps: two at its beginning, two at its end


@dataclass(eq=False)
class Event:
    """kind: kernel, pull, wait, or copy (of merges and sums too). times: how many equal ones it stands for. bytes: read and written by
    a copy. transfer: what a pull starts to bring; the same object is waited for."""

    kind: str
    phase: str
    times: int = 1
    bytes: int = 0
    flops: int = 0
    transfer: Transfer | None = None
    mask: Band = FULL
    pairs: int = 0  # of a kernel's batch element and head: attended, ...
    rectangle: int = 0  # ... all in the rectangles of its sequences, ...
    edges: int = 0  # ... and how many queries lie on the mask's edges
    kv_bytes: int = 0


@dataclass(frozen=True)
class Pass:
    """A forward or a backward. live: the most bytes that tensors hold beside the inputs; slots: those of symmetric memory, which
    outlives the pass. received: bytes by what moves, as the phases name it."""

    events: tuple[Event, ...]
    received: Counter[str]
    live: int
    slots: int

    @property
    def flops(self) -> int:
        return sum(e.times * e.flops for e in self.events)

    @property
    def peak(self) -> int:
        return self.live + self.slots


def dry_run(
    variant: Variant[Any],
    problem: Problem,
    shapes: Shapes,
    options: Options | Mapping[str, Any] | None = None,
    **call: Any,
) -> tuple[Pass, ...]:
    """The forward of a rank, and with `backward` its backward. call: rank; pulls: over a transport that brings each rank only the keys
    it needs, where others gather all for every rank unless there is a window; packed: the tensors are a packed batch; kernel: whose
    scratch memory counts, "" for none. Raises KeyError for an external package."""
    return _dry_run(variant, problem, shapes, variant.parse(options), **call)


@lru_cache(maxsize=256)
def _dry_run(
    variant: Variant[Any],
    problem: Problem,
    shapes: Shapes,
    options: Options,
    *,
    rank: int,
    pulls: bool = False,
    packed: bool = False,
    backward: bool = False,
    kernel: str = "",
) -> tuple[Pass, ...]:
    log = _Log()
    transport = _transport(log, problem, pulls)
    plan = _plan(variant, problem, shapes, options, rank, packed, _Kernel(log, kernel), transport)
    steps, log.times = _once(plan.steps, plan.rank)
    plan = replace(plan, steps=steps)
    held = sizes_of(variant.border(problem.ranks, options), problem.cu_seqlens, problem.ranks)[rank]
    n = held if problem.q_tokens is None else problem.q_tokens

    def tensor(tokens: int, heads: int, dim: int) -> Tensor:
        shape = (tokens, heads, dim) if packed else (shapes.batch, tokens, heads, dim)
        return torch.empty(shape, dtype=DTYPES[shapes.itemsize], device=META)

    q, k = tensor(n, shapes.heads, shapes.head_dim), tensor(held, shapes.kv_heads, shapes.head_dim)
    v, dout = tensor(held, shapes.kv_heads, shapes.v_head_dim), tensor(n, shapes.heads, shapes.v_head_dim)
    run, memory = executor(variant.executor), _Memory(log, (q, k, v, dout))
    recorder = profiling.Recorder(META)
    recorder.span = log.span  # type: ignore[assignment]
    passes = []
    with torch.no_grad(), profiling.recording(recorder), memory:
        result = run.forward(q, k, v, plan, None)
        passes.append(log.ended(memory, transport))
        if backward:
            gradients = run.backward(dout, result[2], plan)  # noqa: F841  # held until the pass has ended
            passes.append(log.ended(memory, transport))
    return tuple(passes)


def _plan(
    variant: Variant[Any],
    problem: Problem,
    shapes: Shapes,
    options: Options,
    rank: int,
    packed: bool,
    kernel: Any,
    transport: Transport,
) -> Plan:
    place, head = divmod(rank, problem.ulysses)
    like, parts = Call(shapes.head_dim**-0.5), problem.schedule.parts(problem, shapes.heads, shapes.kv_heads)
    plan = Plan(
        variant=variant,
        problem=problem,
        rank=place,
        head=head,
        heads=shapes.heads,
        kv_heads=shapes.kv_heads,
        scale=like.scale,
        packed=packed,
        kernel=kernel,
        transport=transport,
        options=options.resolved(False),
        steps=() if parts else plan_steps(problem, place, like, packed, META),
    )
    steps = (plan_steps(c.problem, place % c.problem.world, like, False, META) for c in parts)
    of_parts = (part_plan(plan, c, kernel, x) for c, x in zip(parts, steps, strict=True))
    return replace(plan, parts=tuple(zip(parts, of_parts, strict=True)))


def _once(steps: Sequence[PlannedStep], rank: int) -> tuple[tuple[PlannedStep, ...], list[int]]:
    """The steps, of many equal ones in a row a few, and how many each stands for."""
    kept: list[PlannedStep] = []
    times: list[int] = []

    def form(step: PlannedStep) -> object:
        calls = [(x.q, x.k, x.call.mask, x.call.pattern, x.call.q_lengths, x.call.k_lengths) for x in step.calls]
        pieces = (step.route.sends, step.route.receives)
        ends = [[(length(x.target), len(x.source), len(x.target)) for x in side] for side in pieces]
        return step.owner == rank, calls, step.n_keys, step.most, ends

    for _, equal in groupby(steps, key=form):
        row = list(equal)
        few = row if len(row) <= KEPT else [*row[: KEPT // 2], *row[-(KEPT // 2) :]]
        kept += few
        times += [1, 1 + len(row) - len(few), *[1] * (len(few) - 2)][: len(few)]
    return tuple(kept), times


class _Log:
    def __init__(self) -> None:
        self.events: list[Event] = []
        self.received: Counter[str] = Counter()
        self.times: list[int] = []  # how many steps of the ring each one stands for
        self.phases = [("", NO_STEP)]
        self.paused = False  # tensors that are made now lie in a slot

    def add(self, kind: str, phase: tuple[str, int] | None = None, **more: Any) -> Event:
        name, step = phase or self.phases[-1]
        more.setdefault("times", self.times[step] if name in RING and 0 <= step < len(self.times) else 1)
        self.events.append(Event(kind, name, **more))
        return self.events[-1]

    def copied(self, size: int) -> None:
        """Copies of one phase in a row are one launch."""
        last = self.events[-1] if self.events else None
        if last is not None and last.kind == "copy" and last.phase == self.phases[-1][0]:
            last.bytes += size
        else:
            self.add("copy", bytes=size)

    @contextmanager
    def span(self, name: str, step: int) -> Iterator[None]:
        self.phases.append((name, step))
        yield
        self.phases.pop()

    def ended(self, memory: _Memory, transport: Transport) -> Pass:
        slots = 0
        if isinstance(transport, _Sending):
            if transport.moved:  # by a kernel that waits for it
                transport.issue(None, (), transport.what, NO_STEP).wait()
            slots = sum(size * DEPTHS.get(what, 1) for what, size in transport.capacity.items())
        made = Pass(tuple(self.events), self.received, memory.peak, slots)
        self.events, self.received, memory.peak = [], Counter(), memory.live
        return made


class _Kernel(Kernel):
    """Counts its calls. Holds the scratch memory of the kernel `name` while it runs."""

    summary = "counts its calls"
    writes = True

    def __init__(self, log: _Log, name: str):
        self.log, self.name = log, name

    def _count(self, q: Tensor, k: Tensor, v: Tensor, call: Call, flops: Callable[[Shapes, int], int]) -> None:
        batch, lengths = len(q) if q.dim() == 4 else 1, [(q.shape[-3], k.shape[-3])]
        if call.q_lengths is not None and call.k_lengths is not None:
            batch, lengths = 1, list(zip(call.q_lengths, call.k_lengths, strict=True))
        pairs = call.pattern.pairs(*lengths[0]) if call.pattern else sum(call.mask.pairs(a, b) for a, b in lengths)
        edges = 0 if call.pattern else call.mask.edges * sum(a for a, _ in lengths)
        shapes = Shapes(batch, q.shape[-2], k.shape[-2], q.shape[-1], q.itemsize, v.shape[-1])
        rectangle = sum(a * b for a, b in lengths)
        self.log.add(
            "kernel", flops=flops(shapes, pairs), mask=call.mask, pairs=pairs, rectangle=rectangle, edges=edges,
            kv_bytes=k.nbytes + v.nbytes
        )  # fmt: skip

    def attend(self, tensors: Tensors, call: Call, into: Pair | None = None) -> Pair:
        q, k, v = tensors
        self._count(q, k, v, call, forward_flops)
        return into or (dense_like(result_like(q, v)), empty_lse(q))

    def gradients(self, tensors: Tensors, call: Call, into: Into = None) -> Triple:
        _, q, k, v, *_ = tensors
        self._count(q, k, v, call, backward_flops)
        results = into or (dense_like(q), dense_like(k), dense_like(v))
        q.new_empty(backward_scratch(self.name, q, k, v), dtype=torch.uint8)
        return results


def _transport(log: _Log, problem: Problem, pulls: bool) -> Transport:
    if problem.ranks == 1:
        return Transport()
    return _Pulling(log, problem.ranks) if pulls else _Sending(log, problem.ranks)


class _Transfer(Handle):
    """Holds the tensors that move until it is waited for."""

    def __init__(self, log: _Log, event: Event, tensors: Sequence[Tensor], after: Callable[[], object] | None):
        self.log, self.pull, self.tensors, self.after = log, event, tensors, after

    def wait(self) -> None:
        self.log.add("wait", times=self.pull.times, transfer=self.pull.transfer)
        self.tensors = ()
        if self.after is not None:
            self.after()
            self.after = None


class _Sending(Collective):
    """gloo or NCCL, whose own code runs but for its queue."""

    def __init__(self, log: _Log, world: int):
        Transport.__init__(self)
        self.name, self.group, self.world, self.log = "nccl", None, world, log
        self.queue: Any = self
        self.what, self.moved, self.sources = "", 0, dict[int, int]()
        self.capacity: dict[str, int] = {}  # of slots, by what is published

    def counted(self, what: str, size: int) -> None:
        self.what, self.moved = what, self.moved + size

    def issue(
        self,
        run: Callable[[], object] | None,
        tensors: Sequence[Tensor],
        what: str,
        step: int,
        after: Callable[[], object] | None = None,
    ) -> Handle:
        """Runs nothing. What it moves has been counted before."""
        if self.sources:
            pattern: Pattern = "one" if len(self.sources) == 1 else "all"
        else:
            pattern = "slots" if step == NO_STEP else "gather" if what == "kv" else "reduce"
        transfer = Transfer(pattern, self.moved, tuple(self.sources.items()))
        event = self.log.add("pull", (what, step), transfer=transfer)
        self.log.received[what] += event.times * self.moved
        self.moved, self.sources = 0, {}
        return _Transfer(self.log, event, tensors, after)

    def join(self) -> None: ...

    def publish(self, what: str, tensors: Sequence[Tensor], tokens: int | None = None) -> Publication:
        return _Publication(self, super().publish(what, tensors, tokens))


@dataclass
class _Publication(Publication):
    """Records who sends what is pulled."""

    transport: _Sending
    sent: Any

    def pull(self, messages: Messages, into: Sequence[Tensor], step: int, early: bool = False) -> Handle:
        sources: Counter[int] = Counter()
        for m in messages.receives:
            x = into[m.into]
            sources[m.remote] += x.nbytes // max(1, x.shape[-3]) * length(m.target)
        self.transport.sources = sources
        return self.sent.pull(messages, into, step, early)

    def close(self) -> None: ...


class _Pulling(_Sending):
    """symm: what is published lies in slots outside of PyTorch's memory."""

    pulls, priority_stream = True, Inline(apart=True)

    def __init__(self, log: _Log, world: int):
        super().__init__(log, world)
        self.name = "symm"
        self.filling: dict[str, list[Tensor]] = {}

    def _reserve(self, what: str, shapes: Sequence[Sequence[int]], tokens: int, dtype: torch.dtype) -> None:
        size = arrange(tuple(map(tuple, shapes)), tokens, dtype).size
        self.capacity[what] = max(size, self.capacity.get(what, 0))

    def buffers(self, what: str, shapes: Sequence[Sequence[int]], like: Tensor, tokens: int) -> list[Tensor]:
        self._reserve(what, shapes, tokens, like.dtype)
        self.log.paused = True
        self.filling[what] = super().buffers(what, shapes, like, tokens)
        self.log.paused = False
        return self.filling[what]

    def publish(self, what: str, tensors: Sequence[Tensor], tokens: int | None = None) -> Publication:
        if list(map(id, self.filling.pop(what, []))) != list(map(id, tensors)):
            most = max(x.shape[-3] for x in tensors) if tokens is None else tokens
            self._reserve(what, [x.shape for x in tensors], most, tensors[0].dtype)
            self.log.copied(2 * sum(x.nbytes for x in tensors))
        return _Publication(self, _Slot(self, what))


@dataclass
class _Slot(Publication):
    transport: _Pulling
    what: str

    def pull(self, messages: Messages, into: Sequence[Tensor], step: int, early: bool = False) -> Handle:
        if not messages.receives:
            return Handle()
        transport = self.transport
        transport.moved = sum(transport.sources.values())
        return transport.issue(None, into, self.what, step)


class _Memory(TorchDispatchMode):
    """Follows storages from when they are made until they are freed, and logs what is read and written."""

    def __init__(self, log: _Log, inputs: Sequence[Tensor]):
        super().__init__()
        self.log, self.live, self.peak = log, 0, 0
        self.inputs = [x.untyped_storage() for x in inputs]
        self.known: dict[int, object] = {x._cdata: x for x in self.inputs}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # PyTorch would import its compiler to keep it out of this mode

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        results = [x for x in (result if isinstance(result, (tuple, list)) else (result,)) if isinstance(x, Tensor)]
        if func.is_view or any(x.dtype in INDICES for x in results):
            return result
        if "empty" not in func.__name__:
            self.log.copied(_moved(func, args, results))
        if not self.log.paused:
            for x in results:
                self._follow(x.untyped_storage())
        return result

    def _follow(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self.known:
            return
        self.live += size
        self.peak = max(self.peak, self.live)

        def freed(_: object) -> None:
            self.live -= size
            del self.known[key]

        self.known[key] = weakref.ref(storage, freed)


def _moved(func: Any, args: Sequence[Any], results: Iterable[Tensor]) -> int:
    """Bytes that an operation reads and writes."""
    tensors = [x for arg in args for x in (arg if isinstance(arg, (tuple, list)) else (arg,)) if isinstance(x, Tensor)]
    new = sum(x.nbytes for x in results if all(x is not y for y in tensors))
    if func is torch.ops.aten.index_select.default:
        return 2 * new
    return new + sum(x.nbytes for x in tensors)
