"""Dilated attention: in segments of w tokens, every d-th token attends every d-th token, for several pairs (w, d).

`mixing=head_groups`: the heads are split into as many groups as there are pairs, the first groups one head larger; group i has
pair i from offset i mod d on, positions that it does not select get 0, and the result is divided by the number of pairs.
`mixing=longnet`: every head has every pair, from offset (head mod d) on, and the pairs are combined by their softmax denominators;
with `weights=detached` no gradient flows through these weights.

Source: LongNet: Scaling Transformers to 1,000,000,000 Tokens (Ding et al., 2023); head groups as in dilated-attention-pytorch
(Odom, 2023)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from math import lcm
from typing import Any

from attention.geometry.layouts import REPLICATED, CuSeqlens, Layout
from attention.geometry.mixtures import MIXINGS, WEIGHTS, Mixture
from attention.geometry.options import MixtureOptions, Options, option
from attention.geometry.schedules import Problem
from attention.masks.band import Band
from attention.masks.documents import Documents
from attention.masks.mask import Mask
from attention.masks.padded import Padded
from attention.masks.sequences import one_band
from attention.variants.base import Chosen, Variant, register
from attention.variants.llama3 import PACKED

LONG = 32768  # tokens from which the default pairs are LongNet's for long sequences
SHORT_PAIRS = ((1024, 1), (2048, 2), (4096, 4))
LONG_PAIRS = ((2048, 1), (4096, 2), (8192, 4))  # and all tokens at rate 8
LONGEST_RATE = 8
DIVIDED = Mixture((0, 0), (), MIXINGS[0])  # of no call: each call has its own


@dataclass(frozen=True)
class PairOptions(Options):
    """`segments` and `rates`: lengths in tokens and a rate for each; None: a default by the number of tokens."""

    segments: tuple[int, ...] | None = option(None)
    rates: tuple[int, ...] | None = option(None)

    def __post_init__(self) -> None:
        for name in ("segments", "rates"):
            if isinstance(given := getattr(self, name), list):
                object.__setattr__(self, name, tuple(given))

    @property
    def mixing(self) -> str:
        """How the pairs are divided among the heads: see this module."""
        return "head_groups"

    @property
    def weights(self) -> str:
        """Whether gradients flow through the weights of what is mixed: see this module."""
        return "joint"

    def plain(self) -> dict[str, Any]:
        return {name: list(x) if isinstance(x, tuple) else x for name, x in super().plain().items()}

    def check(self, heads: int, kv_heads: int, world: int) -> None:
        super().check(heads, kv_heads, world)
        self.check_pairs()

    def check_pairs(self) -> None:
        """Raises ValueError for segments and rates that cannot be."""
        segments, rates = self._numbers("segments"), self._numbers("rates")
        if segments is None and rates is None:
            return
        if segments is None or rates is None or len(segments) != len(rates):
            raise ValueError(
                f"segments={_shown(segments)}: each has one of rates={_shown(rates)}; give lists of one length, or neither"
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

    def _numbers(self, name: str) -> tuple[int, ...] | None:
        given = getattr(self, name)
        if given is None:
            return None
        whole = isinstance(given, tuple) and all(type(x) is int and x > 0 for x in given)
        if not whole or not given:
            raise ValueError(
                f"{name}={_shown(given)}: must be a list of whole numbers of at least 1, or null for the default"
            )
        return tuple(given)

    def pairs(self, tokens: int) -> tuple[tuple[int, int], ...]:
        """The segment lengths with their rates, for a sequence of so many tokens. Raises ValueError as `check_pairs`."""
        self.check_pairs()
        if self.segments is not None and self.rates is not None:
            return tuple(zip(self.segments, self.rates, strict=True))
        return SHORT_PAIRS if tokens < LONG else (*LONG_PAIRS, (tokens, LONGEST_RATE))

    @property
    def unit(self) -> int:
        """What every rate divides."""
        self.check_pairs()
        return lcm(*self.rates) if self.rates else LONGEST_RATE


@dataclass(frozen=True)
class DilatedOptions(MixtureOptions, PairOptions):
    mixing: str = option("head_groups")

    def check(self, heads: int, kv_heads: int, world: int) -> None:
        super().check(heads, kv_heads, world)
        groups = 3 if self.segments is None else len(self.segments)
        if self.mixing == "head_groups" and heads < groups:
            raise ValueError(
                f"heads={heads}: mixing=head_groups gives each of {groups} segment lengths a group of heads; use at least "
                f"{groups} heads, or mixing=longnet"
            )

    def check_pairs(self) -> None:
        """Also for a mixing and weights that cannot be."""
        for name, known in (("mixing", MIXINGS), ("weights", WEIGHTS)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}={getattr(self, name)!r}: must be {' or '.join(known)}")
        if self.weights == "detached" and self.mixing != "longnet":
            raise ValueError(
                "weights=detached: mixing=head_groups has no weights; use mixing=longnet, or weights=joint"
            )
        super().check_pairs()


@dataclass(frozen=True)
class CopiedOptions(DilatedOptions):
    @property
    def copies(self) -> bool:
        return True


def _shown(x: object) -> str:
    return "null" if x is None else str(list(x) if isinstance(x, tuple) else x)


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
    sequences, found = _within(mask, cu_seqlens)
    if isinstance(found, Mask) or found.windowed:
        given = f"mask={found}" if isinstance(found, Mask) else f"window=({found.left}, {found.right})"
        raise ValueError(f"{given}: {variant.name} takes full and causal attention only; leave masks and windows out")
    pairs = options.pairs(sequences[-1])
    for start in sequences[:-1]:
        for _, rate in pairs:
            if start % rate:
                raise ValueError(
                    f"cu_seqlens: a sequence begins at {start}, which is no multiple of the rate {rate}; pad sequences to "
                    f"multiples of {lcm(*(d for _, d in pairs))}"
                )
    border = variant.border(world, options)  # type: ignore[arg-type]
    border.check(cu_seqlens, world)
    longest = max(b - a for a, b in pairwise(sequences))
    within = tuple((min(segment, max(longest, 1)), rate) for segment, rate in pairs)
    mixture = Mixture(sequences, within, options.mixing, pairs, options.segments is None)
    return Problem(cu_seqlens, world, found, border, border, mixture)


def _within(mask: Band | Mask, cu_seqlens: CuSeqlens) -> tuple[CuSeqlens, Band | Mask]:
    """The sequences without padding, and the band within each; a mask where it is none."""
    if isinstance(mask, Band):
        return cu_seqlens, mask
    if isinstance(mask, Padded):
        inner = mask.mask
        lengths = inner.lengths if isinstance(inner, Documents) else (cu_seqlens[-1] - mask.padding,)
        cu_seqlens, mask = tuple(accumulate(lengths, initial=0)), inner
    return cu_seqlens, one_band(mask, cu_seqlens)


SOURCE = "LongNet (Ding et al., 2023); head groups as in dilated-attention-pytorch (Odom, 2023)"
LEFT_OUT = "dilated attention gives other numbers than attention under the call's mask"

DILATED = register(
    Dilated(
        name="dilated",
        summary="LongNet's dilated attention on one rank: a call for each pair and offset, on copies",
        source=SOURCE,
        use="the plain form, to compare dilated_improved with",
        executor="mixture",
        layout=REPLICATED,
        schedule=DIVIDED,
        options=CopiedOptions,
        windows=False,
        mixes=True,
        benchmark_only=LEFT_OUT,
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
