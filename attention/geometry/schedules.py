"""Schedules: for each rank a list of steps, each the blocks *(query slice, key slice, mask)* that it computes against
the keys of one owner. Slices are local: queries in the rank's own shard, keys in the owner's shard, or in the whole
sequence when the owner is `SEQUENCE` (after a gather). Pure Python; a test proves a schedule by covering every pair of
the mask exactly once, and the executors, the cost functions and the transfers are all read off the same steps."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise

from attention.geometry.layouts import CuSeqlens, Layout, size
from attention.geometry.weighted_lru import memo
from attention.masks.band import CAUSAL, FULL, Interval, Mask, tile

SEQUENCE = -1  # the owner of keys that were gathered into sequence order
MANY_SEQUENCES = 8  # of a pack, from more on stretches of each cost more than the tokens between them


@dataclass(frozen=True, slots=True)
class Block:
    """`group` numbers the query chunks that attend nested prefixes of one sequence's keys."""

    q: Interval
    k: Interval
    mask: Mask
    group: int = 0

    @property
    def pairs(self) -> int:
        return self.mask.pairs(self.q[1] - self.q[0], self.k[1] - self.k[0])


@dataclass(frozen=True, eq=False)
class Step:
    """Its blocks are made when they are asked for, which of peers they seldom are: of those a rank needs to know the keys. `order`:
    which keys there are and how they lie, where that is known without the blocks, or is not what they touch, in order."""

    owner: int
    make: Callable[[], Iterable[Block]] = tuple
    order: tuple[Interval, ...] = ()

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        return tuple(self.make())

    @cached_property
    def keys(self) -> tuple[Interval, ...]:
        """The owner's keys that the step brings, all that its blocks touch among them: disjoint intervals in the order in which
        they lie for this rank."""
        return self.order or union(b.k for b in self.blocks)

    @property
    def pairs(self) -> int:
        return sum(b.pairs for b in self.blocks)


StepsOf = Callable[["Problem", int], list[Step]]


@dataclass(frozen=True)
class Problem:
    """What `build` makes a schedule for. `layout` holds the keys and values, `q_layout` the queries while they are computed
    on; `cu_seqlens` are the global ones, (0, S) for a batch of single sequences."""

    cu_seqlens: CuSeqlens
    world: int
    mask: Mask
    layout: Layout
    q_layout: Layout
    build: StepsOf
    q_tokens: int | None = None  # queries of a decode, which are no part of the sequence; None: as many as keys
    ulysses: int = 1  # ranks that share one place in the schedule, each with its part of the heads

    @property
    def ranks(self) -> int:
        return self.world * self.ulysses


def union(intervals: Iterable[Interval]) -> tuple[Interval, ...]:
    """Disjoint, sorted, merged intervals."""
    merged: list[Interval] = []
    for start, stop in sorted(i for i in intervals if i[1] > i[0]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return tuple(merged)


def length(intervals: tuple[Interval, ...]) -> int:
    return sum(stop - start for start, stop in intervals)


def _weight(found: tuple[Step, ...], problem: Problem, *_: object) -> int:
    return sum([len(problem.cu_seqlens) + len(step.order) for step in found])


@memo(_weight)
def steps(problem: Problem, rank: int) -> tuple[Step, ...]:
    """The steps of one rank, cached: peers' steps are asked for as often as one's own, since what a rank sends is what
    its peers' steps need."""
    return tuple(problem.build(problem, rank))


def masks(problem: Problem, places: Iterable[int] | None = None) -> tuple[Mask, ...]:
    """All masks that blocks may have, of any rank, so that all pick the same kernel; `places` is where those of a window are looked
    for, by default everywhere. What is left of a mask without one is causal or full."""
    if not problem.mask.windowed:
        return tuple(dict.fromkeys((FULL, problem.mask)))
    found = {b.mask for place in places or range(problem.world) for step in steps(problem, place) for b in step.blocks}
    return tuple(sorted(found, key=lambda m: (m.left, m.right)))


def local(problem: Problem, rank: int) -> list[Step]:
    """Everything is here: one step against one's own keys.

    Source: FlashAttention (Dao et al., 2022) on one device; DeepSpeed Ulysses (Jacobs et al., 2023) after its exchange."""

    def blocks() -> Iterator[Block]:
        for start, stop in pairwise(problem.cu_seqlens):
            yield from _tiles(problem.mask, (0, stop - start), start, (0, stop - start), start)

    return [Step(rank, blocks)]


def ring(problem: Problem, rank: int) -> list[Step]:
    """Contiguous shards: step i against rank r-i, each block the tile of the mask that falls on the two shards. Causal,
    later ranks do more; a window leaves most steps empty.

    Source: Ring Attention (Liu et al., 2023)."""

    def blocks(owner: int) -> Iterator[Block]:
        for at, n in _local_sequences(problem):
            q, k = (rank * n, (rank + 1) * n), (owner * n, (owner + 1) * n)
            yield from _tiles(problem.mask, q, at - q[0], k, at - k[0])

    result = []
    for i in range(problem.world):
        owner = (rank - i) % problem.world
        if problem.mask.causal and owner > rank:
            result.append(Step(owner))
        else:
            result.append(Step(owner, partial(blocks, owner), () if problem.mask.windowed else _whole(problem)))
    return result


def zigzag(problem: Problem, rank: int) -> list[Step]:
    """Zigzag shards, causal: on one's own keys causal over both chunks; from an earlier rank all queries see its first
    chunk; from a later rank the second query chunk sees both of its chunks. Every rank does the same work each step. Of a
    pack of many sequences an earlier rank's shard comes whole, for its first chunks are as many stretches.

    Source: ring-flash-attention's zigzag ring (Zhu, 2024)."""

    def blocks(owner: int) -> Iterator[Block]:
        for at, n in _local_sequences(problem):
            half, end = at + n // 2, at + n
            if not n:
                continue
            if owner == rank:
                yield Block((at, end), (at, end), CAUSAL)
            elif owner < rank:
                yield Block((at, end), (at, half), FULL)
            else:
                yield Block((half, end), (at, end), FULL)

    order = _whole(problem) if len(problem.cu_seqlens) - 1 > MANY_SEQUENCES else ()
    owners = [(rank - i) % problem.world for i in range(problem.world)]
    return [Step(owner, partial(blocks, owner), order) for owner in owners]


def stripe(problem: Problem, rank: int) -> list[Step]:
    """Striped shards, causal: keys of this and earlier ranks are seen up to one's own index, keys of later ranks up to the
    index before.

    Source: Striped Attention (Brandon et al., 2023)."""

    def blocks(owner: int) -> Iterator[Block]:
        for at, n in _local_sequences(problem):
            if owner <= rank and n:
                yield Block((at, at + n), (at, at + n), CAUSAL)
            elif n > 1:
                yield Block((at + 1, at + n), (at, at + n - 1), CAUSAL)

    owners = [(rank - i) % problem.world for i in range(problem.world)]
    return [Step(owner, partial(blocks, owner)) for owner in owners]


def gather(problem: Problem, rank: int) -> list[Step]:
    """All needed keys in sequence order: each of the rank's query chunks is one block against its keys.

    Source: The Llama 3 Herd of Models, section 3.3.2 (Llama Team, 2024)."""
    return [Step(SEQUENCE, partial(_gathered, problem, rank))]


def _gathered(problem: Problem, rank: int) -> list[Block]:
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
                blocks += _tiles(problem.mask, q, at - q[0], k, start, seen[number])
                seen[number] += 1
                at += b - a
    return blocks


def gather_by_owner(problem: Problem, rank: int) -> list[Step]:
    """As `gather`, but that the keys lie by owner, each owner's shard whole: of a pack of many sequences what a rank needs of a
    shard is many stretches, and all of it is one.

    Source: ours."""
    order = by_owner(problem.layout, problem.cu_seqlens, problem.world)
    return [Step(SEQUENCE, partial(_gathered, problem, rank), order)]


@memo(lambda found, *_: len(found))
def by_owner(layout: Layout, cu_seqlens: CuSeqlens, world: int) -> tuple[Interval, ...]:
    """All keys, one rank's shard behind another's: one object for all ranks."""
    return tuple((r.start, r.stop) for shard in layout.shards(cu_seqlens, world) for r in shard if r)


def own_first(problem: Problem, rank: int) -> list[Step]:
    """Zigzag shards, causal, in two steps: one's own keys as in zigzag, then those of all others, which are seen whole, so
    that they may lie as they come: the first chunks of earlier ranks, which all queries see, and both chunks of the later
    ones, which the second query chunk sees.

    Source: ours, of the zigzag ring's first step (Zhu, 2024) and zigzag_llama3 (petrpan26/ring-flash-attention, 2025)."""
    world = problem.world
    earlier = list(range(rank))  # chunks of each sequence
    later = [i for peer in range(rank + 1, world) for i in (peer, 2 * world - 1 - peer)]
    sequences = [x for x in zip(problem.cu_seqlens, _local_sequences(problem), strict=False) if x[1][1]]

    def chunks(start: int, n: int, which: Iterable[int]) -> list[Interval]:
        c = n // 2
        return [(start + i * c, start + (i + 1) * c) for i in which]

    def blocks() -> Iterator[Block]:
        for start, (at, n) in sequences:
            half, end = at + n // 2, at + n
            yield from [Block((at, half), k, FULL, 0) for k in chunks(start, n, earlier)]
            yield from [Block((half, end), k, FULL, 1) for k in chunks(start, n, earlier + later)]

    order = [k for start, (_, n) in sequences for k in chunks(start, n, earlier + later)]
    return [zigzag(problem, rank)[0], Step(SEQUENCE, blocks, tuple(order))]


def tree(problem: Problem, rank: int) -> list[Step]:
    """Decode: all queries against one's own keys; the partial results are reduced over the ranks.

    Source: Tree Attention (Shyam et al., 2024)."""
    return [step for step in ring_decode(problem, rank) if step.owner == rank]


def ring_decode(problem: Problem, rank: int) -> list[Step]:
    """Decode: all queries against every rank's keys in turn.

    Source: Ring Attention (Liu et al., 2023), which Tree Attention (Shyam et al., 2024) compares itself with."""
    result = []
    for i in range(problem.world):
        owner = (rank - i) % problem.world
        n = size(problem.layout.shards(problem.cu_seqlens, problem.world)[owner])
        blocks = (Block((0, problem.q_tokens or 0), (0, n), FULL),) if n else ()
        result.append(Step(owner, partial(tuple, blocks)))
    return result


def _whole(problem: Problem) -> tuple[Interval, ...]:
    """All of an equal shard."""
    n = problem.cu_seqlens[-1] // problem.world
    return ((0, n),) if n else ()


def _local_sequences(problem: Problem) -> Iterator[tuple[int, int]]:
    """(local start, local length) of every sequence under an equal per-sequence split."""
    for start, stop in pairwise(problem.cu_seqlens):
        yield start // problem.world, (stop - start) // problem.world


def _tiles(mask: Mask, q: Interval, q_shift: int, k: Interval, k_shift: int, group: int = 0) -> list[Block]:
    """The block that the mask leaves on queries `q` and keys `k` (sequence positions), shifted to local slices."""
    found = tile(mask, q, k)
    if found is None:
        return []
    (a, b), (c, d), left_over = found
    return [Block((a + q_shift, b + q_shift), (c + k_shift, d + k_shift), left_over, group)]
