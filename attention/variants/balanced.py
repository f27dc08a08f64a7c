"""Balanced: every rank has as many tokens and nearly as many (query, key) pairs of one given mask, by windows of the
sequence that hold half of its tokens and half of its pairs; each rank gathers only the keys that its queries see.

No fixed layout balances a mask that is neither full nor causal. The layout is made for a mask, so the mask comes before the
shards: `attention.make("balanced", mask=mask)`.

Source: the dispatch of MagiAttention (SandAI, 2025) balances chunks by their areas; the windows are ours."""

from __future__ import annotations

from dataclasses import dataclass, replace

from attention.geometry.even_shards import even_shards
from attention.geometry.layouts import IN_ORDER, CuSeqlens, Layout, Shard
from attention.geometry.options import GatherOptions
from attention.geometry.schedules import GatherSchedule, Problem, Schedule, rank_pairs
from attention.masks.band import CAUSAL, Band
from attention.masks.mask import Banded, Mask, Padded
from attention.masks.overlap import both
from attention.masks.rectangles import pairs
from attention.masks.sequences import of_sequences
from attention.memo import memo
from attention.variants.base import Variant, register

UNEVEN = 1.05  # the most pairs of a rank over the mean above which a result says it
DEFAULT = Banded(CAUSAL)


@dataclass(frozen=True)
class BalancedOptions(GatherOptions):
    """`mask`: what the layout is made for, and the mask of every call; None: a layout for calls with causal=True.
    `tokens`: of the whole sequence; None: any number."""

    from_call = ("mask", "tokens")

    mask: Mask | None = None  # type: ignore[misc]
    tokens: int | None = None

    @property
    def made_for(self) -> Mask:
        return DEFAULT if self.mask is None else self.mask

    def check(self, heads: int, kv_heads: int, world: int) -> None:
        super().check(heads, kv_heads, world)
        check_options(self)

    def padded(self, padding: int) -> BalancedOptions:
        if not padding:
            return self
        tokens = None if self.tokens is None else self.tokens + padding
        return replace(self, mask=Padded(self.made_for, padding), tokens=tokens)


def check_options(options: BalancedOptions) -> None:
    if not isinstance(options.made_for, Mask):
        raise ValueError(f"mask={options.mask!r}: must be one of attention.masks, such as masks.chunked(8192)")
    tokens = options.tokens
    if tokens is not None and (type(tokens) is not int or tokens < 1):
        raise ValueError(f"tokens={tokens!r}: must be a whole number of at least 1, or null")


@dataclass(frozen=True)
class MaskSplit:
    """A layout's split for one mask."""

    mask: Mask
    tokens: int | None

    def __call__(self, length: int, world: int) -> tuple[Shard, ...]:
        if self.tokens not in (None, length):
            raise ValueError(f"seq_len={length}: this balanced layout was made for tokens={self.tokens}; make another")
        return assigned(self.mask, length, world)


class _Balanced(Variant[BalancedOptions]):
    def outer(self, options: BalancedOptions) -> Layout:
        check_options(options)
        return Layout("balanced", 1, MaskSplit(options.made_for, options.tokens), per_sequence=False)

    def plan(self, options: BalancedOptions, cu_seqlens: CuSeqlens, world: int, mask: Band) -> Schedule:
        asked, made_for = of_sequences(mask, cu_seqlens), options.made_for
        if isinstance(made_for, Padded):  # comes last, so that a causal band need not name it
            asked = Padded(asked, made_for.padding)
        self.check_cut(options, asked, cu_seqlens[-1])
        return self.schedule

    def check_cut(self, options: BalancedOptions, mask: Mask, tokens: int) -> None:
        if mask != options.made_for and not within(mask, options.made_for, tokens):
            raise ValueError(
                f"{mask.asked()}: this balanced layout was made for {options.made_for}; "
                'make another: attention.make("balanced", mask=...)'
            )


def within(mask: Mask, other: Mask, tokens: int) -> bool:
    """Whether the other mask keeps all pairs of a mask."""
    return int(pairs(both(mask.rectangles(tokens), other.rectangles(tokens))).sum()) == mask.pairs(tokens)


@memo(lambda shards, *_: sum(map(len, shards)))
def assigned(mask: Mask, length: int, world: int) -> tuple[Shard, ...]:
    """By rank, its parts of the sequence in order; equally many tokens each."""
    if length == 0 or world == 1:
        return IN_ORDER(length, world)
    return even_shards(mask.rectangles(length), length, world)


class BalancedSchedule(GatherSchedule):
    def note(self, problem: Problem) -> str | None:
        """How uneven the ranks are, where a few queries have too many pairs for shards of equally many tokens, or a call
        has another mask than the layout."""
        uneven = balance(problem)
        return f"the busiest rank has {uneven:.2f} times the mean of the ranks' pairs" if uneven > UNEVEN else None


def balance(problem: Problem) -> float:
    """The most pairs of a rank over the mean of all ranks."""
    work = [rank_pairs(problem, rank) for rank in range(problem.world)]
    return max(work) * len(work) / sum(work) if any(work) else 1.0


register(
    _Balanced(
        name="balanced",
        summary="all ranks have nearly as many pairs of a given mask, by its windows; only needed keys gathered",
        source="after MagiAttention's dispatch of chunks by area (SandAI, 2025)",
        use="any mask that is neither full nor causal, and packed batches of real lengths: made for one mask",
        executor="gather",
        layout=Layout("balanced", 1, MaskSplit(DEFAULT, None), per_sequence=False),
        schedule=BalancedSchedule(),
        any_mask=True,
        options=BalancedOptions,
    )
)
