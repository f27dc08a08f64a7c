"""Mixtures of strided attentions. A component is plain attention of some heads over every d-th token, from an offset on, within
segments of the sequence. Since a segment is a multiple of its rate, the tokens that a component selects are one stride over the
whole sequence, and a component is an ordinary problem over them. Pure Python.

Source: LongNet: Scaling Transformers to 1,000,000,000 Tokens (Ding et al., 2023)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

from attention.geometry.layouts import CONTIGUOUS, REPLICATED, CuSeqlens
from attention.geometry.schedules import GATHER, LOCAL, Buffers, Problem, Schedule, Step
from attention.masks.documents import Documents
from attention.masks.mask import Banded, Mask
from attention.masks.padded import Padded
from attention.memo import memo

MIXINGS = ("head_groups", "longnet")
WEIGHTS = ("joint", "detached")


@dataclass(frozen=True)
class Component:
    """`pair`: the number of its pair of segment length and rate. `heads`: its query heads; `kv_heads`: one KV head for each
    equal run of them, in order. Its tokens are `offset`, `offset + rate`, ... of the sequence, or where no key travels
    (`local`) of the rank's shard.

    `problem`: over these tokens. With `fold` > 1 it is over one of so many equal segments, side by side, which are computed
    as a batch. `copies`: the ranks that each have such a problem."""

    pair: int
    heads: tuple[int, ...]
    kv_heads: tuple[int, ...]
    rate: int
    offset: int
    problem: Problem
    fold: int = 1
    copies: int = 1

    @property
    def local(self) -> bool:
        return self.problem.world == 1

    @property
    def tokens(self) -> int:
        """Of a rank."""
        return self.fold * self.problem.cu_seqlens[-1] // self.problem.world

    def place(self, rank: int) -> int:
        """The place of a rank in the problem's schedule."""
        return 0 if self.local else rank


@dataclass(frozen=True)
class Mixture(Schedule):
    """A schedule without steps of its own: its components have them. `sequences`: the cumulative lengths without padding.
    `pairs`: segment lengths with their rates. `asked`: the same before segments longer than any sequence were cut to it.
    `by_default`: nobody named the pairs."""

    sequences: CuSeqlens
    pairs: tuple[tuple[int, int], ...]
    mixing: str
    asked: tuple[tuple[int, int], ...] = ()
    by_default: bool = False

    def buffers(self, problem: Problem, rank: int) -> Buffers:
        raise NotImplementedError("a mixture has no steps; its components have them")

    def steps(self, problem: Problem, rank: int) -> tuple[Step, ...]:
        return ()

    def assigned(self, heads: int) -> Iterator[tuple[int, int, tuple[int, ...]]]:
        """(pair, offset, query heads) of each component."""
        if self.mixing == "longnet":
            for pair, (_, rate) in enumerate(self.pairs):
                for offset in range(min(rate, heads)):
                    yield pair, offset, tuple(range(offset, heads, rate))
            return
        each, more = divmod(heads, len(self.pairs))
        first = 0
        for pair, (_, rate) in enumerate(self.pairs):
            n = each + (pair < more)
            yield pair, pair % rate, tuple(range(first, first + n))
            first += n

    def note(self, problem: Problem) -> str | None:
        """The pairs where nobody named them, which segments were cut to the sequence, and which are shorter than the others of
        their pair."""
        found = []
        if self.by_default:
            segments, rates = map(_listed, zip(*self.asked, strict=True))
            found.append(f"segments=null are {segments} with rates {rates}")
        if cut := sorted({a for (a, _), (b, _) in zip(self.asked, self.pairs, strict=False) if a > b}):
            found.append(
                f"no sequence is longer than {max(dict(self.pairs))} tokens, so segments of {_listed(cut)} are as long"
            )
        short = []
        for segment in dict(self.pairs):
            lengths = [length % segment for a, b in pairwise(self.sequences) if (length := b - a) > segment]
            if any(lengths):
                short.append(f"{segment} (to {min(filter(None, lengths))} tokens)")
        if short:
            found.append(f"the last segment of a sequence is shorter: of {', '.join(short)}")
        return "; ".join(found) or None


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def components(problem: Problem, heads: int, kv_heads: int) -> tuple[Component, ...]:
    """The components of a mixture's problem for these numbers of heads; empty for another problem."""
    return _components(problem, heads, kv_heads) if isinstance(problem.schedule, Mixture) else ()


def _weight(found: tuple[Component, ...], *_: object) -> int:
    return sum(1 + (len(c.problem.form.lengths) if isinstance(c.problem.form, Documents) else 0) for c in found)


@memo(_weight)
def _components(problem: Problem, heads: int, kv_heads: int) -> tuple[Component, ...]:
    mixture = problem.schedule
    assert isinstance(mixture, Mixture)
    found = []
    for pair, offset, numbers in mixture.assigned(heads):
        segment, rate = mixture.pairs[pair]
        if numbers and offset < problem.cu_seqlens[-1]:
            of = Component(pair, numbers, keys_of(numbers, heads // kv_heads), rate, offset, problem)
            found.append(_divided(of, segment, mixture.sequences))
    return tuple(found)


def _divided(of: Component, segment: int, sequences: CuSeqlens) -> Component:
    """The component with its own problem in place of the whole one: local where no key travels."""
    whole, rate, offset = of.problem, of.rate, of.offset
    total = len(range(offset, whole.cu_seqlens[-1], rate))
    lengths = selected(sequences, segment, rate, offset)
    alone = whole.world == 1 or whole.layout.replicated
    ranks = 1 if alone else whole.world
    equal = len(set(lengths)) == 1 and sum(lengths) == total and len(lengths) % ranks == 0
    if equal:
        one = Problem((0, lengths[0]), 1, whole.band, REPLICATED, REPLICATED, LOCAL)
        return replace(of, problem=one, fold=len(lengths) // ranks, copies=ranks)
    form: Mask = Documents(lengths, Banded.of(whole.band))
    if sum(lengths) < total:
        form = Padded(form, total - sum(lengths))
    if alone:
        return replace(of, problem=Problem((0, total), 1, form, REPLICATED, REPLICATED, LOCAL))
    within = whole.band if lengths == (total,) else form
    return replace(of, problem=Problem((0, total), whole.world, within, CONTIGUOUS, CONTIGUOUS, GATHER))


def selected(sequences: CuSeqlens, segment: int, rate: int, offset: int) -> tuple[int, ...]:
    """The number of selected tokens in each segment that has any."""
    borders = ((start, min(start + segment, b)) for a, b in pairwise(sequences) for start in range(a, b, segment))
    return tuple(n for start, stop in borders if (n := len(range(start + offset, stop, rate))))


def keys_of(heads: tuple[int, ...], group: int) -> tuple[int, ...]:
    """The KV heads of these query heads, where each KV head of the whole serves `group` of them: once each if every one
    serves as many of these heads, else one for each query head."""
    each = [head // group for head in heads]
    once = tuple(dict.fromkeys(each))
    n = len(heads) // len(once)
    return once if [x for x in once for _ in range(n)] == each else tuple(each)


@lru_cache(maxsize=1024)
def strided(numbers: tuple[int, ...]) -> slice | None:
    """The slice that gives these numbers; None where no slice does."""
    step = numbers[1] - numbers[0] if len(numbers) > 1 else 1
    if step < 1 or numbers != tuple(range(numbers[0], numbers[-1] + 1, step)):
        return None
    return slice(numbers[0], numbers[-1] + 1, step)


@dataclass(frozen=True)
class Meeting:
    """How components meet in a result over query heads or over KV heads. `fresh`: for each component, whether it is the first
    at all its places. `covered`: whether the fresh ones together have every place. `most`: components at one place."""

    fresh: tuple[bool, ...]
    covered: bool
    most: int


def meeting(parts: Sequence[Component], keys: bool, heads: int, tokens: int) -> Meeting:
    """parts: all components. keys: of KV heads. tokens: of a rank. Components of one pair never meet: their heads or their
    offsets differ."""
    fresh, places = [], 0
    pairs_of: dict[int, set[int]] = {}
    for part in parts:
        numbers = part.kv_heads if keys else part.heads
        once = len(set(numbers)) == len(numbers) and strided(numbers) is not None
        fresh.append(once and all(pairs_of.get(n, set()) <= {part.pair} for n in numbers))
        places += len(numbers) * part.tokens if fresh[-1] else 0
        for n in numbers:
            pairs_of.setdefault(n, set()).add(part.pair)
    return Meeting(tuple(fresh), places == heads * tokens, max(map(len, pairs_of.values())))
