"""Schedules: the steps in which a rank meets keys. A step has the keys that it needs of one owner, and the blocks *(query
slice, key slice, mask)* that the rank computes against them: the mask, cut at the rank's queries and at these keys. After a
gather the owner is `SEQUENCE`. Query slices lie in the rank's own shard, key slices in the keys of the step as they lie for
the rank: its own shard in place, other keys side by side.

A schedule builds the steps of one rank by itself. Executors, costs and transfers are derived from them. A test of each
variant checks that the blocks of all ranks cover every pair of the mask exactly once. Without torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from attention.geometry import cuts
from attention.geometry.cuts import Places
from attention.geometry.layouts import CuSeqlens, Layout, Shard, size
from attention.masks.band import CAUSAL, FULL, Band, Interval, Intervals
from attention.masks.mask import Mask
from attention.masks.pattern import Pattern
from attention.masks.rectangles import joined, trimmed
from attention.masks.sequences import of_sequences
from attention.memo import memo

SEQUENCE = -1  # the owner of keys that were gathered
MANY_SEQUENCES = 8  # with more, a packed batch moves whole shards: one interval instead of one for each sequence


@dataclass(frozen=True, slots=True)
class Block:
    """`group`: the number of the query chunk within its sequence, if several chunks of a sequence see prefixes of its
    keys. A packed kernel call takes the blocks of one group, so that it has each sequence once. Under a pattern, a
    block has all queries of the rank and all keys of the step."""

    q: Interval
    k: Interval
    mask: Band | Pattern
    group: int = 0

    @property
    def pairs(self) -> int:
        return self.mask.pairs(self.q[1] - self.q[0], self.k[1] - self.k[0])


@dataclass(eq=False)  # not frozen: a ring has W of them in each plan, and they are made twice as fast
class Step:
    """keys: the tokens that the step needs, in the order in which they lie for the rank: intervals of the owner's shard, or
    after a gather of the sequence. They contain the keys of all blocks, and may contain more. The blocks are made at first
    use: of a remote rank's step usually only the keys are needed. Equal steps of a ring share one tuple. where: from a
    block's key slice to where its keys lie, if they lie in another order than that of the sequence."""

    owner: int
    keys: Intervals
    make: Callable[[], tuple[Block, ...]] = tuple
    where: Callable[[Interval], Intervals] | None = None

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        return self.make()

    @property
    def pairs(self) -> int:
        return sum(block.pairs for block in self.blocks)


class Buffers(NamedTuple):
    """The keys that a rank computes against, by step: see `Step`. cut: the mask's parts at the rank's queries and these keys,
    by step."""

    owners: Sequence[int]
    keys: Sequence[Intervals]
    cut: Callable[[], cuts.Cut]


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
    def buffers(self, problem: Problem, rank: int) -> Buffers: ...

    def steps(self, problem: Problem, rank: int) -> tuple[Step, ...]:
        """The steps of one rank, as many on every rank."""
        buffers = self.buffers(problem, rank)
        blocks = _Blocks(problem, rank, buffers)
        numbered = enumerate(zip(buffers.owners, buffers.keys, strict=True))
        return tuple(Step(owner, keys, partial(blocks.of_step, i)) for i, (owner, keys) in numbered)

    def sends(self, problem: Problem, rank: int, i: int) -> tuple[int, Intervals] | None:
        """The remote rank that gets keys of this rank for its step `i`, and which; None where a step's keys do not come from
        one owner."""
        return None

    def most_keys(self, problem: Problem) -> tuple[int, ...]:
        """For each step, the most keys that any rank receives before it, or has gathered."""
        return (0,)

    def masks(self, problem: Problem) -> set[Band]:
        """All masks that blocks of any rank have, where the mask is a window in every sequence."""
        return {b.mask for step in steps(problem, 0) for b in step.blocks if isinstance(b.mask, Band)}


class _Blocks:
    """The blocks of all steps of one rank: cut at once, and when the first of them is asked for."""

    def __init__(self, problem: Problem, rank: int, buffers: Buffers):
        self.problem, self.rank, self.buffers = problem, rank, buffers
        self.made: dict[int, tuple[Block, ...]] = {}

    @cached_property
    def cut(self) -> tuple[cuts.Cut, list[int], list[int]]:
        x = self.buffers.cut()
        if not self.problem.is_cut:
            x = cuts.settled(cuts.merged(x) if self.problem.schedule.merges else x)
        return x, *cuts.first_alike(x, len(self.buffers.owners))

    def of_step(self, i: int) -> tuple[Block, ...]:
        x, alike, border = self.cut
        if not self.problem.is_cut:
            first = alike[i]
            if first not in self.made:
                self.made[first] = _bands(x[:, border[first] : border[first + 1]])
            return self.made[first]
        if border[i] == border[i + 1]:
            return ()
        n_q, own = (
            size(layout.shards(self.problem.cu_seqlens, self.problem.world)[self.rank])
            for layout in (self.problem.q_layout, self.problem.layout)
        )
        n_k = own if self.buffers.owners[i] == self.rank else length(self.buffers.keys[i])
        rows = joined(trimmed(x[: cuts.BUFFER, border[i] : border[i + 1]].T))
        return (Block((0, n_q), (0, n_k), Pattern(n_q, n_k, rows)),)


def _bands(x: cuts.Cut) -> tuple[Block, ...]:
    columns = (*x[: cuts.LO].tolist(), cuts.bands_of(x), cuts.groups_of(x))
    return tuple(Block((q0, q1), (k0, k1), band, group) for q0, q1, k0, k1, band, group in zip(*columns, strict=True))


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
    def longest(self) -> Problem:
        """The same problem over the longest sequence alone."""
        return replace(self, cu_seqlens=(0, max(b - a for a, b in pairwise(self.cu_seqlens))))

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


def _cut(problem: Problem, rank: int, keys: Places) -> cuts.Cut:
    return cuts.cut(cuts.mask_rows(problem), cuts.query_places(problem, rank), keys)


class LocalSchedule(Schedule):
    """One step, against the local KV."""

    def buffers(self, problem: Problem, rank: int) -> Buffers:
        own = cuts.key_places(problem).only(rank)
        return Buffers((rank,), (_whole(own),), partial(_cut, problem, rank, own.numbered(0)))


class RingSchedule(Schedule):
    """W steps, step i against the keys of rank r - i (mod W)."""

    def buffers(self, problem: Problem, rank: int) -> Buffers:
        world, held = problem.world, cuts.key_places(problem)
        x = _cut(problem, rank, held)
        whole = _whole(held.only(rank))
        if problem.moves_shards:
            by_owner = [whole if n else () for n in np.bincount(x[cuts.BUFFER], minlength=world).tolist()]
        else:
            keys = cuts.keys_by_buffer(x)
            by_owner = cuts.intervals_by(keys[:, 0], keys[:, 1] - keys[:, 0], keys[:, 2], world)
            own = np.searchsorted(keys[:, 2], (rank, rank + 1))  # stays in place
            in_place = [(*interval, rank) for interval in whole]
            x = cuts.side_by_side(x, np.array([*keys[: own[0]], *in_place, *keys[own[1] :]]).reshape(-1, 3))
        by_owner[rank] = whole
        owners = [(rank - i) % world for i in range(world)]
        x = cuts.renumbered(x, (rank - x[cuts.BUFFER]) % world)
        return Buffers(owners, [by_owner[owner] for owner in owners], lambda: x)

    def sends(self, problem: Problem, rank: int, i: int) -> tuple[int, Intervals] | None:
        reader = (rank + i) % problem.world
        return (reader, sent(problem, rank)[reader]) if i else None

    def most_keys(self, problem: Problem) -> tuple[int, ...]:
        world = problem.world
        if problem.moves_shards:
            return (0, *[problem.cu_seqlens[-1] // world] * (world - 1))
        if problem.alike_by_distance:
            # the first and the last rank: their steps together have every distance
            keys = [cuts.keys_by_buffer(_cut(problem, rank, cuts.key_places(problem))) for rank in (0, world - 1)]
            first, last = (np.bincount(x[:, 2], x[:, 1] - x[:, 0], world).astype(np.int64) for x in keys)
            return (0, *np.maximum(first[:0:-1], last[-2::-1]).tolist())
        needs = cuts.needs_by_rank(problem)
        row, parts = cuts.key_places(problem).within(needs[:, 0], needs[:, 1])
        by_pair = np.bincount(needs[row, 2] * world + parts.of, parts.lengths, world * world).reshape(world, world)
        ranks = np.arange(world)
        return (0, *[int(by_pair[ranks, (ranks - i) % world].max()) for i in range(1, world)])

    def masks(self, problem: Problem) -> set[Band]:
        if not problem.alike_by_distance:
            return {FULL, CAUSAL, problem.band, Band(1, 1)}  # representatives of all that there are
        ranks = {0, problem.world - 1}
        blocks = (b for rank in ranks for step in steps(problem, rank) for b in step.blocks)
        return {b.mask for b in blocks if isinstance(b.mask, Band)}


class GatherSchedule(Schedule):
    """One step against all keys that the rank needs, gathered in sequence order. Each query chunk is one block against
    the keys that it sees."""

    merges = False  # the chunks of a sequence stay apart: see `nested_prefixes`

    def gathers(self, problem: Problem) -> cuts.Rows:
        """What every rank gathers: `[n, 3]` (start, stop, rank), global positions, sorted."""
        return cuts.needs_by_rank(problem)

    def buffers(self, problem: Problem, rank: int) -> Buffers:
        keys, places = self._gathered(problem, rank, 0)
        return Buffers((SEQUENCE,), (keys,), partial(_cut, problem, rank, places))

    def _gathered(self, problem: Problem, rank: int, step: int) -> tuple[Intervals, Places]:
        rows = self.gathers(problem)
        start, stop, _ = rows[slice(*np.searchsorted(rows[:, 2], (rank, rank + 1)))].T
        places = Places(start, stop, np.cumsum(stop - start) - (stop - start), np.full_like(start, step))
        return tuple(zip(start.tolist(), stop.tolist(), strict=True)), places

    def most_keys(self, problem: Problem) -> tuple[int, ...]:
        rows = self.gathers(problem)
        return (int(np.bincount(rows[:, 2], rows[:, 1] - rows[:, 0]).max(initial=0)),)

    def masks(self, problem: Problem) -> set[Band]:
        return cuts.bands(problem)


class GatherShards(GatherSchedule):
    """As `GatherSchedule`, but each owner's whole shard is gathered, one shard after another: for packed batches of many
    sequences. The needed keys of a shard are many intervals, the whole shard is one."""

    def steps(self, problem: Problem, rank: int) -> tuple[Step, ...]:
        (step,) = super().steps(problem, rank)
        held = cuts.key_places(problem)
        keys = tuple((r.start, r.stop) for shard in problem.shards for r in shard if r)
        n = problem.cu_seqlens[-1] // problem.world
        return (replace(step, keys=keys, where=within(replace(held, at=held.at + held.of * n))),)

    def buffers(self, problem: Problem, rank: int) -> Buffers:
        whole = np.array([[0], [problem.cu_seqlens[-1]], [0], [0]])
        return Buffers((SEQUENCE,), ((),), partial(_cut, problem, rank, Places(*whole)))

    def most_keys(self, problem: Problem) -> tuple[int, ...]:
        return (problem.cu_seqlens[-1],)


class LocalFirst(GatherSchedule):
    """Two steps: the local keys in place, then the needed keys of all other ranks, gathered in sequence order. Every query
    sees all of these of its sequence up to some chunk."""

    merges = True

    def gathers(self, problem: Problem) -> cuts.Rows:
        return cuts.remote_needs_by_rank(problem)

    def buffers(self, problem: Problem, rank: int) -> Buffers:
        own, (keys, places) = cuts.key_places(problem).only(rank), self._gathered(problem, rank, 1)
        return Buffers(
            (rank, SEQUENCE), (_whole(own), keys), partial(_cut, problem, rank, own.numbered(0).beside(places))
        )

    def most_keys(self, problem: Problem) -> tuple[int, ...]:
        return (0, *super().most_keys(problem))


LOCAL = LocalSchedule()
RING = RingSchedule()
GATHER = GatherSchedule()
GATHER_SHARDS = GatherShards()
LOCAL_FIRST = LocalFirst()


def _whole(shard: Places) -> Intervals:
    """All tokens of one shard as one interval."""
    n = int(shard.lengths.sum())
    return ((0, n),) if n else ()


@memo(lambda found, *_: sum(map(len, found)))
def sent(problem: Problem, rank: int) -> list[Intervals]:
    """For each rank the keys of this rank's shard that it needs."""
    if problem.moves_shards:
        whole = _whole(cuts.key_places(problem).only(rank))
        return [whole if keys else () for keys in sent(problem.longest, rank)]
    held = cuts.key_places(problem).only(rank)
    x = cuts.cut(cuts.mask_rows(problem), cuts.query_places(problem), held, by_queries=True)
    keys = cuts.keys_by_buffer(x)
    return cuts.intervals_by(keys[:, 0], keys[:, 1] - keys[:, 0], keys[:, 2], problem.world)


def within(places: Places) -> Callable[[Interval], Intervals]:
    """A function from an interval of the sequence to where its tokens lie in a buffer of these places, which it must be in."""
    rows = list(zip(places.start.tolist(), places.stop.tolist(), places.at.tolist(), strict=True))
    starts = [start for start, *_ in rows]

    def where(interval: Interval) -> Intervals:
        found: list[Interval] = []
        for start, stop, at in rows[max(bisect_right(starts, interval[0]) - 1, 0) :]:
            if start >= interval[1]:
                break
            low, high = at + max(interval[0] - start, 0), at + min(stop, interval[1]) - start
            found[-1:] = [(found[-1][0], high)] if found and found[-1][1] == low else [*found[-1:], (low, high)]
        return tuple(found)

    return where


def union(intervals: Iterable[Interval]) -> Intervals:
    """Disjoint, sorted, merged intervals."""
    merged: list[Interval] = []
    for start, stop in sorted(i for i in intervals if i[1] > i[0]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return tuple(merged)


def length(intervals: Intervals) -> int:
    total = 0
    for start, stop in intervals:  # called very often: a loop takes half the time of a sum over a generator
        total += stop - start
    return total


def _weight(found: tuple[Step, ...], problem: Problem, *_: object) -> int:
    weight = sum([len(problem.cu_seqlens) + len(step.keys) for step in found])
    if problem.is_cut:  # kernels keep tables with a pattern: of its rectangles, and of each query's intervals
        tokens = problem.cu_seqlens[-1]
        weight += tokens // 8 + len(problem.mask.rectangles(tokens))
    return weight


@memo(_weight)
def steps(problem: Problem, rank: int) -> tuple[Step, ...]:
    """All steps of one rank, cached."""
    return problem.schedule.steps(problem, rank)


@memo(lambda found, *_: len(found))
def most_keys(problem: Problem) -> tuple[int, ...]:
    """For each step, the most keys that any rank receives before it, or has gathered."""
    return problem.schedule.most_keys(problem)


def rank_pairs(problem: Problem, rank: int) -> int:
    """The number of (query, key) pairs that a rank computes."""
    if problem.q_tokens is not None:
        return sum(step.pairs for step in steps(problem, rank))
    return cuts.rank_pairs(problem, rank)


def masks(problem: Problem) -> tuple[Band, ...]:
    """All masks that blocks of any rank may have, so that all ranks pick the same kernel. Without a window, each block is
    full or has the problem's own mask. A decode's schedule lists its masks. A mask that is cut becomes full and causal
    rectangles and, if it has lower bounds, windows."""
    if isinstance(problem.form, Mask):
        return (FULL, CAUSAL, *((Band(1, 1),) if problem.form.windowed(problem.cu_seqlens[-1]) else ()))
    if problem.q_tokens is None and not problem.band.windowed:
        return tuple(dict.fromkeys((FULL, problem.band)))
    return tuple(sorted(problem.schedule.masks(problem), key=lambda m: (m.left, m.right)))
