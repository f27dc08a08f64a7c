"""Schedules: the steps in which a rank meets keys. A step has the keys that it needs of one owner, and the blocks *(query
slice, key slice, mask)* that the rank computes against them: the mask, cut at the rank's queries and at these keys. After a
gather the owner is `SEQUENCE`. Query slices lie in the rank's own shard, key slices in the keys of the step as they lie for
the rank: its own shard in place, other keys side by side.

A schedule builds the steps of one rank by itself. Executors, costs and transfers are derived from them. A test of each
variant checks that the blocks of all ranks cover every pair of the mask exactly once. Without torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from attention.geometry import cuts
from attention.geometry.cuts import BUFFER, K0, K1, Cut, Places
from attention.geometry.intervals import by_number, length, union
from attention.geometry.layouts import Chunks, CuSeqlens, Layout, Shard
from attention.geometry.steps import SEQUENCE, Block, Repeated, Step
from attention.masks.band import CAUSAL, FULL, Band, Intervals
from attention.masks.mask import Mask
from attention.masks.pattern import Pattern
from attention.masks.rectangles import Rectangles, trimmed
from attention.masks.rectangles import joined as joined_rectangles
from attention.masks.sequences import of_sequences
from attention.memo import memo

MANY_SEQUENCES = 8  # with more, a packed batch moves whole shards: one interval instead of one for each sequence


class Schedule(ABC):
    """`rank` is a place in the schedule: with Ulysses groups, the number of a group. merges: whether neighbouring blocks become
    one where they can."""

    merges = True

    def note(self, problem: Problem) -> str | None:
        """A remark for the result on how the problem was divided, or None."""
        return None

    def parts(self, problem: Problem, heads: int, kv_heads: int) -> tuple[Subproblem, ...]:
        """The problems that a call consists of instead of this one; none where it is this one."""
        return ()

    @abstractmethod
    def steps(self, problem: Problem, rank: int) -> tuple[Step, ...]:
        """The steps of one rank, as many on every rank."""

    def sends(self, problem: Problem, rank: int) -> Sequence[Intervals]:
        """For each step i, the keys of this rank that rank r + i (mod W) gets for it; none where no step's keys come from one
        owner."""
        return ()

    def most_keys(self, problem: Problem) -> tuple[int, ...]:
        """For each step, the most keys that any rank receives before it, or has gathered."""
        return (0,)

    def _steps(
        self, problem: Problem, rank: int, owners: Sequence[int], keys: Sequence[Intervals], x: Cut
    ) -> tuple[Step, ...]:
        """owners, keys: by step. x: the mask's parts at the rank's queries and these keys; their buffer is the step."""
        if not problem.is_cut:
            x = cuts.settled(cuts.merged(x) if self.merges else x)
        borders = np.searchsorted(x[BUFFER], np.arange(len(owners) + 1)).tolist()
        rows = x.T.copy()
        rows[:, BUFFER] = 0
        steps, known = [], dict[bytes, tuple[Block, ...]]()  # most steps of a ring are alike
        for owner, intervals, (start, stop) in zip(owners, keys, pairwise(borders), strict=True):
            part = rows[start:stop]
            if problem.is_cut:
                blocks = _pattern(problem, rank, length(intervals), part[:, :BUFFER]) if len(part) else ()
            elif (content := part.tobytes()) in known:
                blocks = known[content]
            else:
                blocks = known[content] = _bands(part.T)
            steps.append(Step(owner, intervals, blocks))
        return tuple(steps)


def _pattern(problem: Problem, rank: int, n_keys: int, rows: Rectangles) -> tuple[Block, ...]:
    n = int(problem.queries.only(rank).lengths.sum())
    return (Block((0, n), (0, n_keys), Pattern(n, n_keys, joined_rectangles(trimmed(rows)))),)


def _bands(x: Cut) -> tuple[Block, ...]:
    q0, q1, k0, k1 = x[: cuts.LO].tolist()
    columns = (zip(q0, q1, strict=True), zip(k0, k1, strict=True), cuts.bands_of(x), cuts.groups_of(x))
    return tuple(map(Block._make, zip(*columns, strict=True)))


@dataclass(frozen=True)
class Problem:
    """The attention problem that a schedule divides among ranks. `layout`: of the keys and values. `q_layout`: of the
    queries during the computation. `cu_seqlens`: the global ones, (0, S) for a dense batch. `form`: the
    mask. A band applies within every sequence, and gives blocks with a band. Any other mask is defined over all
    positions, and gives blocks with a pattern."""

    cu_seqlens: CuSeqlens
    world: int
    form: Band | Mask
    layout: Layout
    q_layout: Layout
    schedule: Schedule
    q_tokens: int | None = None  # the number of a decode's queries; None: each key has a query
    ends: tuple[int, int] | None = None  # the least and the most keys of batch elements, of a decode where they differ
    ulysses: int = 1  # ranks that share one place in the schedule, each with a share of the heads

    @property
    def ranks(self) -> int:
        return self.world * self.ulysses

    @property
    def is_cut(self) -> bool:
        """Whether the mask is cut into patterns, because it is not one band in every sequence."""
        return not isinstance(self.form, Band)

    @property
    def band(self) -> Band:
        """The one band within every sequence."""
        assert isinstance(self.form, Band), "the mask is not one band in every sequence"
        return self.form

    @property
    def mask(self) -> Mask:
        """The mask over all positions."""
        return self.form if isinstance(self.form, Mask) else of_sequences(self.form, self.cu_seqlens)

    @property
    def shards(self) -> tuple[Shard, ...]:
        """The keys that each rank holds."""
        return self.layout.shards(self.cu_seqlens, self.world)

    @property
    def longest(self) -> int:
        """The tokens of the longest sequence."""
        return max(b - a for a, b in pairwise(self.cu_seqlens))

    # What follows is derived once for a problem.

    @cached_property
    def held(self) -> Places:
        """Where each rank holds its keys."""
        return cuts.places_of(self.layout, self.cu_seqlens, self.world)

    @cached_property
    def queries(self) -> Places:
        """Where each rank has its queries during the computation."""
        return self.held if self.q_layout == self.layout else cuts.places_of(self.q_layout, self.cu_seqlens, self.world)

    @cached_property
    def rectangles(self) -> Rectangles:
        """The mask over all positions."""
        if isinstance(self.form, Mask):
            return self.form.rectangles(self.cu_seqlens[-1])
        return cuts.band_rows(self.form, self.cu_seqlens)

    @cached_property
    def gathered(self) -> Places:
        """What every rank gathers under a gather: tokens of the sequence, side by side."""
        assert isinstance(self.schedule, GatherSchedule)
        return Places.side_by_side(self.schedule.needs(self))

    @cached_property
    def steps(self) -> dict[int, tuple[Step, ...]]:
        """By rank, as far as they were asked for: see `steps`."""
        return {}

    @property
    def shard_tokens(self) -> int:
        """Of each rank, where all hold as many."""
        return self.cu_seqlens[-1] // self.world

    @property
    def alike_by_distance(self) -> bool:
        """Whether the keys and masks of a step depend on the difference of rank and owner alone."""
        return not self.is_cut and (not self.band.windowed or self.layout.chunks == 1)

    @property
    def moves_shards(self) -> bool:
        """Whether a ring sends whole shards of many sequences: one interval instead of one for each sequence."""
        return not self.keys_differ and len(self.cu_seqlens) - 1 > MANY_SEQUENCES

    @property
    def keys_differ(self) -> bool:
        """Whether each rank may need only a few of the keys, which differ from rank to rank."""
        return not isinstance(self.form, Band) or self.form.windowed


@dataclass(frozen=True)
class Subproblem:
    """A problem that a call consists of: of so many query and KV heads, over `fold` stretches of each sequence as a batch.
    `copies`: the ranks that each have such a problem. Its schedule has as many places as the call's, or one."""

    heads: int
    kv_heads: int
    problem: Problem
    fold: int
    copies: int


def _cut(problem: Problem, rank: int, keys: Places) -> Cut:
    return cuts.cut(problem.rectangles, problem.queries.only(rank), keys)


def _local(problem: Problem, rank: int) -> tuple[Intervals, Cut]:
    """The local keys, and the mask's parts at them."""
    own = problem.held.only(rank)
    n = int(own.lengths.sum())
    return ((0, n),) if n else (), _cut(problem, rank, own)


def _whole_shards(problem: Problem, rank: int) -> Cut:
    """The mask's parts at the keys of rank r - i (mod W), as buffer i."""
    return _cut(problem, rank, problem.held.numbered((rank - problem.held.of) % problem.world))


def _repeated(problem: Problem, rank: int) -> list[Sequence[Block]] | None:
    """The blocks of a ring's steps against whole shards, where all sequences are cut alike."""
    layout, cu = problem.layout, np.array(problem.cu_seqlens, np.int64)
    if (
        layout != problem.q_layout
        or not layout.per_sequence
        or not isinstance(layout.split, Chunks)
        or layout.inner > 1
    ):
        return None
    units = _units(replace(problem, cu_seqlens=(0, CHUNK * layout.chunks * problem.world)), rank)
    if units is None:
        return None
    lengths = cu[1:] - cu[:-1]
    first, size = cu[:-1][lengths > 0] // problem.world, lengths[lengths > 0] // (layout.chunks * problem.world)
    known = {unit: Repeated(unit, first, size) for unit in units}
    return [known[unit] for unit in units]


CHUNK = 4  # tokens of a chunk in which chunks alone are told apart


@lru_cache(maxsize=64)
def _units(problem: Problem, rank: int) -> list[tuple[Block, ...]] | None:
    """The blocks of each step against the whole shards of one sequence, in chunks of CHUNK tokens; None where their borders or
    bands are not those of chunks."""
    x = cuts.settled(cuts.merged(_whole_shards(problem, rank)))
    steps = [_bands(x[:, x[BUFFER] == i]) for i in range(problem.world)]
    if any(b.mask not in (FULL, CAUSAL) for blocks in steps for b in blocks) or (x[: cuts.LO] % CHUNK).any():
        return None
    return [
        tuple(b._replace(q=(b.q[0] // CHUNK, b.q[1] // CHUNK), k=(b.k[0] // CHUNK, b.k[1] // CHUNK)) for b in blocks)
        for blocks in steps
    ]


class LocalSchedule(Schedule):
    """One step, against the local KV."""

    def steps(self, problem: Problem, rank: int) -> tuple[Step, ...]:
        keys, x = _local(problem, rank)
        return self._steps(problem, rank, (rank,), (keys,), x)


class RingSchedule(Schedule):
    """W steps, step i against the keys of rank r - i (mod W)."""

    def steps(self, problem: Problem, rank: int) -> tuple[Step, ...]:
        world, n = problem.world, problem.shard_tokens
        owners = [(rank - i) % world for i in range(world)]
        if problem.moves_shards and (blocks := _repeated(problem, rank)):
            return tuple(Step(*x) for x in zip(owners, [((0, n),) if b else () for b in blocks], blocks, strict=True))
        x = _whole_shards(problem, rank)
        if problem.moves_shards:
            met = {0, *x[BUFFER].tolist()}
            return self._steps(problem, rank, owners, [((0, n),) if i in met else () for i in range(world)], x)
        # the local keys stay in place
        keys = union(np.append(0, x[K0]), np.append(n, x[K1]), np.append(0, x[BUFFER]))
        return self._steps(problem, rank, owners, _by_buffer(keys, world), cuts.with_keys(x, keys))

    def sends(self, problem: Problem, rank: int) -> Sequence[Intervals]:
        world = problem.world
        if problem.moves_shards:  # to ranks with a query that sees its first key: the longest sequence tells which
            shards, keys = problem.layout.shards((0, problem.longest), world), ((0, problem.shard_tokens),)
            first = shards[rank][0].start if problem.band.causal else 0
            return [(), *(keys if shards[(rank + i) % world][-1].stop > first else () for i in range(1, world))]
        q = problem.queries
        x = cuts.cut(problem.rectangles, q.numbered((q.of - rank) % world), problem.held.only(rank))
        return [(), *_by_buffer(cuts.keys_by_buffer(x), world)[1:]]

    def most_keys(self, problem: Problem) -> tuple[int, ...]:
        world = problem.world
        if not problem.keys_differ:
            return (0, *[problem.shard_tokens] * (world - 1))
        q = problem.queries
        if problem.alike_by_distance:  # the steps of the first and of the last rank together have every distance
            q = q.where((q.of == 0) | (q.of == world - 1))
        keys = cuts.keys_by_buffer(cuts.cut(problem.rectangles, q.numbered(q.of * world), problem.held))
        pair, of = np.unique(keys[:, 2], return_inverse=True)  # rank * W + owner
        most = np.zeros(world, np.int64)
        np.maximum.at(most, (pair // world - pair) % world, np.bincount(of, keys[:, 1] - keys[:, 0]).astype(np.int64))
        return (0, *most[1:].tolist())


class GatherSchedule(Schedule):
    """One step against all keys that the rank needs, gathered in sequence order. Each query chunk is one block against
    the keys that it sees."""

    merges = False  # the chunks of a sequence stay apart: see `nested_prefixes`

    def needs(self, problem: Problem) -> NDArray[np.int64]:
        """What every rank gathers: see `cuts.needed`."""
        return cuts.needed(problem.rectangles, problem.queries)

    def transfer(self, problem: Problem) -> tuple[Places, Places]:
        """Where the keys lie in each rank's shard, and among those that each rank gathers."""
        return problem.held, problem.gathered

    def steps(self, problem: Problem, rank: int) -> tuple[Step, ...]:
        places = problem.gathered.only(rank)
        return self._steps(problem, rank, (SEQUENCE,), (_rows(places),), _cut(problem, rank, places))

    def most_keys(self, problem: Problem) -> tuple[int, ...]:
        places = problem.gathered
        return (int(np.bincount(places.of, places.lengths).max(initial=0)),)


class GatherShards(GatherSchedule):
    """As `GatherSchedule`, but each owner's whole shard is gathered, one shard after another: for packed batches of many
    sequences. The needed keys of a shard are many intervals, the whole shard is one."""

    def transfer(self, problem: Problem) -> tuple[Places, Places]:
        """By positions in all shards, one after another."""
        ranks, n = np.arange(problem.world), problem.shard_tokens
        zero = np.zeros_like(ranks)
        return Places(ranks * n, ranks * n + n, zero, ranks), Places(zero, zero + n * problem.world, zero, ranks)

    def steps(self, problem: Problem, rank: int) -> tuple[Step, ...]:
        total, held = problem.cu_seqlens[-1], problem.held
        x = _cut(problem, rank, Places.side_by_side(np.array([[0, total, 0]])))
        keys = tuple((r.start, r.stop) for shard in problem.shards for r in shard if r)
        (step,) = self._steps(problem, rank, (SEQUENCE,), (keys,), x)
        return (step._replace(places=replace(held, at=held.at + held.of * problem.shard_tokens)),)

    def most_keys(self, problem: Problem) -> tuple[int, ...]:
        return (problem.cu_seqlens[-1],)


class LocalFirst(GatherSchedule):
    """Two steps: the local keys in place, then the needed keys of all other ranks, gathered in sequence order. Every query
    sees all of these of its sequence up to some chunk."""

    merges = True

    def needs(self, problem: Problem) -> NDArray[np.int64]:
        return cuts.without(super().needs(problem), problem.held)

    def steps(self, problem: Problem, rank: int) -> tuple[Step, ...]:
        (own, local), places = _local(problem, rank), problem.gathered.only(rank)
        x = np.concatenate([local, _cut(problem, rank, places.numbered(1))], 1)
        return self._steps(problem, rank, (rank, SEQUENCE), (own, _rows(places)), x)

    def most_keys(self, problem: Problem) -> tuple[int, ...]:
        return (0, *super().most_keys(problem))


LOCAL = LocalSchedule()
RING = RingSchedule()
GATHER = GatherSchedule()
GATHER_SHARDS = GatherShards()
LOCAL_FIRST = LocalFirst()


def _rows(places: Places) -> Intervals:
    return tuple(zip(places.start.tolist(), places.stop.tolist(), strict=True))


def _by_buffer(keys: NDArray[np.int64], count: int) -> list[Intervals]:
    """The intervals (start, stop, buffer) of each of `count` buffers."""
    by_buffer = by_number(keys[:, 2], count, keys[:, 1] - keys[:, 0], keys[:, 0])
    return [intervals for (intervals,) in by_buffer]


def steps(problem: Problem, rank: int) -> tuple[Step, ...]:
    """All steps of one rank, kept with the problem."""
    made = problem.steps
    if rank not in made:
        made[rank] = problem.schedule.steps(problem, rank)
    return made[rank]


def _weight(problem: Problem, *_: object) -> int:
    # kernels keep tables with a pattern: of its rectangles, and of each query's intervals
    return problem.world * len(problem.cu_seqlens) + (problem.cu_seqlens[-1] // 8 if problem.is_cut else 0)


@memo(_weight)
def known(problem: Problem) -> Problem:
    """The first problem that equals this one, with all that was derived from it: layers and functions share it."""
    return problem


def rank_pairs(problem: Problem, rank: int) -> int:
    """The number of (query, key) pairs that a rank computes."""
    if problem.q_tokens is not None or problem.queries.step > 1:
        return sum(step.pairs for step in steps(problem, rank))
    return cuts.pairs_of(problem.rectangles, problem.queries.only(rank))


def masks(problem: Problem) -> tuple[Band, ...]:
    """Representatives of all masks that blocks of any rank may have, so that all ranks pick the same kernel: whether there are
    windows is what kernels differ in. A decode keeps its kernel while the keys grow: these hold for any number of keys."""
    band, window = problem.form, Band(1, 1)
    if isinstance(band, Mask):
        return (FULL, CAUSAL, window) if band.windowed(problem.cu_seqlens[-1]) else (FULL, CAUSAL)
    if problem.q_tokens is not None:  # the last of several queries see more keys of a shard that ends among them
        windowed = problem.q_tokens > 1 and (band.windowed or (band.causal and problem.world > 1))
        return (FULL, CAUSAL, window) if windowed else (FULL,) if band.full or problem.q_tokens == 1 else (FULL, CAUSAL)
    most = problem.longest - 1
    if 0 <= band.left < most or 0 < band.right < most:
        return (FULL, CAUSAL, band)
    return (FULL,) if band.right else (FULL, CAUSAL)
