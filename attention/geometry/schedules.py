"""Schedules. A schedule gives each rank a number of steps. A step lists the blocks *(query slice, key slice, mask)*
that the rank computes against the keys of one owner. Slices are local: a query slice lies in the rank's own shard, a
key slice in the owner's shard. After a gather the owner is `SEQUENCE`, and key slices lie in the whole sequence.
Executors, costs and transfers are derived from these steps. A test of each schedule checks that the blocks of all ranks
cover every pair of the mask exactly once.

A schedule builds any one step of any rank by itself and says who reads whose keys. So a rank builds its own W steps and the steps
of the ranks that read its shard, but never all W x W steps of the world. Pure Python."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

from attention.geometry import cuts
from attention.geometry.layouts import CuSeqlens, Layout
from attention.masks.band import CAUSAL, FULL, Band, Interval, Intervals, tile
from attention.masks.mask import Mask
from attention.masks.pattern import Pattern
from attention.masks.sequences import of_sequences
from attention.memo import memo

SEQUENCE = -1  # the owner of keys that were gathered into sequence order
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


class Step:
    """The blocks of one step, and the keys that it needs. The blocks are built at first use: of a remote rank's
    step usually only the keys are needed. `order`: the keys, in the order in which they arrive. By default they are the
    sorted union of the blocks' keys; give `order` if the order differs, or if the keys are known without the blocks."""

    def __init__(self, owner: int, make: Callable[[], Iterable[Block]] = tuple, order: Intervals | None = None):
        self.owner, self.make, self.order = owner, make, order
        self._blocks: tuple[Block, ...] | None = None

    @property
    def blocks(self) -> tuple[Block, ...]:
        if self._blocks is None:
            self._blocks = tuple(self.make()) if self.order != () else ()
        return self._blocks

    @property
    def keys(self) -> Intervals:
        """The owner's keys that the step needs: disjoint intervals, in the order in which they lie for this rank. They
        contain the keys of all blocks, and may contain more."""
        if self.order is None:
            self.order = union(b.k for b in self.blocks)
        return self.order

    @property
    def pairs(self) -> int:
        return sum(b.pairs for b in self.blocks)


class Schedule(ABC):
    """The steps of every rank. `rank` is a place in the schedule: with Ulysses groups, the number of a group."""

    def note(self, problem: Problem) -> str | None:
        """A remark for the result on how the problem was divided, or None."""
        return None

    def count(self, problem: Problem) -> int:
        """The number of steps, the same on every rank."""
        return 1

    @abstractmethod
    def step(self, problem: Problem, rank: int, i: int) -> Step:
        """Step `i` of a rank."""

    def readers(self, problem: Problem, rank: int, i: int) -> Sequence[int]:
        """The remote ranks that use this rank's keys in their step `i`."""
        return ()

    def received(self, problem: Problem, rank: int, i: int) -> Intervals:
        """The keys that a rank receives before step `i`, as intervals of the owner's shard; for a gather, the gathered
        keys as intervals of the sequence. Empty if the step uses the local KV."""
        step = self.step(problem, rank, i)
        return () if step.owner == rank else step.keys

    def examples(self, problem: Problem) -> Sequence[int]:
        """Representative ranks: their blocks have every mask that occurs, and in each step one of them receives as many
        keys as any rank does."""
        return range(problem.world)

    def most_keys(self, problem: Problem) -> tuple[int, ...]:
        """For each step, the most keys that any rank receives before it, or has gathered."""
        ranks = self.examples(problem)
        return tuple(max(length(self.received(problem, r, i)) for r in ranks) for i in range(self.count(problem)))

    def masks(self, problem: Problem) -> set[Band]:
        """All masks that blocks of any rank have, where the mask is a band in every sequence."""
        ranks = self.examples(problem)
        blocks = (b for rank in ranks for step in steps(problem, rank) for b in step.blocks)
        return {b.mask for b in blocks if isinstance(b.mask, Band)}


@dataclass(frozen=True)
class Problem:
    """The attention problem that a schedule divides among ranks. `layout`: of the keys and values. `q_layout`: of the
    queries during the computation. `cu_seqlens`: the global ones, (0, S) for a dense batch. `form`: the
    mask. A band applies within every sequence, and each schedule builds its blocks. Any other mask is defined over all
    positions, and `geometry.cuts` cuts it into blocks."""

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
    def keys_differ(self) -> bool:
        """Whether each rank may need only a few of the keys, which differ from rank to rank."""
        return not isinstance(self.form, Band) or self.form.windowed


@dataclass(frozen=True)
class LocalSchedule(Schedule):
    """One step, against the local KV."""

    blocks: Callable[[Problem, int], Iterable[Block]]

    def step(self, problem: Problem, rank: int, i: int) -> Step:
        if problem.is_cut:
            return cut_step(problem, rank, rank)
        return Step(rank, partial(self.blocks, problem, rank))

    def examples(self, problem: Problem) -> Sequence[int]:
        """One rank: no rank receives keys, and the blocks of whole sequences have the problem's own mask."""
        return (0,)


@dataclass(frozen=True)
class RingSchedule(Schedule):
    """W steps, step i against the keys of rank r - i (mod W). `blocks(problem, rank, owner)`: the step's blocks.
    `keys(problem, rank, owner)`: the owner's keys that the step needs; None if they must be derived from the blocks.
    The kind of a step's blocks depends only on the difference rank - owner."""

    blocks: Callable[[Problem, int, int], Iterable[Block]]
    keys: Callable[[Problem, int, int], Intervals | None] | None = None

    def count(self, problem: Problem) -> int:
        return problem.world

    def owner(self, problem: Problem, rank: int, i: int) -> int:
        return (rank - i) % problem.world

    def step(self, problem: Problem, rank: int, i: int) -> Step:
        owner = self.owner(problem, rank, i)
        if problem.is_cut:
            return cut_step(problem, rank, owner)
        known = self.keys(problem, rank, owner) if self.keys else None
        return Step(owner, partial(self.blocks, problem, rank, owner), known)

    def received(self, problem: Problem, rank: int, i: int) -> Intervals:
        if problem.is_cut:
            return cuts.needs_by_owner(problem, rank)[self.owner(problem, rank, i)] if i else ()
        known = self.keys(problem, rank, self.owner(problem, rank, i)) if i and self.keys else None
        return super().received(problem, rank, i) if known is None else known

    def readers(self, problem: Problem, rank: int, i: int) -> Sequence[int]:
        return ((rank + i) % problem.world,) if i else ()

    def examples(self, problem: Problem) -> Sequence[int]:
        """The first and the last rank: their steps together have every difference rank - owner."""
        return range(problem.world) if problem.is_cut else sorted({0, problem.world - 1})


class GatherSchedule(Schedule):
    """One step against all keys that the rank needs, gathered in sequence order. Each query chunk is one block against
    the keys that it sees."""

    def step(self, problem: Problem, rank: int, i: int) -> Step:
        if problem.is_cut:
            return cut_step(problem, rank, SEQUENCE)
        return Step(SEQUENCE, partial(gathered, problem, rank), cuts.needs(problem, rank))

    def most_keys(self, problem: Problem) -> tuple[int, ...]:
        if self.pieces(problem, 0, 0) is not None:
            return super().most_keys(problem)
        return (cuts.most_needed(problem),)

    def masks(self, problem: Problem) -> set[Band]:
        return cuts.bands(problem)

    def pieces(self, problem: Problem, rank: int, owner: int) -> list[tuple[Interval, Interval]] | None:
        """The tokens of an owner's shard that a rank gathers: pairs (interval of the shard, interval of the rank's
        gathered keys). None: the overlap of the shard with the keys that the rank needs, which the caller computes."""
        return None


class GatherByOwner(GatherSchedule):
    """As `GatherSchedule`, but each owner's whole shard is gathered, one shard after another. For packed batches of
    many sequences: the needed keys of a shard are many intervals, the whole shard is one."""

    def step(self, problem: Problem, rank: int, i: int) -> Step:
        order = by_owner(problem.layout, problem.cu_seqlens, problem.world)
        return Step(SEQUENCE, partial(gathered, problem, rank), order)

    def examples(self, problem: Problem) -> Sequence[int]:
        return (0,)

    def pieces(self, problem: Problem, rank: int, owner: int) -> list[tuple[Interval, Interval]] | None:
        n = problem.cu_seqlens[-1] // problem.world
        return [((0, n), (owner * n, (owner + 1) * n))]


def _whole_sequences(problem: Problem, rank: int) -> Iterator[Block]:
    for start, stop in pairwise(problem.cu_seqlens):
        yield from tiles(problem.band, (0, stop - start), start, (0, stop - start), start)


def cut_step(problem: Problem, rank: int, owner: int) -> Step:
    """A step of a mask that is cut: one block with all of the rank's queries."""

    def blocks() -> Iterator[Block]:
        found = cuts.on_gathered(problem, rank) if owner == SEQUENCE else cuts.on_owner(problem, rank, owner)
        if found.all_pairs:
            yield Block((0, found.n_q), (0, found.n_k), found)

    keys = cuts.needs(problem, rank) if owner == SEQUENCE else cuts.needs_by_owner(problem, rank)[owner]
    return Step(owner, blocks, keys)


LOCAL = LocalSchedule(_whole_sequences)
GATHER = GatherSchedule()
GATHER_BY_OWNER = GatherByOwner()


def gathered(problem: Problem, rank: int) -> list[Block]:
    """A rank's query chunks against all keys in sequence order."""
    blocks: list[Block] = []
    at = 0
    seen = [0] * len(problem.cu_seqlens)  # chunks of each sequence so far
    for chunk in problem.q_layout.shards(problem.cu_seqlens, problem.world)[rank]:
        assert chunk.step == 1 or len(chunk) < 2, f"the {problem.q_layout.name} layout's chunks are not contiguous"
        for number in range(bisect_right(problem.cu_seqlens, chunk.start) - 1, len(seen) - 1):
            start, stop = problem.cu_seqlens[number : number + 2]
            if start >= chunk.stop:
                break
            a, b = max(chunk.start, start), min(chunk.stop, stop)
            if a < b:
                q, k = (a - start, b - start), (0, stop - start)
                blocks += tiles(problem.band, q, at - q[0], k, start, seen[number])
                seen[number] += 1
                at += b - a
    return blocks


@memo(lambda found, *_: len(found))
def by_owner(layout: Layout, cu_seqlens: CuSeqlens, world: int) -> Intervals:
    """All keys, shard by shard. All ranks share the cached object."""
    return tuple((r.start, r.stop) for shard in layout.shards(cu_seqlens, world) for r in shard if r)


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
    weight = sum([len(problem.cu_seqlens) + len(step.order or ()) for step in found])
    if problem.is_cut:  # kernels keep tables with a pattern: of its rectangles, and of each query's intervals
        tokens = problem.cu_seqlens[-1]
        weight += tokens // 8 + len(problem.mask.rectangles(tokens))
    return weight


@memo(_weight)
def steps(problem: Problem, rank: int) -> tuple[Step, ...]:
    """All steps of one rank, cached."""
    return tuple(problem.schedule.step(problem, rank, i) for i in range(problem.schedule.count(problem)))


@memo(lambda found, *_: len(found))
def most_keys(problem: Problem) -> tuple[int, ...]:
    """For each step, the most keys that any rank receives before it, or has gathered."""
    return problem.schedule.most_keys(problem)


def rank_pairs(problem: Problem, rank: int) -> int:
    """The number of (query, key) pairs that a rank computes. Contiguous queries are counted against all keys of their
    sequences, without building the schedule's steps; for others the pairs of the steps are added up."""
    if problem.is_cut:
        return cuts.rank_pairs(problem, rank)
    shard = problem.q_layout.shards(problem.cu_seqlens, problem.world)[rank]
    if problem.q_tokens is None and all(chunk.step == 1 for chunk in shard):
        return sum(block.pairs for block in gathered(problem, rank))
    found = steps(problem, rank)
    alike = {id(step.blocks): step for step in found}  # most steps of a ring share their blocks
    times = Counter(id(step.blocks) for step in found)
    return sum(step.pairs * times[key] for key, step in alike.items())


def masks(problem: Problem) -> tuple[Band, ...]:
    """All masks that blocks of any rank may have, so that all ranks pick the same kernel. Without a window, each block is
    full or has the problem's own mask. A decode's schedule lists its masks. A mask that is cut becomes full and causal
    rectangles and, if it has lower bounds, windows."""
    if isinstance(problem.form, Mask):
        return (FULL, CAUSAL, *((Band(1, 1),) if problem.form.windowed(problem.cu_seqlens[-1]) else ()))
    if problem.q_tokens is None and not problem.band.windowed:
        return tuple(dict.fromkeys((FULL, problem.band)))
    return tuple(sorted(problem.schedule.masks(problem), key=lambda m: (m.left, m.right)))


def whole_shard(problem: Problem) -> Intervals:
    """All keys of a shard, where all shards have the same length."""
    n = problem.cu_seqlens[-1] // problem.world
    return ((0, n),) if n else ()


@memo(lambda found, *_: len(found))
def equal_shards(problem: Problem) -> Intervals:
    """(local start, local length) of every sequence under an equal per-sequence split."""
    return tuple((a // problem.world, (b - a) // problem.world) for a, b in pairwise(problem.cu_seqlens))


@memo(lambda found, *_: len(found))
def shard_blocks(problem: Problem, mask: Band) -> tuple[Block, ...]:
    """For every sequence under an equal split, the block of a rank's tokens against an owner's tokens at the same local
    positions. All steps share one tuple, by which a plan recognises that their calls are alike."""
    return tuple(Block((at, at + n), (at, at + n), mask) for at, n in equal_shards(problem) if n)


def tiles(mask: Band, q: Interval, q_shift: int, k: Interval, k_shift: int, group: int = 0) -> list[Block]:
    """The block of queries `q` and keys `k`, trimmed to the pairs that the mask allows; no block if there are none. q and k
    are sequence positions; the shifts turn them into local slices."""
    found = tile(mask, q, k)
    if found is None:
        return []
    (a, b), (c, d), left_over = found
    return [Block((a + q_shift, b + q_shift), (c + k_shift, d + k_shift), left_over, group)]
