"""What a call does on one rank, found by running its executor on tensors without data (device "meta"): no process group, no
GPU. The kernel counts, the transport records, and every tensor is followed until it is freed."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache, partial
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
from attention.geometry.options import HeadCount, Options
from attention.geometry.schedules import Problem
from attention.gpu.streams import Inline
from attention.kernels.interface import Call, Into, Kernel, Pair, Tensors, Triple
from attention.kernels.scratch import backward_scratch
from attention.masks.band import FULL, Band, Intervals
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


@lru_cache(maxsize=256)
def dry_run(
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
    """The forward of a rank, and with `backward` its backward. pulls: over a transport that brings each rank only the keys it needs,
    where others gather all for every rank unless there is a window; packed: the tensors are a packed batch; kernel: whose scratch
    memory counts, "" for none. Raises KeyError for an external package."""
    kv_heads, ratio = options.computed(HeadCount(shapes.kv_heads, shapes.heads // shapes.kv_heads), problem.ranks)
    shapes = replace(shapes, heads=kv_heads * ratio, kv_heads=kv_heads)
    held = sizes_of(variant.border(problem.ranks, options), problem.cu_seqlens, problem.ranks)[rank]
    n = held if problem.q_tokens is None else problem.q_tokens

    def tensor(tokens: int, heads: int, dim: int) -> Tensor:
        shape = (tokens, heads, dim) if packed else (shapes.batch, tokens, heads, dim)
        return torch.empty(shape, dtype=DTYPES[shapes.itemsize], device=META)

    q, k = tensor(n, shapes.heads, shapes.head_dim), tensor(held, shapes.kv_heads, shapes.head_dim)
    v, dout = tensor(held, shapes.kv_heads, shapes.v_head_dim), tensor(n, shapes.heads, shapes.v_head_dim)
    log, ways = _Log((q, k, v, dout)), options.resolved(False)
    if getattr(ways, "grouping", None) == "fused":
        # the one kernel does the work of these calls, and takes no tensors without data
        ways = replace(ways, grouping="separate")  # type: ignore[call-arg]
    transport = Transport() if problem.ranks == 1 else _Recording(log, problem.ranks, pulls)
    place, head = divmod(rank, problem.ulysses)
    like, parts = Call(shapes.head_dim**-0.5), problem.schedule.parts(problem, shapes.heads, shapes.kv_heads)
    steps, log.times = _once(() if parts else plan_steps(problem, place, like, packed, META), place)
    plan = Plan(
        variant=variant,
        problem=problem,
        rank=place,
        head=head,
        heads=shapes.heads,
        kv_heads=shapes.kv_heads,
        scale=like.scale,
        packed=packed,
        kernel=_Kernel(log, kernel),
        transport=transport,
        options=ways,
        steps=steps,
    )
    of_parts = ((c, plan_steps(c.problem, place % c.problem.world, like, False, META)) for c in parts)
    plan = replace(plan, parts=tuple((c, part_plan(plan, c, plan.kernel, steps)) for c, steps in of_parts))
    run = executor(variant.executor)
    recorder = profiling.Recorder(META)
    recorder.span = log.span  # type: ignore[assignment]
    passes = []
    with torch.no_grad(), profiling.recording(recorder), log:
        result = run.forward(q, k, v, plan, None)
        passes.append(log.ended())
        if backward:
            gradients = run.backward(dout, result[2], plan)  # noqa: F841  # held until the pass has ended
            passes.append(log.ended())
    return tuple(passes)


def _once(steps: Sequence[PlannedStep], rank: int) -> tuple[tuple[PlannedStep, ...], list[int]]:
    """The steps, of many equal ones in a row a few, and how many each stands for."""
    kept: list[PlannedStep] = []
    times: list[int] = []

    def form(step: PlannedStep) -> object:
        calls = [(x.q, x.k, x.call.mask, x.call.pattern, x.call.q_lengths, x.call.k_lengths) for x in step.calls]
        sides = step.route.sends, step.route.receives
        pieces = [[(length(x.target), len(x.source), len(x.target)) for x in side] for side in sides]
        return step.owner == rank, calls, step.n_keys, step.most, pieces

    for _, equal in groupby(steps, key=form):
        row = list(equal)
        more = max(0, len(row) - KEPT)
        first = KEPT // 2
        kept += row[:first] + row[first + more :]
        times += [1 + more * (i == 1) for i in range(len(row) - more)]
    return tuple(kept), times


class _Log(TorchDispatchMode):
    """Records a pass: its events, the bytes that it receives, and the storages from when they are made until they are freed."""

    def __init__(self, inputs: Sequence[Tensor]):
        super().__init__()
        self.events: list[Event] = []
        self.received: Counter[str] = Counter()
        self.slots: dict[str, int] = {}  # bytes of symmetric memory, by what is published
        self.times: list[int] = []  # how many steps of the ring each one stands for
        self.phases = [("", NO_STEP)]
        self.paused = False  # tensors that are made now lie in a slot
        self.moved: tuple[str, int] | None = None  # counted, but not issued: a kernel moves it
        self.live = self.peak = 0
        storages = [x.untyped_storage() for x in inputs]
        self.known: dict[int, object] = {x._cdata: x for x in storages}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # PyTorch would import its compiler to keep it out of this mode

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

    def pull(self, pattern: Pattern, what: str, step: int, sources: Mapping[int, int]) -> Event:
        """What was counted last starts to move."""
        _, size = self.moved or ("", 0)
        self.moved = None
        event = self.add("pull", (what, step), transfer=Transfer(pattern, size, tuple(sources.items())))
        self.received[what] += event.times * size
        return event

    @contextmanager
    def span(self, name: str, step: int) -> Iterator[None]:
        self.phases.append((name, step))
        yield
        self.phases.pop()

    def ended(self) -> Pass:
        if self.moved:
            transfer = self.pull("slots", self.moved[0], NO_STEP, {}).transfer
            self.add("wait", transfer=transfer)
        made = Pass(tuple(self.events), self.received, self.peak, sum(self.slots.values()))
        self.events, self.received, self.peak = [], Counter(), self.live
        return made

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = _shaped(func, args, kwargs or {})
        if func.is_view:
            return result
        results = [x for x in _flat([result]) if isinstance(x, Tensor)]
        if any(x.dtype in INDICES for x in results):
            return result
        if "empty" not in func.__name__:
            read = [x for x in _flat(args) if isinstance(x, Tensor)]
            new = sum(x.nbytes for x in results if all(x is not y for y in read))
            indexed = func is torch.ops.aten.index_select.default
            self.copied(new + (new if indexed else sum(x.nbytes for x in read)))
        if not self.paused:
            for x in results:
                self._follow(x.untyped_storage())
        return result

    def _follow(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self.known:
            self.live += size
            self.peak = max(self.peak, self.live)
            self.known[key] = weakref.ref(storage, partial(self._freed, key, size))

    def _freed(self, key: int, size: int, _: object) -> None:
        self.live -= size
        del self.known[key]


def _shaped(func: Any, args: Any, kwargs: Any) -> Any:
    """What the operation gives. A large world has millions of copies and joins, whose own code takes longer than all else."""
    if func is torch.ops.aten.copy_.default:
        return args[0]
    if func is torch.ops.aten.cat.default:
        (first, *_), dim = args[0], args[1] if len(args) > 1 else 0
        shape = list(first.shape)
        shape[dim] = sum(x.shape[dim] for x in args[0])
        return first.new_empty(shape)
    return func(*args, **kwargs)


def _flat(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        yield from value if isinstance(value, (tuple, list)) else (value,)


class _Kernel(Kernel):
    """Counts its calls. Holds the scratch memory of the kernel `name` while it runs."""

    summary = "counts its calls"
    writes = True

    def __init__(self, log: _Log, name: str):
        self.log, self.name = log, name

    def _count(self, q: Tensor, k: Tensor, v: Tensor, call: Call, flops: Callable[[Shapes, int], int]) -> None:
        sequences = call.sequences(q.shape[-3], k.shape[-3])
        pattern, mask = call.pattern, call.mask
        pairs = pattern.pairs(*sequences[0]) if pattern else sum(mask.pairs(*lengths) for lengths in sequences)
        shapes = Shapes(len(q) if q.dim() == 4 else 1, q.shape[-2], k.shape[-2], q.shape[-1], q.itemsize, v.shape[-1])
        self.log.add(
            "kernel",
            flops=flops(shapes, pairs),
            mask=mask,
            pairs=pairs,
            rectangle=sum(a * b for a, b in sequences),
            edges=0 if pattern else mask.edges * sum(a for a, _ in sequences),
            kv_bytes=k.nbytes + v.nbytes,
        )

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


class _Recording(Collective):
    """gloo or NCCL, whose own code runs but for its queue; with `pulls`, symm, where what is published lies in slots outside of
    PyTorch's memory."""

    def __init__(self, log: _Log, world: int, pulls: bool):
        Transport.__init__(self)
        self.name, self.group, self.world, self.log, self.pulls = "symm" if pulls else "nccl", None, world, log, pulls
        self.queue: Any = self
        self.priority_stream = Inline(apart=pulls)
        self.sources: Counter[int] = Counter()  # bytes that come with the next pull, by rank
        self.filling: dict[str, list[int]] = {}  # identities of tensors in slots

    def counted(self, what: str, size: int) -> None:
        self.log.moved = what, size

    def issue(
        self,
        run: Callable[[], object] | None,
        tensors: Sequence[Tensor],
        what: str,
        step: int,
        after: Callable[[], object] | None = None,
    ) -> Handle:
        """Runs nothing. What it moves has been counted before."""
        collective: Pattern = "gather" if what == "kv" else "reduce"
        pattern: Pattern = "all" if len(self.sources) > 1 else "one" if self.sources else collective
        event = self.log.pull(pattern, what, step, self.sources)
        self.sources = Counter()
        return _Transfer(self.log, event, tensors, after)

    def join(self) -> None: ...

    def _reserve(self, what: str, shapes: Sequence[Sequence[int]], tokens: int, dtype: torch.dtype) -> None:
        size = arrange(tuple(map(tuple, shapes)), tokens, dtype).size * DEPTHS.get(what, 1)
        self.log.slots[what] = max(size, self.log.slots.get(what, 0))

    def buffers(self, what: str, shapes: Sequence[Sequence[int]], like: Tensor, tokens: int) -> list[Tensor]:
        if self.pulls:
            self._reserve(what, shapes, tokens, like.dtype)
            self.log.paused = True
        buffers = super().buffers(what, shapes, like, tokens)
        self.log.paused = False
        self.filling[what] = list(map(id, buffers))
        return buffers

    def publish(
        self, what: str, tensors: Sequence[Tensor], tokens: int | None = None, pulled: Intervals | None = None
    ) -> Publication:
        if not self.pulls:
            return _Publication(self, what, super().publish(what, tensors, tokens))
        if self.filling.pop(what, []) != list(map(id, tensors)):
            most = max(x.shape[-3] for x in tensors) if tokens is None else tokens
            self._reserve(what, [x.shape for x in tensors], most, tensors[0].dtype)
            share = 1.0 if pulled is None else length(pulled) / max(1, tensors[0].shape[-3])
            self.log.copied(int(2 * share * sum(x.nbytes for x in tensors)))
        return _Publication(self, what)


@dataclass
class _Transfer(Handle):
    """Holds the tensors that move until it is waited for."""

    log: _Log
    pull: Event
    tensors: Sequence[Tensor]
    after: Callable[[], object] | None

    def wait(self) -> None:
        self.log.add("wait", times=self.pull.times, transfer=self.pull.transfer)
        after, self.tensors, self.after = self.after, (), None
        if after is not None:
            after()


@dataclass
class _Publication(Publication):
    """Records who sends what is pulled. sent: where its owner sends it."""

    transport: _Recording
    what: str
    sent: Publication | None = None

    def pull(self, messages: Messages, into: Sequence[Tensor], step: int, early: bool = False) -> Handle:
        transport = self.transport
        for m in messages.receives:
            x = into[m.into]
            transport.sources[m.remote] += x.nbytes // max(1, x.shape[-3]) * length(m.target)
        if self.sent is not None:
            return self.sent.pull(messages, into, step, early)
        if not messages.receives:
            return Handle()
        transport.counted(self.what, transport.sources.total())
        return transport.issue(None, into, self.what, step)
