"""Dilated attention: in segments of w tokens, every d-th token attends every d-th token, for several pairs (w, d).

`mixing=head_groups`: the heads are split into as many groups as there are pairs, the first groups one head larger; group i has
pair i from offset i mod d on, positions that it does not select get 0, and the result is divided by the number of pairs.
`mixing=longnet`: every head has every pair, from offset (head mod d) on, and the pairs are combined by their softmax denominators;
with `weights=detached` no gradient flows through these weights.

A call has several components: plain attention of some heads over every d-th token from an offset on. Since a segment is a multiple
of its rate, these tokens are one stride over the whole sequence, and a component is an ordinary problem over them.
`executors.dilated` runs them. Without torch.

Source: LongNet: Scaling Transformers to 1,000,000,000 Tokens (Ding et al., 2023); head groups as in dilated-attention-pytorch
(Odom, 2023)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, pairwise
from math import lcm
from typing import Any

import numpy as np

from attention.geometry.layouts import CONTIGUOUS, REPLICATED, CuSeqlens, Layout
from attention.geometry.options import Options, one_of
from attention.geometry.schedules import GATHER, LOCAL, LocalSchedule, Problem, Subproblem
from attention.masks.band import Band
from attention.masks.checks import whole_numbers
from attention.masks.documents import as_documents, documents
from attention.masks.mask import Banded, Mask, Padded
from attention.variants.base import Variant, register
from attention.variants.llama3 import PACKED

LONG = 32768  # tokens from which the default pairs are LongNet's for long sequences
SHORT_PAIRS = ((1024, 1), (2048, 2), (4096, 4))
LONG_PAIRS = ((2048, 1), (4096, 2), (8192, 4))  # and all tokens at rate 8
LONGEST_RATE = 8


@dataclass(frozen=True)
class PairOptions(Options):
    """`segments` and `rates`: lengths in tokens and a rate for each; None: a default by the number of tokens. `mixing` and `weights`:
    see this module."""

    segments: tuple[int, ...] | None = None
    rates: tuple[int, ...] | None = None

    mixing = "head_groups"
    weights = "joint"

    def __post_init__(self) -> None:
        """Raises ValueError for segments and rates that cannot be."""
        for name in ("segments", "rates"):
            if (lengths := getattr(self, name)) is not None:
                object.__setattr__(self, name, whole_numbers(name, lengths, 1))
        segments, rates = self.segments or (), self.rates or ()
        if len(segments) != len(rates) or self.segments == ():
            lists = ", ".join(
                f"{name}={x and list(x)}" for name, x in (("segments", self.segments), ("rates", self.rates))
            )
            raise ValueError(f"{lists}: give lists of one length, or neither")
        for segment, rate in zip(segments, rates, strict=True):
            if segment % rate:
                raise ValueError(
                    f"segments={segments}: {segment} is no multiple of its rate {rate}; {-(-segment // rate) * rate} would work"
                )

    def pairs(self, tokens: int) -> tuple[tuple[int, int], ...]:
        """The segment lengths with their rates, for a sequence of so many tokens."""
        if self.segments and self.rates:
            return tuple(zip(self.segments, self.rates, strict=True))
        return SHORT_PAIRS if tokens < LONG else (*LONG_PAIRS, (tokens, LONGEST_RATE))


@dataclass(frozen=True)
class DilatedOptions(PairOptions):
    """`pattern_cache`: the plans of the components are kept from call to call. `memory_pool`: so are buffers that a call writes and
    no result needs."""

    mixing: str = one_of(("head_groups", "longnet"), "head_groups")
    weights: str = one_of(("joint", "detached"), "joint")
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

    def check(self, heads: int, kv_heads: int, world: int) -> None:
        super().check(heads, kv_heads, world)
        if self.mixing == "longnet":
            return
        if self.weights == "detached":
            raise ValueError(
                "weights=detached: mixing=head_groups has no weights; use mixing=longnet, or weights=joint"
            )
        groups = len(self.segments or SHORT_PAIRS)
        if heads < groups:
            raise ValueError(
                f"heads={heads}: mixing=head_groups gives each of {groups} segment lengths a group of heads; use at least "
                f"{groups} heads, or mixing=longnet"
            )

    def check_call(self, device: str, world: int, sinks: bool) -> None:
        if sinks and self.weights == "detached":
            raise ValueError("sinks: with weights=detached they have no gradient of their own; use weights=joint")


class CopiedOptions(DilatedOptions):
    copies = True


@dataclass(frozen=True)
class Component(Subproblem):
    """Its tokens are `offset`, `offset + rate`, ... of the sequence and, since shards begin at multiples of the rate, of a shard.
    For q, k and v `taken` has its heads, one slice or many of one head each, and `earlier` the most pairs that had some of them
    before, for many slices at least 1: if 0, the component's result can be written at these heads, else it is added or merged."""

    rate: int
    offset: int
    taken: tuple[tuple[slice, ...], ...]
    earlier: tuple[int, ...]


@dataclass(frozen=True)
class Mixture(LocalSchedule):
    """Its parts have the steps of a call; its own are not used. `sequences`: the cumulative lengths without padding. `pairs`: segment
    lengths, at most that of the longest sequence, with their rates."""

    options: PairOptions
    sequences: CuSeqlens
    pairs: tuple[tuple[int, int], ...]

    @lru_cache(maxsize=32)  # noqa: B019  # a few
    def parts(self, problem: Problem, heads: int, kv_heads: int) -> tuple[Subproblem, ...]:
        return tuple(self._components(problem, heads, kv_heads))

    def _components(self, problem: Problem, heads: int, kv_heads: int) -> Iterator[Component]:
        longnet = self.options.mixing == "longnet"
        groups = np.array_split(range(heads), len(self.pairs))
        keys_before: list[int] = []  # the KV heads of earlier groups
        for pair, (segment, rate) in enumerate(self.pairs):
            for offset in range(min(rate, heads)) if longnet else [pair % rate]:
                q_heads = range(offset, heads, rate) if longnet else groups[pair].tolist()
                most = -(-segment // rate)  # tokens of a segment
                selected = [len(range(a + offset, b, rate)) for a, b in pairwise(self.sequences)]
                lengths = tuple(min(most, n - i) for n in selected for i in range(0, n, most))
                if not q_heads or not lengths:  # all of its tokens are padding
                    continue
                # once each if every KV head serves as many of the heads, else one for each query head
                key_heads = [head * kv_heads // heads for head in q_heads]
                once = sorted(set(key_heads))
                if sorted(once * (len(q_heads) // len(once))) == key_heads:
                    key_heads = once
                q, kv = _slices(q_heads), _slices(key_heads)
                kv_earlier = max(pair if longnet else keys_before.count(key_heads[0]), len(kv) > 1)
                keys_before += set(key_heads)

                form, tokens = problem.form, len(range(offset, problem.cu_seqlens[-1], rate))
                ranks = 1 if problem.layout.replicated else problem.world
                fold = copies = 1
                if len(set(lengths)) == 1 and sum(lengths) == tokens and len(lengths) % ranks == 0:
                    # no key travels, and equal segments are a batch
                    tokens, fold, copies, ranks = lengths[0], len(lengths) // ranks, ranks, 1
                elif lengths != (tokens,):
                    form = Padded(documents(lengths, Banded(problem.band)), tokens - sum(lengths))
                within = Problem((0, tokens), ranks, form, CONTIGUOUS, CONTIGUOUS, GATHER if ranks > 1 else LOCAL)
                earlier = pair if longnet else 0, kv_earlier, kv_earlier
                yield Component(len(q_heads), len(key_heads), within, fold, copies, rate, offset, (q, kv, kv), earlier)

    def note(self, problem: Problem) -> str:
        return f"pairs of segment and rate: {self.pairs}"


def _slices(numbers: Sequence[int]) -> tuple[slice, ...]:
    """One slice of these numbers where a stride gives them, else one for each."""
    strides = {b - a for a, b in pairwise(numbers)} or {1}
    if len(strides) == 1 and 0 not in strides:
        return (slice(numbers[0], numbers[-1] + 1, *strides),)
    return tuple(slice(n, n + 1) for n in numbers)


class Dilated(Variant[Any]):
    def border(self, world: int, options: Any) -> Layout:
        """Each of several shards begins at a multiple of every rate."""
        if self.layout.replicated or world == 1:
            return self.layout
        return replace(self.layout, chunks=lcm(*(options.rates or (LONGEST_RATE,))))

    def problem(
        self,
        cu_seqlens: CuSeqlens,
        world: int,
        mask: Band | Mask,
        options: Any = None,
        q_tokens: int | None = None,
    ) -> Problem:
        chosen, sequences = self.parse(options), cu_seqlens
        if isinstance(mask, Padded):
            lengths, _ = as_documents(mask.mask, cu_seqlens[-1] - mask.padding)
            mask, sequences = mask.mask, tuple(accumulate(lengths, initial=0))
        pairs = chosen.pairs(sequences[-1])
        unit = lcm(*(rate for _, rate in pairs))
        for start in sequences[:-1]:
            if start % unit:
                raise ValueError(
                    f"cu_seqlens: a sequence begins at {start}, between selected tokens; pad sequences to multiples of {unit}"
                )
        longest = max(b - a for a, b in pairwise(sequences))
        mixture = Mixture(chosen, sequences, tuple((min(segment, longest), rate) for segment, rate in pairs))
        whole = super().problem(cu_seqlens, world, self.form(mask, sequences), chosen)
        return replace(whole, schedule=mixture)


SOURCE = "LongNet (Ding et al., 2023); head groups as in dilated-attention-pytorch (Odom, 2023)"

IMPROVED = register(
    Dilated(
        name="dilated_improved",
        summary="dilated on strided views: equal segments as one batch, results merged in place",
        source=SOURCE,
        use="dilated attention where one GPU holds the sequence",
        executor="dilated",
        layout=REPLICATED,
        schedule=LOCAL,
        options=DilatedOptions,
        windows=False,
        mixes=True,
    )
)
register(
    replace(
        IMPROVED,
        name="dilated",
        summary="LongNet's dilated attention on one rank: a call for each pair and offset, on copies",
        use="the plain form, to compare dilated_improved with",
        options=CopiedOptions,
    )
)
register(
    replace(
        IMPROVED,
        name="dilated_multihead",
        summary="dilated_improved within multi-head attention: a benchmark of it has the projections and LayerNorm, too",
        source="LongNet (Ding et al., 2023); the module as in dilated-attention-pytorch (Odom, 2023)",
        use="the time of a whole layer's dilated attention",
    )
)
register(
    replace(
        IMPROVED,
        name="ring_dilated",
        summary="dilated attention on contiguous shards: only the selected keys of segments that ranks share travel",
        source="LongNet (Ding et al., 2023), section 3.1: distributed training",
        use="dilated attention over sequences that one GPU does not hold",
        layout=PACKED,
    )
)
