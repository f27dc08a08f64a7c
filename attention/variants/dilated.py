"""Dilated attention: in segments of w tokens, every d-th token attends every d-th token, for several pairs (w, d).

`mixing=head_groups`: the heads are split into as many groups as there are pairs, the first groups one head larger; group i has
pair i from offset i mod d on, positions that it does not select get 0, and the result is divided by the number of pairs.
`mixing=longnet`: every head has every pair, from offset (head mod d) on, and the pairs are combined by their softmax denominators;
with `weights=detached` no gradient flows through these weights.

A call has several components: plain attention of some heads over every d-th token from an offset on. Since a segment is a multiple
of its rate, these tokens are one stride over the whole sequence, and a component is an ordinary problem over them.
`executors.dilated` runs them. Pure Python.

Source: LongNet: Scaling Transformers to 1,000,000,000 Tokens (Ding et al., 2023); head groups as in dilated-attention-pytorch
(Odom, 2023)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise, product
from math import lcm
from typing import Any, NamedTuple

from attention.geometry.layouts import CONTIGUOUS, REPLICATED, CuSeqlens, Layout
from attention.geometry.options import Options, one_of, option
from attention.geometry.schedules import GATHER, LOCAL, Buffers, Problem, Schedule, Step, Subproblem
from attention.masks.band import Band
from attention.masks.documents import Documents
from attention.masks.mask import Banded, Mask
from attention.masks.padded import Padded
from attention.masks.sequences import one_band
from attention.memo import memo
from attention.variants.base import Chosen, Variant, register
from attention.variants.llama3 import PACKED

LONG = 32768  # tokens from which the default pairs are LongNet's for long sequences
SHORT_PAIRS = ((1024, 1), (2048, 2), (4096, 4))
LONG_PAIRS = ((2048, 1), (4096, 2), (8192, 4))  # and all tokens at rate 8
LONGEST_RATE = 8


def _shown(x: object) -> str:
    return "null" if x is None else str(list(x) if isinstance(x, tuple) else x)


@dataclass(frozen=True)
class PairOptions(Options):
    """`segments` and `rates`: lengths in tokens and a rate for each; None: a default by the number of tokens."""

    segments: tuple[int, ...] | None = option(None)
    rates: tuple[int, ...] | None = option(None)

    def __post_init__(self) -> None:
        """Raises ValueError for segments and rates that cannot be."""
        for name in ("segments", "rates"):
            given = getattr(self, name)
            whole = isinstance(given, list | tuple) and given and all(type(x) is int and x > 0 for x in given)
            if given is not None and not whole:
                raise ValueError(
                    f"{name}={_shown(given)}: must be a list of whole numbers of at least 1, or null for the default"
                )
            object.__setattr__(self, name, given and tuple(given))
        segments, rates = self.segments or (), self.rates or ()
        if len(segments) != len(rates):
            raise ValueError(
                f"segments={_shown(self.segments)}: each has one of rates={_shown(self.rates)}; give lists of one length, "
                "or neither"
            )
        for segment, rate in zip(segments, rates, strict=True):
            if rate > segment:
                raise ValueError(
                    f"rates={_shown(rates)}: rate {rate} is above its segment of {segment}; use at most {segment}"
                )
            if segment % rate:
                down, up = segment // rate * rate, -(-segment // rate) * rate
                raise ValueError(
                    f"segments={_shown(segments)}: {segment} is no multiple of its rate {rate}; {down} or {up} would work"
                )

    @property
    def mixing(self) -> str:
        """How the pairs are divided among the heads: see this module."""
        return "head_groups"

    @property
    def weights(self) -> str:
        """Whether gradients flow through the weights of what is mixed: see this module."""
        return "joint"

    @property
    def memory_pool(self) -> bool:
        return False

    def plain(self) -> dict[str, Any]:
        return {name: list(x) if isinstance(x, tuple) else x for name, x in super().plain().items()}

    def pairs(self, tokens: int) -> tuple[tuple[int, int], ...]:
        """The segment lengths with their rates, for a sequence of so many tokens."""
        if self.segments and self.rates:
            return tuple(zip(self.segments, self.rates, strict=True))
        return SHORT_PAIRS if tokens < LONG else (*LONG_PAIRS, (tokens, LONGEST_RATE))

    @property
    def unit(self) -> int:
        """What every rate divides."""
        return lcm(*self.rates) if self.rates else LONGEST_RATE


@dataclass(frozen=True)
class DilatedOptions(PairOptions):
    """`pattern_cache`: the plans of the components are kept from call to call. `memory_pool`: so are buffers that a call writes and
    no result needs."""

    mixing: str = option("head_groups")
    weights: str = option("joint")
    pattern_cache: bool = one_of((False, True), True)
    memory_pool: bool = one_of((False, True), False)

    copies = False  # whether components are copied, and their results copied or merged into the whole
    # read by the gather executor
    heads_k_stride = None
    grouping = "separate"

    @property
    def uncapturable(self) -> str | None:
        return (
            "memory_pool=true keeps buffers outside of the graph; use memory_pool=false" if self.memory_pool else None
        )

    def __post_init__(self) -> None:
        """Raises ValueError also for a mixing and weights that cannot be."""
        super().__post_init__()
        for name, known in (("mixing", ("head_groups", "longnet")), ("weights", ("joint", "detached"))):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}={getattr(self, name)!r}: must be {' or '.join(known)}")
        if self.weights == "detached" and self.mixing != "longnet":
            raise ValueError(
                "weights=detached: mixing=head_groups has no weights; use mixing=longnet, or weights=joint"
            )

    def check_call(self, device: str, world: int, sinks: bool) -> None:
        if sinks and self.weights == "detached":
            raise ValueError("sinks: with weights=detached they have no gradient of their own; use weights=joint")

    def check(self, heads: int, kv_heads: int, world: int) -> None:
        super().check(heads, kv_heads, world)
        groups = len(self.segments or SHORT_PAIRS)
        if self.mixing == "head_groups" and heads < groups:
            raise ValueError(
                f"heads={heads}: mixing=head_groups gives each of {groups} segment lengths a group of heads; use at least "
                f"{groups} heads, or mixing=longnet"
            )


class CopiedOptions(DilatedOptions):
    copies = True


class HeadNumbers(NamedTuple):
    """A component's query or KV heads. `slice`: of their numbers, None where no slice gives them. `earlier`: the pairs before this
    one that have some of them."""

    numbers: tuple[int, ...]
    slice: slice | None
    earlier: int

    @property
    def first(self) -> bool:
        """Whether the component's result can be written at these heads; else it is added or merged."""
        return self.slice is not None and not self.earlier


@dataclass(frozen=True)
class Component(Subproblem):
    """Its tokens are `offset`, `offset + rate`, ... of the sequence and, since shards begin at multiples of the rate, of a shard."""

    pair: int
    rate: int
    offset: int
    q: HeadNumbers
    kv: HeadNumbers


@dataclass(frozen=True)
class Mixture(Schedule):
    """A schedule without steps of its own: its components have them. `sequences`: the cumulative lengths without padding."""

    options: PairOptions
    sequences: CuSeqlens

    @cached_property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        """Segment lengths, at most that of the longest sequence, with their rates."""
        longest = max(b - a for a, b in pairwise(self.sequences))
        return tuple((min(segment, max(longest, 1)), rate) for segment, rate in self.options.pairs(self.sequences[-1]))

    def buffers(self, problem: Problem, rank: int) -> Buffers:
        raise NotImplementedError("a mixture has no steps; its components have them")

    def steps(self, problem: Problem, rank: int) -> tuple[Step, ...]:
        return ()

    def assigned(self, heads: int) -> Iterator[tuple[int, int, range]]:
        """(pair, offset, query heads) of each component."""
        each, more = divmod(heads, len(self.pairs))
        for pair, (_, rate) in enumerate(self.pairs):
            if self.options.mixing == "longnet":
                yield from ((pair, offset, range(offset, heads, rate)) for offset in range(min(rate, heads)))
            else:
                first, after = (i * each + min(i, more) for i in (pair, pair + 1))
                yield pair, pair % rate, range(first, after)

    def parts(self, problem: Problem, heads: int, kv_heads: int) -> tuple[Subproblem, ...]:
        return _components(problem, heads, kv_heads)

    def note(self, problem: Problem) -> str | None:
        """The pairs where they are not those of the options, and what a memory pool keeps."""
        found = []
        segments, rates = ([*x] for x in zip(*self.pairs, strict=True))
        if (asked := _shown(self.options.segments)) != str(segments):
            cut = f", since no sequence is longer than {max(segments)} tokens" * (
                self.pairs != self.options.pairs(self.sequences[-1])
            )
            found.append(f"segments={asked} are {segments} with rates {rates}{cut}")
        if self.options.memory_pool:
            found.append("memory_pool=true keeps buffers only where three or more pairs meet in bf16 or fp16")
        return "; ".join(found) or None


def _weight(found: tuple[Component, ...], *_: object) -> int:
    return sum(1 + (len(c.problem.form.lengths) if isinstance(c.problem.form, Documents) else 0) for c in found)


@memo(_weight)
def _components(problem: Problem, heads: int, kv_heads: int) -> tuple[Component, ...]:
    mixture = problem.schedule
    assert isinstance(mixture, Mixture)
    found: list[Component] = []
    for pair, offset, numbers in mixture.assigned(heads):
        segment, rate = mixture.pairs[pair]
        lengths = _selected(mixture.sequences, segment, rate, offset)
        if numbers and lengths:  # else all of its tokens are padding
            before = [c for c in found if c.pair < pair]
            q = _heads(tuple(numbers), [(c.pair, c.q) for c in before])
            kv = _heads(_keys_of(numbers, heads // kv_heads), [(c.pair, c.kv) for c in before])
            within = _within(problem, lengths, len(range(offset, problem.cu_seqlens[-1], rate)))
            found.append(Component(len(numbers), len(kv.numbers), *within, pair, rate, offset, q, kv))
    return tuple(found)


def _heads(numbers: tuple[int, ...], before: list[tuple[int, HeadNumbers]]) -> HeadNumbers:
    step = max(1, numbers[1] - numbers[0]) if len(numbers) > 1 else 1
    strided = numbers == tuple(range(numbers[0], numbers[-1] + 1, step))
    earlier = {pair for pair, heads in before if not set(numbers).isdisjoint(heads.numbers)}
    return HeadNumbers(numbers, slice(numbers[0], numbers[-1] + 1, step) if strided else None, len(earlier))


def _within(whole: Problem, lengths: tuple[int, ...], tokens: int) -> tuple[Problem, int, int]:
    """The problem over a component's tokens, of which the segments have these lengths, with `fold` and `copies` of `Subproblem`: local
    where no key travels, and of equal segments over one of them."""
    alone = whole.world == 1 or whole.layout.replicated
    ranks = 1 if alone else whole.world
    if len(set(lengths)) == 1 and sum(lengths) == tokens and len(lengths) % ranks == 0:
        one = Problem((0, lengths[0]), 1, whole.band, REPLICATED, REPLICATED, LOCAL)
        return one, len(lengths) // ranks, ranks
    form: Mask = Documents(lengths, Banded.of(whole.band))
    if sum(lengths) < tokens:
        form = Padded(form, tokens - sum(lengths))
    if alone:
        return Problem((0, tokens), 1, form, REPLICATED, REPLICATED, LOCAL), 1, 1
    within = whole.band if lengths == (tokens,) else form
    return Problem((0, tokens), whole.world, within, CONTIGUOUS, CONTIGUOUS, GATHER), 1, 1


def _selected(sequences: CuSeqlens, segment: int, rate: int, offset: int) -> tuple[int, ...]:
    """The number of selected tokens in each segment that has any."""
    borders = ((start, min(start + segment, b)) for a, b in pairwise(sequences) for start in range(a, b, segment))
    return tuple(n for start, stop in borders if (n := len(range(start + offset, stop, rate))))


def _keys_of(heads: Sequence[int], group: int) -> tuple[int, ...]:
    """The KV heads of these query heads, where each KV head of the whole serves `group` of them: once each if every one
    serves as many of these heads, else one for each query head."""
    each = [head // group for head in heads]
    once = tuple(dict.fromkeys(each))
    n = len(heads) // len(once)
    return once if [x for x in once for _ in range(n)] == each else tuple(each)


class Dilated(Variant[DilatedOptions]):
    def border(self, world: int, options: DilatedOptions) -> Layout:
        """Each of several shards begins at a multiple of every rate."""
        return self.layout if self.layout.replicated or world == 1 else replace(self.layout, chunks=options.unit)

    def problem(
        self,
        cu_seqlens: CuSeqlens,
        world: int,
        mask: Band | Mask,
        options: DilatedOptions | Mapping[str, Any] | None = None,
        q_tokens: int | None = None,
    ) -> Problem:
        return mixture_problem(self, cu_seqlens, world, mask, self.parse(options))


def mixture_problem(
    variant: Variant[Chosen], cu_seqlens: CuSeqlens, world: int, mask: Band | Mask, options: PairOptions
) -> Problem:
    """The problem of dilated attention, as `Variant.problem`."""
    sequences, found = _without_padding(mask, cu_seqlens)
    if isinstance(found, Mask) or found.windowed:
        given = f"mask={found}" if isinstance(found, Mask) else f"window=({found.left}, {found.right})"
        raise ValueError(f"{given}: {variant.name} takes full and causal attention only; leave masks and windows out")
    rates = [rate for _, rate in options.pairs(sequences[-1])]
    for start, rate in product(sequences[:-1], rates):
        if start % rate:
            raise ValueError(
                f"cu_seqlens: a sequence begins at {start}, which is no multiple of the rate {rate}; pad sequences to "
                f"multiples of {lcm(*rates)}"
            )
    border = variant.border(world, options)  # type: ignore[arg-type]
    border.check(cu_seqlens, world)
    return Problem(cu_seqlens, world, found, border, border, Mixture(options, sequences))


def _without_padding(mask: Band | Mask, cu_seqlens: CuSeqlens) -> tuple[CuSeqlens, Band | Mask]:
    """The sequences without padding, and the band within each; a mask where it is none."""
    if isinstance(mask, Band):
        return cu_seqlens, mask
    if isinstance(mask, Padded):
        inner = mask.mask
        lengths = inner.lengths if isinstance(inner, Documents) else (cu_seqlens[-1] - mask.padding,)
        cu_seqlens, mask = tuple(accumulate(lengths, initial=0)), inner
    return cu_seqlens, one_band(mask, cu_seqlens)


DIVIDED = Mixture(PairOptions(), (0, 0))  # of no call: each call has its own
SOURCE = "LongNet (Ding et al., 2023); head groups as in dilated-attention-pytorch (Odom, 2023)"

DILATED = register(
    Dilated(
        name="dilated",
        summary="LongNet's dilated attention on one rank: a call for each pair and offset, on copies",
        source=SOURCE,
        use="the plain form, to compare dilated_improved with",
        executor="dilated",
        layout=REPLICATED,
        schedule=DIVIDED,
        options=CopiedOptions,
        windows=False,
        mixes=True,
    )
)
register(
    replace(
        DILATED,
        name="dilated_improved",
        summary="dilated on strided views: equal segments as one batch, results merged in place",
        use="dilated attention where one GPU holds the sequence",
        options=DilatedOptions,
    )
)
register(
    replace(
        DILATED,
        name="dilated_multihead",
        summary="dilated_improved within multi-head attention: a benchmark of it has the projections and LayerNorm, too",
        source="LongNet (Ding et al., 2023); the module as in dilated-attention-pytorch (Odom, 2023)",
        use="the time of a whole layer's dilated attention",
        options=DilatedOptions,
    )
)
register(
    replace(
        DILATED,
        name="ring_dilated",
        summary="dilated attention on contiguous shards: only the selected keys of segments that ranks share travel",
        source="LongNet (Ding et al., 2023), section 3.1: distributed training",
        use="dilated attention over sequences that one GPU does not hold",
        layout=PACKED,
        options=DilatedOptions,
    )
)
