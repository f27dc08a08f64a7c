"""`auto`: which variant, options and transport a problem should take, by an estimate of every candidate's time from the
costs and from what kernels (`rates.csv`) and links (`links.csv`) were measured to do. Pure Python; what is known of the
machine comes in as a `Machine`.

The model of a pass on a rank: its kernel calls at their measured rate, what of the communication its executor leaves
exposed, and the merges at the rate of memory; and what the host needs to issue all that, where it is not much less. The
slowest rank counts. It is meant to order candidates, not to predict milliseconds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any

from attention.geometry import costs
from attention.geometry.costs import Shapes
from attention.geometry.layouts import CuSeqlens
from attention.geometry.merge_plan import passes
from attention.geometry.options import check_heads
from attention.geometry.schedules import Problem, Step, length, masks, steps, union
from attention.geometry.transfers import Intervals, gather_move, packed_calls, step_route
from attention.masks.band import Mask
from attention.measured import links, rates
from attention.measured.links import Link, Measured
from attention.measured.rates import LONG, Rate, Speed
from attention.variants.base import Variant
from attention.variants.registry import VARIANTS

AUTO = "auto"
OPTIONS: dict[str, Any] = {"memory_gb": None, "trials": None}  # of attention=auto itself
SUMMARY = "the variant, its options and the transport that the measured rates of this machine make the fastest"
REPLAYED_WORTH = 1.05  # a replay counts as so much longer, for the memory that it keeps
MERGE_SHARE = 0.7  # of a copy's bandwidth that a merge or sum reaches, with what it costs the kernels around it
# of it that a replayed pass's copies reach, by a script that is not kept (docs/performance.md)
COPY_SHARE = 0.85
# of a call's tail, what another call beside it fills where tokens are few; nothing at costs.APART, where a GPU is at its power
# limit: by scripts that are not kept (docs/performance.md)
APART_FILLS = 0.6
TILE = 128  # queries, or backward keys, that a unit does at a time
PACK_US = 400.0  # grouping=packed: the call's lengths go to the device anew, by the measured grouped runs
RANKS = 8  # of a larger world, so many are looked at


@dataclass(frozen=True)
class Task:
    """What is to be computed, of the whole world. `cu_seqlens` are global, (0, S) for a batch of single sequences;
    `packed`: the tensors are packed; `q_tokens`: of a decode."""

    cu_seqlens: CuSeqlens
    world: int
    mask: Mask
    shapes: Shapes
    packed: bool = False
    backward: bool = True
    q_tokens: int | None = None

    @property
    def decode(self) -> bool:
        return self.q_tokens is not None


Both = tuple[float, float]  # forward and backward


@dataclass(frozen=True)
class Launched:
    """Microseconds of the host, forward and backward: for a pass itself, to issue each of its kernel calls with what merges its
    result, and each fetch or offer."""

    whole: Both = (0, 0)
    call: Both = (0, 0)
    exchange: float = 0


@dataclass(frozen=True)
class Overheads:
    """Microseconds, forward and backward. `call`, `merge`: what a kernel's launch and tail leave a GPU idle. Of Python and
    launches: a pass that is `run`, one that is `played` (`tape`), a `decode` with its call, and one of its collective
    operations, a `reduction`."""

    call: Both
    merge: float
    run: Launched = field(default_factory=Launched)
    played: Launched = field(default_factory=Launched)
    decode: float = 0
    reduction: float = 0
    units: int = 0  # that compute a tile each at a time


# cuda: the GPU's from zigzag_llama3 with heads_k_stride 8 to 1 on 4 H200, whose compute and bytes are the same; the host's
# from 2048 tokens a GPU on 2, hosts that differ by a third; a decode's from h200-x4/tree_scaling
OVERHEADS = {
    "cuda": Overheads(
        call=(10, 60),
        merge=10,
        run=Launched((300, 600), (75, 125), 100),
        played=Launched((20, 280), (75, 90), 20),
        decode=200,
        reduction=350,
        units=132,
    ),
    "cpu": Overheads((20, 20), 20),
}


@dataclass(frozen=True)
class Ceilings:
    """What an unmeasured machine is taken to do: TFLOP/s of attention, GB/s of a copy (read plus written), and its link
    for every pattern. `source` says where that is from."""

    tflops: float
    copy_gb_s: float
    link: Link
    source: str = "defaults"


KERNEL_SHARE = 0.8  # of the matrix product rate that a good attention kernel reaches: 672 of 793 on an H200
DEFAULTS = {
    "cuda": Ceilings(300, 2000, Link(100, 50, 0.1)),
    "cpu": Ceilings(0.1, 10, Link(1, 300)),
}


def ceilings(measured: Mapping[str, float], device: str) -> Ceilings:
    """From a machine's measured `matmul_tflops`, `copy_gb_s` and, of a world of several, `link_gb_s`."""
    usual = DEFAULTS[device].link
    link = replace(usual, gb_s=measured.get("link_gb_s", usual.gb_s))
    return Ceilings(measured["matmul_tflops"] * KERNEL_SHARE, measured["copy_gb_s"], link, "this machine's ceilings")


KernelOf = Callable[[tuple[Mask, ...]], str]


@dataclass(frozen=True)
class Machine:
    """`gpu`: its name in the tables, empty for a CPU. `kernel`: which kernel does all of these masks; raises ValueError
    where none does. `transports` that work here; `memory`: bytes that a rank may hold beside its inputs."""

    gpu: str
    kernel: KernelOf
    transports: tuple[str, ...]
    rates: tuple[Rate, ...] = ()
    links: tuple[Measured, ...] = ()
    device: str = "cuda"
    memory: float | None = None
    ceilings: Ceilings | None = None
    graphed: bool = False  # calls are captured in a CUDA graph, whose replay costs the host nothing
    # their passes are (`make(graphs=True)`), inputs copied in and results out; "auto": where that is faster
    replayed: bool | str = False
    found: dict[Any, tuple[Speed, Speed]] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def symmetric(self) -> bool:
        return "symm" in self.transports

    @property
    def ways(self) -> tuple[Machine, ...]:
        """This machine with passes launched by the host, or replayed; both where that is to be decided."""
        over = ("symm",) if self.symmetric else self.transports  # over NCCL a capture may hang
        launched = replace(self, replayed=False)
        replayed = replace(self, graphed=True, replayed=True, transports=over)
        if self.replayed == "auto":
            return (launched, replayed) if self.replays else (launched,)
        return (replayed,) if self.replayed else (launched,)

    @property
    def replays(self) -> bool:
        """Whether passes can be replayed here."""
        return self.device == "cuda" and self.symmetric and not self.graphed

    @property
    def otherwise(self) -> Ceilings:
        return self.ceilings or DEFAULTS[self.device]

    @property
    def overheads(self) -> Overheads:
        return OVERHEADS[self.device]

    def measured(self, kernel: str) -> bool:
        return any(r.gpu == self.gpu and r.kernel == kernel for r in self.rates)

    def speeds(self, kernel: str, mask: Mask, task: Task) -> tuple[Speed, Speed]:
        """Forward and backward: of the kernel's measured class that is most alike, else by the ceilings."""
        key = kernel, mask, task
        if key not in self.found:
            self.found[key] = self._speeds(kernel, mask, task)
        return self.found[key]

    def _speeds(self, kernel: str, mask: Mask, task: Task) -> tuple[Speed, Speed]:
        here = [r for r in self.rates if r.gpu == self.gpu and r.kernel == kernel]
        if not here or task.shapes.itemsize != 2:
            return Speed(self.otherwise.tflops * 1e12), Speed(self.otherwise.tflops * 1e12)
        dim = task.shapes.head_dim
        kind = "window" if mask.windowed else "causal" if mask.causal else "full"
        layout = "packed" if task.packed else "dense"
        heads = "mha" if task.shapes.heads == task.shapes.kv_heads else "gqa"
        # what is on an edge of the mask is counted apart, so that a long sequence's rate holds for short ones, and a short
        # pack's call takes as long as its launch, which is the host's
        long = mask.edges or task.packed or task.cu_seqlens[-1] // task.world >= LONG
        span = "long" if long else "short"

        def unlike(r: Rate) -> tuple[Any, ...]:
            c = r.call
            return (
                c.head_dim < dim, abs(c.head_dim - dim), c.layout != layout, c.mask != kind, c.length != span,
                c.heads != heads,
            )  # fmt: skip

        return rates.speeds(self.rates, min(here, key=unlike))

    def link(self, transport: str, pattern: str, world: int) -> Link:
        return links.find(self.links, self.gpu, world, transport, pattern) or self.otherwise.link

    def copied(self, size: float) -> float:
        """Seconds to read and write `size` bytes in all within a device."""
        rate = links.find(self.links, self.gpu, 1, "memory", "copy")
        return size / ((rate.gb_s if rate else self.otherwise.copy_gb_s) * 1e9)


@dataclass(frozen=True)
class Candidate:
    variant: str
    options: Any  # of the variant's own class

    @property
    def label(self) -> str:
        own = self.options.defaults()
        given = [f"{k}={v}" for k, v in self.options.plain().items() if own[k] != v]
        return " ".join([self.variant, *given])

    def problem(self, task: Task) -> Problem:
        return VARIANTS[self.variant].problem(task.cu_seqlens, task.world, task.mask, self.options, task.q_tokens)


@dataclass(frozen=True)
class Pass:
    """Milliseconds of a forward or a backward on the slowest rank. `host`: what issuing it takes, beside the rest."""

    compute: float
    exposed: float  # communication that nothing hides
    merges: float
    host: float
    copies: float = 0.0  # to where a graph reads, and from where it writes

    @property
    def gpu(self) -> float:
        return self.compute + self.exposed + self.merges + self.copies

    @property
    def ms(self) -> float:
        """Where host and GPU need about as long it is a little more than either: now one is late, now the other, on one rank or
        another."""
        return float((self.gpu**6 + self.host**6) ** (1 / 6))


@dataclass(frozen=True)
class Estimate:
    candidate: Candidate
    transport: str
    kernel: str
    forward: Pass
    backward: Pass | None
    graphs: bool = False  # whether passes are replayed

    @property
    def ms(self) -> float:
        return self.forward.ms + (self.backward.ms if self.backward else 0.0)

    @property
    def late(self) -> bool:
        """Whether a GPU may wait for its host."""
        return any(p.host > p.gpu / 2 for p in (self.forward, self.backward) if p)

    @property
    def label(self) -> str:
        return f"{self.candidate.label}, {self.transport}{', graphs' if self.graphs else ''}"


@dataclass(frozen=True)
class Choice:
    """`estimates` are sorted, the fastest first, where a replay counts as `REPLAYED_WORTH` times its time; `left_out`: candidates by
    their label, and why; `tried`: ms that those that were run took, by label, the fastest first."""

    estimates: tuple[Estimate, ...]
    left_out: Mapping[str, str]
    basis: str  # what rates and links the estimates stand on
    replayable: bool = False  # whether graphs=True would take the host out
    tried: Mapping[str, float] = field(default_factory=dict)

    @property
    def best(self) -> Estimate:
        """The fastest of those tried; of none, by estimate."""
        first = next(iter(self.tried), None)
        return next((e for e in self.estimates if e.label == first), self.estimates[0])

    @property
    def why(self) -> str:
        """The best one's time by what it consists of, and the next variant's; where some were tried, what they took."""
        best = self.best
        both = [p for p in (best.forward, best.backward) if p]
        bound = ", bound by the host" if any(p.host > p.gpu for p in both) else ""
        bound += ", which graphs=True takes out" if bound and self.replayable else ""
        text = (
            f"{best.label}: {_ms(best.ms)} ms estimated, of it compute {_ms(sum(p.compute for p in both))}, exposed "
            f"communication {_ms(sum(p.exposed for p in both))}, merges {_ms(sum(p.merges for p in both))}{bound}"
        )
        if any(p.copies for p in both):
            text += f", copies for graphs {_ms(sum(p.copies for p in both))}"
        if self.tried:
            return f"{text}; tried: {'; '.join(f'{label} {_ms(ms)} ms' for label, ms in self.tried.items())}"
        other = next((e for e in self.estimates if e.candidate.variant != best.candidate.variant), None)
        text += f"; next {other.label}: {_ms(other.ms)} ms" if other else ""
        otherwise = next((e for e in self.estimates if e.graphs != best.graphs), None)
        way = "launched by the host" if best.graphs else "replayed"
        return f"{text}; {way} {otherwise.label}: {_ms(otherwise.ms)} ms" if otherwise else text

    def plain(self) -> dict[str, Any]:
        """As a result records it."""
        best = self.best
        return {
            "variant": best.candidate.variant,
            "options": best.candidate.options.plain(),
            "graphs": best.graphs,
            "why": self.why,
            "basis": self.basis,
            "estimates_ms": {e.label: round(e.ms, 6) for e in self.estimates},
            "tried_ms": dict(self.tried) or None,
            "left_out": dict(self.left_out),
        }


def check_graphs(name: str, graphs: Any) -> None:
    """Raises ValueError for what is neither whether passes are replayed nor, of attention=auto, "auto"."""
    if graphs == "auto" and name != AUTO:
        raise ValueError(f"graphs='auto': attention=auto decides that; for {name} give True or False")
    if not isinstance(graphs, bool) and graphs != "auto":
        raise ValueError(f"graphs={graphs!r}: must be True or False, or of attention=auto 'auto'")


def check_trials(trials: Any) -> None:
    """Raises ValueError for what is no number of variants to choose from by trial, or None."""
    if trials is not None and (isinstance(trials, bool) or not isinstance(trials, int) or trials < 2):
        raise ValueError(
            f"trials={trials!r}: must be of how many variants the best is run, a whole number of at least 2, or null for none"
        )


def choose(task: Task, machine: Machine) -> Choice:
    """The candidates' estimates. Raises ValueError, with every variant's reason, where none can do the task."""
    able, left_out = candidates(task)
    first, *others = machine.ways[:1] if task.decode else machine.ways
    found = []
    for candidate in able:
        try:
            found += _estimates(candidate, task, first)
        except ValueError as error:
            left_out[candidate.label] = str(error)
            continue
        for way in others:
            with suppress(ValueError):
                found += _estimates(candidate, task, way)
    if not found:
        raise ValueError(nothing(task, left_out))
    known = machine.measured(found[0].kernel) and task.shapes.itemsize == 2
    basis = f"rates: {f'measured on {machine.gpu}' if known else machine.otherwise.source}"
    if task.world > 1:
        linked = any(m.gpu == machine.gpu for m in machine.links)
        basis += f"; links: {f'measured on {machine.gpu}' if linked else machine.otherwise.source}"
    replayable = machine.replays and not (machine.replayed or task.decode)
    found.sort(key=lambda e: e.ms * (REPLAYED_WORTH if e.graphs else 1))
    return Choice(tuple(found), left_out, basis, replayable)


def _estimates(candidate: Candidate, task: Task, machine: Machine) -> list[Estimate]:
    """Over each transport. Raises ValueError for what this machine does not do."""
    problem = candidate.problem(task)
    kernel = machine.kernel(masks(problem))
    _check_memory(candidate, task, machine)
    if getattr(candidate.options, "grouping", None) == "fused" and not machine.measured("triton"):
        raise ValueError("no rate of our Triton kernel was measured here")
    if candidate.options.uncapturable is not None and machine.graphed:
        raise ValueError("sends lengths to the GPU in each pass, which a CUDA graph can't")
    if getattr(candidate.options, "reduce", None) == "fused" and not (machine.device == "cuda" and machine.symmetric):
        raise ValueError("needs CUDA GPUs with symmetric memory")
    # a world of one moves nothing
    transports = machine.transports if task.world > 1 else machine.transports[:1]
    return [estimate(candidate, task, machine, kernel, transport) for transport in transports]


def nothing(task: Task, left_out: Mapping[str, str]) -> str:
    """What to say where no candidate is left: the reasons of those that were in question, each once."""
    asked = {x: why for x, why in left_out.items() if not _unsuitable(VARIANTS[x.split()[0]], task)}
    return f"attention=auto: no variant can do this: {'; '.join(dict.fromkeys(asked.values()))}"


def candidates(task: Task) -> tuple[list[Candidate], dict[str, str]]:
    """What can do the task by its mask, lengths and heads in this world, and why the rest can't, by label. Raises
    ValueError for heads that do not go together."""
    check_heads(task.shapes.heads, task.shapes.kv_heads)
    able: list[Candidate] = []
    left_out: dict[str, str] = {}
    for name, v in VARIANTS.items():
        reason = _unsuitable(v, task)
        if reason:
            left_out[name] = reason
            continue
        for options in v.options.candidates(task.shapes.kv_heads, task.world, task.mask):
            candidate = Candidate(name, options)
            try:
                candidate.problem(task)
                options.check(task.shapes.heads, task.shapes.kv_heads, task.world)
                able.append(candidate)
            except ValueError as error:
                left_out[candidate.label] = str(error)
    return able, left_out


def _unsuitable(v: Variant[Any], task: Task) -> str | None:
    return v.unsuitable(task.world, task.packed, task.decode)


def _places(problem: Problem) -> list[int]:
    """The places in the schedule that are looked at: in a large world some over all of it, the ends among them."""
    if problem.world <= RANKS:
        return list(range(problem.world))
    return sorted({i * (problem.world - 1) // (RANKS - 1) for i in range(RANKS)})


def _check_memory(candidate: Candidate, task: Task, machine: Machine) -> None:
    if machine.memory is None:
        return
    v, problem = VARIANTS[candidate.variant], candidate.problem(task)
    ranks = [place * problem.ulysses for place in _places(problem)]
    peak = max(costs.peak_bytes(v, problem, task.shapes, rank, candidate.options, task.backward) for rank in ranks)
    if machine.replayed:
        peak += sum(_copied_bytes(task, problem, backward) for backward in (False, True)[: 1 + task.backward])
    if peak > machine.memory:
        raise ValueError(f"holds {peak / 2**30:.3g} GiB beside the inputs, of {machine.memory / 2**30:.3g} allowed")


def _copied_bytes(task: Task, problem: Problem, backward: bool) -> int:
    """Of a replayed pass: q, k and v in and out out; backward dout, q, k, v and out in and their gradients out. What an all-to-all
    exchanged it keeps for the backward, beside what it gives."""
    sizes, tokens = task.shapes, task.cu_seqlens[-1] // task.world
    q, k = (tokens * sizes.batch * n * sizes.head_dim * sizes.itemsize for n in (sizes.heads, sizes.kv_heads))
    copied = 4 * q + 4 * k if backward else 2 * q + 2 * k
    if task.backward and not backward and problem.ulysses > 1:
        copied += 2 * q + 2 * k
    return copied


def estimate(candidate: Candidate, task: Task, machine: Machine, kernel: str, transport: str) -> Estimate:
    """On the slowest rank."""
    problem = candidate.problem(task)
    ranks = [_Rank(candidate, task, machine, kernel, transport, problem, place) for place in _places(problem)]
    forward = max((r.one_pass(False) for r in ranks), key=lambda p: p.ms)
    backward = max((r.one_pass(True) for r in ranks), key=lambda p: p.ms) if task.backward else None
    return Estimate(candidate, transport, kernel, forward, backward, machine.replayed is True)


@dataclass(frozen=True)
class _Pairs:
    """(query, key) pairs of blocks of one mask: those seen, all that there are, and how many edges of the mask queries are
    on."""

    seen: int
    most: int
    edges: int

    def computed(self, edge: float) -> int:
        return int(min(self.most, self.seen + self.edges * edge))


@dataclass(frozen=True)
class _Work:
    """A step as the model sees it: its pairs, and how many calls and tokens."""

    pairs: tuple[tuple[Mask, _Pairs], ...]
    blocks: int
    packed_calls: int
    queries: int  # of all blocks
    keys: int  # of all blocks, one that two of them see twice
    seen: int  # keys that come or are there
    taken_queries: int  # of packed calls, those that are copied together for them
    taken_keys: int
    received: int  # keys that come before the step
    homeward: int  # of this rank's keys whose gradients come after it


@lru_cache(maxsize=1024)
def _work(problem: Problem, place: int) -> tuple[_Work, ...]:
    """A rank's steps. Of a gather, one step with all that moves."""
    found = []
    for i, step in enumerate(steps(problem, place)):
        pairs: dict[Mask, _Pairs] = {}
        for block in step.blocks:
            n, keys = block.q[1] - block.q[0], block.k[1] - block.k[0]
            here = pairs.get(block.mask, _Pairs(0, 0, 0))
            pairs[block.mask] = _Pairs(here.seen + block.pairs, here.most + n * keys, here.edges + block.mask.edges * n)
        # whole blocks of the same queries are one call
        apart = list({(b.q, b.k if not b.mask.full else None): b for b in step.blocks}.values())
        taken_queries, taken_keys = _taken(step, step.owner == place)
        gathered = step.owner < 0
        route = gather_move(problem, place).route if gathered else step_route(problem, place, i)
        found.append(
            _Work(
                tuple(pairs.items()),
                len(apart),
                len({(block.mask, block.group) for block in step.blocks}),
                sum(b.q[1] - b.q[0] for b in apart),
                sum(b.k[1] - b.k[0] for b in step.blocks),
                length(step.keys),
                taken_queries,
                taken_keys,
                route.received_tokens,
                route.reversed().received_tokens,
            )
        )
    return tuple(found)


def _taken(step: Step, mine: bool) -> tuple[int, int]:
    """Queries and keys of packed calls that lie in more than one stretch; those of others side by side."""
    queries = keys = 0
    for of_q, of_k in packed_calls(step, mine):
        queries += length(of_q) if len(of_q) > 1 else 0
        keys += length(of_k) if len(of_k) > 1 else 0
    return queries, keys


@lru_cache(maxsize=1024)
def _merged_tokens(problem: Problem, place: int, keys: bool) -> tuple[int, int, int, int]:
    """Of a ring's parts of out and dq, or with `keys` of dk and dv: in how many tokens a merge has both sides in the tensors'
    dtype and where one is wide, how many results it writes wide, and how many merges there are."""
    tokens = problem.q_tokens or problem.cu_seqlens[-1] // problem.world
    parts: list[Intervals] = []
    returning: list[Intervals] = []
    for i, step in enumerate(steps(problem, place)):
        if not keys:
            parts += [union(b.q for b in step.blocks)] if step.blocks else []
            continue
        parts += [step.keys] if step.owner == place and step.blocks else []
        parts += returning
        returning = [piece.target for piece in step_route(problem, place, i).reversed().receives]
    narrow = wide = written = merges = 0
    for of in passes(tokens, (*parts, *returning)).of:
        for each in of:
            if not each.first:
                n = each.stop - each.start
                narrow, wide = (narrow + n, wide) if each.kept else (narrow, wide + n)
                written += 0 if each.last else n
                merges += 1
    return narrow, wide, written, merges


@lru_cache(maxsize=4096)
def _received(name: str, problem: Problem, shapes: Shapes, rank: int, backward: bool, pulls: bool) -> Mapping[str, int]:
    return costs.bytes_received(VARIANTS[name], problem, shapes, rank, backward, None, pulls)


@dataclass(frozen=True)
class _Rank:
    """One rank's passes; seconds but for what `one_pass` gives."""

    candidate: Candidate
    task: Task
    machine: Machine
    kernel: str
    transport: str
    problem: Problem
    place: int

    @property
    def exchange(self) -> str:
        return VARIANTS[self.candidate.variant].executor

    @property
    def grouping(self) -> str | None:
        return getattr(self.candidate.options, "grouping", None)

    @property
    def pulls(self) -> bool:
        return self.transport == "symm"

    @property
    def tokens(self) -> int:
        """Of a place in the schedule."""
        return self.task.cu_seqlens[-1] // self.problem.world

    @property
    def parts(self) -> int:
        """In which an all-to-all computes its heads, one travelling while another computes."""
        if self.exchange != "all_to_all":
            return 1
        return costs.exchange_parts(
            self.candidate.options, self.task.shapes.kv_heads, self.problem.ulysses, self.tokens
        )

    @property
    def shapes(self) -> Shapes:
        """Of what this rank computes at a time."""
        n = self.problem.ulysses * self.parts
        kv_heads = costs.kv_heads_each(self.problem, self.task.shapes) // self.parts
        return replace(self.task.shapes, heads=self.task.shapes.heads // n, kv_heads=kv_heads)

    @property
    def kv_token(self) -> int:
        """Bytes of one token's keys and values that this rank computes with."""
        return 2 * self.shapes.batch * self.shapes.kv_heads * self.shapes.head_dim * self.shapes.itemsize

    @property
    def work(self) -> tuple[_Work, ...]:
        return _work(self.problem, self.place)

    def one_pass(self, backward: bool) -> Pass:
        which = {"gather": self._gather, "all_to_all": self._all_to_all, "tree": self._tree}
        found = which.get(self.exchange, self._ring)(backward)
        parts = found.compute, found.exposed, found.merges, found.host, self._copies(backward)
        return Pass(*(1e3 * part for part in parts))

    def _ring(self, backward: bool) -> Pass:
        link = self._link("one")
        incoming = [link.seconds(step.received * self.kv_token) for step in self.work]
        homeward = [link.seconds(step.homeward * self.kv_token) for step in self.work] if backward else []
        tail = self._tail(backward)
        busy = [self._step(step, backward) + self._calls(step) * tail for step in self.work]
        own_last = 1 / self.ring_parts if backward and self.ring_parts > 1 else 0.0
        if own_last:
            homeward[-1] *= own_last  # of which the other parts' came before
        compute, exposed = self._overlapped(busy, incoming, homeward, link.slows, backward, own_last)
        moves = sum(seconds > 0 for seconds in [*incoming, *homeward])
        host = self._host(backward, self.parts * sum(map(self._calls, self.work)), self.parts * moves)
        return Pass(compute, exposed, self._ring_merges(backward), host)

    def _all_to_all(self, backward: bool) -> Pass:
        """A ring for each part of the heads; the first part's way in and the last one's way back are waited for."""
        n, received, link = self.parts, self._received(backward), self._link("many")
        there, back = ("dout", "dqkv") if backward else ("qkv", "out")
        each = self._ring(backward)
        busy = [each.compute + each.exposed + each.merges] * n
        compute, exposed = _pipeline(
            busy, [link.seconds(received[there] / n)] * n, [link.seconds(received[back] / n)] * n, link.slows
        )
        slowed = compute - sum(busy)
        # kernels place what is moved, so for the host two exchanges are as three
        host = each.host + self._issue(exchanges=3 * n if self.problem.ulysses > 1 else 0)
        return Pass(n * each.compute + slowed, n * each.exposed + exposed, n * each.merges, host)

    def _gather(self, backward: bool) -> Pass:
        from attention.executors.head_groups import head_groups

        sizes, options = self.shapes, self.candidate.options
        *own, step = self.work
        most = max(_work(self.problem, place)[-1].seen for place in _places(self.problem))
        small_first, small_last = self.pulls and not own, self.pulls and backward
        stride = options.heads_k_stride
        groups = head_groups(sizes.heads, sizes.kv_heads, stride, small_first, small_last, most)
        shares = [(g.k_stop - g.k_start) / sizes.kv_heads for g in groups]
        received = self._received(backward)
        gathered = not self.pulls and not self.problem.mask.windowed
        link, home = self._link("gather" if gathered else "many"), self._link("many")
        incoming = [link.seconds(received["kv"] * share) for share in shares]
        homeward = [home.seconds(received["dkv"] * share) for share in shares] if backward else []
        calls, copies = self._calls(step), 0.0
        if options.grouping == "packed" and calls > 1 and not backward:
            # one call of queries and keys that are copied together, and of results that are copied apart
            calls = 1
            rows = 2 * (sizes.heads * step.queries + sizes.kv_heads * step.keys)
            copies = self.machine.copied(2 * rows * sizes.batch * sizes.head_dim * sizes.itemsize)
            copies += len(groups) * PACK_US / 1e6
        busy = [self._step(step, backward) * share + calls * self._tail(backward) for share in shares]
        own_last = shares[-1] if own and backward and len(groups) > 1 and not self._apart(backward) else 0.0
        if own:  # whose keys are here, and whose gradients stay
            busy = [self._step(own[0], backward) + (2 if own_last else 1) * self._tail(backward), *busy]
            incoming, homeward = [0.0, *incoming], [0.0, *homeward] if backward else []
        slows = max(link.slows, home.slows if backward else 0.0)
        compute, exposed = self._overlapped(busy, incoming, homeward, slows, backward, own_last)
        if "q" in received:  # queries there, results back
            exposed += 2 * home.seconds(received["q"] / 2)
        if gathered and self.task.world > 1:  # from where they arrived to their place
            copies += self.machine.copied(2 * step.seen * self.kv_token)
        merges = copies + (self._summed(step, len(groups)) if backward else 0.0)
        if own:  # out, or dq, is read twice and written once
            merged = 3 * step.queries * sizes.batch * sizes.heads * sizes.head_dim * sizes.itemsize
            merges += self.machine.copied(merged) / MERGE_SHARE + calls * self.machine.overheads.merge / 1e6
        exchanges = len(groups) * (2 if backward else 1) + (2 if "q" in received else 0)
        return Pass(
            compute, exposed, merges, self._host(backward, len(own) + (own_last > 0) + calls * len(groups), exchanges)
        )

    def _summed(self, step: _Work, groups: int) -> float:
        """The gather's backward: dk and dv of calls over the same keys are summed before they go home, and there those of
        all ranks."""
        tokens = step.keys + step.seen if step.blocks > 1 else 0
        if step.homeward:
            tokens += step.homeward + 2 * (self.task.cu_seqlens[-1] // self.problem.world)
        launches = 2 * groups * ((step.blocks > 1) + (step.homeward > 0))
        return self.machine.copied(tokens * self.kv_token) / MERGE_SHARE + launches * self.machine.overheads.merge / 1e6

    def _tree(self, backward: bool) -> Pass:
        how = self.candidate.options.reduce
        transport, pattern = (self.transport, "all_gather")
        if self.pulls:  # whose collective operations are NCCL's
            transport, pattern = ("symm", "slots") if how == "fused" else ("nccl", "all_gather")
        link = self.machine.link(transport, pattern, self.task.world)
        reductions = costs.tree_bytes(self.problem, self.shapes, self.candidate.options)
        moving = self.task.world > 1
        exposed = sum(link.seconds(size) for size in reductions.values()) if moving else 0.0
        overheads, host = self.machine.overheads, 0.0
        if not self.machine.graphed:
            count = len(reductions) if moving and how != "fused" else 0
            host = (overheads.decode + count * overheads.reduction) / 1e6
        return Pass(sum(self._step(step, False) for step in self.work), exposed, 0.0, host)

    def _copies(self, backward: bool) -> float:
        if not self.machine.replayed:
            return 0.0
        return self.machine.copied(2 * _copied_bytes(self.task, self.problem, backward)) / COPY_SHARE

    def _received(self, backward: bool) -> Mapping[str, int]:
        rank = self.place * self.problem.ulysses
        return _received(self.candidate.variant, self.problem, self.task.shapes, rank, backward, self.pulls)

    def _link(self, how: str) -> Link:
        """one: a message from one peer; many: from all; gather: one all-gather."""
        if self.pulls:
            pattern = "pull" if how == "one" else "pull_all"
        else:
            pattern = "all_gather" if how == "gather" else "p2p"
        return self.machine.link(self.transport, pattern, self.task.world)

    def _step(self, step: _Work, backward: bool) -> float:
        """What a step's kernels compute; few queries take as long as the keys take to read."""
        seconds = 0.0
        for mask, pairs in step.pairs:
            speed = self.machine.speeds(self.kernel, mask, self.task)[backward]
            flops = costs.forward_flops(self.shapes, pairs.computed(speed.edge))
            seconds += flops * (costs.BACKWARD if backward else 1) / speed.flops
        if self.task.packed and (backward or self.grouping != "packed"):
            sizes, reads = self.shapes, 3 if backward else 1  # dout, q and out; or q
            elements = reads * sizes.heads * step.taken_queries + 2 * sizes.kv_heads * step.taken_keys
            seconds += self.machine.copied(2 * elements * sizes.batch * sizes.head_dim * sizes.itemsize)
        return max(seconds, self.machine.copied(step.keys * self.kv_token)) if self.task.decode else seconds

    def _calls(self, step: _Work) -> int:
        return step.packed_calls if self.task.packed else step.blocks

    def _tail(self, backward: bool) -> float:
        """What a call leaves a GPU idle. A band's tiles all take as long, so that at the end half of one is waited for on
        average; else the longest are done first."""
        each, mask = self.machine.overheads, self.problem.mask
        seconds = each.call[backward] / 1e6
        if self._apart(backward):
            seconds *= 1 - APART_FILLS * (1 - self.tokens / costs.APART)
        if mask.left >= 0 and mask.right >= 0:
            alone = replace(self.task.shapes, batch=1, heads=1, kv_heads=1)
            flops = costs.forward_flops(alone, TILE * (mask.left + mask.right + 1)) * (
                costs.BACKWARD if backward else 1
            )
            seconds += flops * each.units / self.machine.speeds(self.kernel, mask, self.task)[backward].flops / 2
        return seconds

    def _apart(self, backward: bool) -> bool:
        """Whether the first step is computed beside the others."""
        if not (backward and self.pulls and costs.own_apart(self.problem, self.place)):
            return False
        return self.ring_parts == 1

    @property
    def ring_parts(self) -> int:
        """In which a ring's backward goes through the heads."""
        if self.exchange != "ring":
            return 1
        return costs.ring_parts(self.candidate.options, self.shapes.kv_heads, self.tokens)

    def _overlapped(
        self,
        busy: list[float],
        incoming: list[float],
        homeward: list[float],
        slows: float,
        backward: bool,
        own_last: float = 0.0,
    ) -> tuple[float, float]:
        """(compute, exposed communication) as `_pipeline` has it. A first step apart fills what the others wait for; where a share
        of it comes last it does what the last gradients are waited for."""
        if own_last:
            compute, exposed = _pipeline(busy, incoming, [*homeward[:-1], 0.0], slows)
            return compute, exposed + max(0.0, homeward[-1] - own_last * busy[0])
        if not self._apart(backward):
            return _pipeline(busy, incoming, homeward, slows)
        compute, exposed = _pipeline(busy[1:], incoming[1:], homeward[1:], slows)
        return busy[0] + compute, max(0.0, exposed - busy[0])

    def _host(self, backward: bool, calls: int, exchanges: int) -> float:
        """What it takes to issue a pass of so many kernel calls and exchanges."""
        each = self._launched
        every = each.whole[backward] + calls * each.call[backward]
        return 0.0 if self.machine.graphed else every / 1e6 + self._issue(exchanges)

    def _issue(self, exchanges: int) -> float:
        moving = self.task.world > 1 and not self.machine.graphed
        return exchanges * self._launched.exchange / 1e6 if moving else 0.0

    @property
    def _launched(self) -> Launched:
        each, task = self.machine.overheads, self.task
        played = self.pulls and costs.played(self.kernel, task.cu_seqlens[-1] // task.world)
        played = played and self.grouping != "packed"  # which sends lengths in each pass
        return each.played if played else each.run

    def _ring_merges(self, backward: bool) -> float:
        """Forward out, backward dq, dk and dv."""
        row = self.shapes.batch * self.shapes.head_dim
        seconds = self._merged(False, row * self.shapes.heads)
        return seconds + 2 * self._merged(True, row * self.shapes.kv_heads) if backward else seconds

    def _merged(self, keys: bool, row: int) -> float:
        """A merge reads the part and what is there, and writes the result."""
        narrow, wide, written, merges = _merged_tokens(self.problem, self.place, keys)
        item = self.shapes.itemsize
        both, more = 3 * item, max(item, 4) - item
        moved = ((narrow + wide) * both + (wide + written) * more) * row
        return self.machine.copied(moved) / MERGE_SHARE + merges * self.machine.overheads.merge / 1e6


def _pipeline(
    work: Sequence[float], incoming: Sequence[float], homeward: Sequence[float], slows: float
) -> tuple[float, float]:
    """(compute, exposed communication) of steps that each compute while the next one's keys come and the one before's
    gradients go home: the first keys and the last gradients are waited for, and what takes longer than its compute."""
    compute, exposed = 0.0, incoming[0] if incoming else 0.0
    for i, each in enumerate(work):
        moving = sum(incoming[i + 1 : i + 2]) + (sum(homeward[i - 1 : i]) if i else 0.0)
        busy = each + slows * min(moving, each)
        compute += busy
        exposed += max(0.0, moving - busy)
    return compute, exposed + sum(homeward[-1:])


def task_of(
    cu_seqlens: Sequence[int],
    world: int,
    shapes: Shapes,
    causal: bool,
    window: tuple[int, int] = (-1, -1),
    packed: bool = False,
    backward: bool = True,
    q_tokens: int | None = None,
) -> Task:
    """Raises ValueError for sequences that do not rise from 0."""
    cu = tuple(int(c) for c in cu_seqlens)
    if len(cu) < 2 or cu[0] != 0 or any(b < a for a, b in pairwise(cu)):
        raise ValueError(f"cu_seqlens={cu}: must rise from 0 to the global number of tokens")
    return Task(cu, world, Mask.of(causal, window), shapes, packed, backward and q_tokens is None, q_tokens)


def _ms(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"
