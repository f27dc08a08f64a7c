"""What a variant is: a layout, a schedule, the executor that brings keys to queries, and its options. Pure Python.

A file of this folder declares one algorithm: its layout and schedule, its options, and its variants by `register`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Generic, Literal, TypeVar

from attention.geometry.layouts import CuSeqlens, Layout
from attention.geometry.options import Options
from attention.geometry.schedules import Problem, Schedule, known
from attention.masks.band import CAUSAL, FULL, Band
from attention.masks.mask import Mask
from attention.masks.sequences import one_band

Executor = Literal["ring", "gather", "all_to_all", "tree", "dilated"]
Chosen = TypeVar("Chosen", bound=Options)


@dataclass(frozen=True, kw_only=True)
class Variant(Generic[Chosen]):
    """`source` names the authors or the system and the year, `use` says in a clause when to take it; both stand in the
    first comment of the variant's YAML, too. `layout` is how a rank's q, k and v come in and its out goes back."""

    name: str
    summary: str
    source: str
    use: str
    executor: Executor
    layout: Layout
    schedule: Schedule
    options: type[Chosen]
    causal_only: bool = False
    windows: bool = True
    any_mask: bool = False  # takes masks that are not one band in every sequence
    packs: bool = True  # takes packed batches
    alias_of: str | None = None  # the variant that this one is, by the name that benchmarks of packed batches have
    decode: bool = False  # few replicated queries against sharded keys; forward only
    mixes: bool = False  # computes a mixture of strided attentions instead of attention under the call's mask

    def __reduce__(self) -> tuple[Any, ...]:
        return _registered, (self.name,)

    # These may depend on the options; a variant for which one does overrides it.

    def outer(self, options: Chosen) -> Layout:
        """The layout of keys and values; with head exchange, over groups of ranks instead of ranks."""
        return self.layout

    def q_layout(self, options: Chosen, cu_seqlens: CuSeqlens, world: int, mask: Band) -> Layout:
        """How the queries lie while they are computed on."""
        return self.outer(options)

    def plan(self, options: Chosen, cu_seqlens: CuSeqlens, world: int, mask: Band) -> Schedule:
        return self.schedule

    def check_mask(self, options: Chosen, mask: Band) -> None:
        """Raises ValueError for a mask that the variant can't do."""
        if self.causal_only and mask.right != 0:
            raise self.not_causal("causal=false", able(mask))
        if mask.windowed and not self.windows:
            raise ValueError(f"window=({mask.left}, {mask.right}): {self.name} has no sliding window; {able(mask)} do")

    def takes(self, mask: Band) -> bool:
        """Whether the variant does the mask with its default options."""
        try:
            self.check_mask(self.parse(), mask)
        except ValueError:
            return False
        return True

    def check_cut(self, options: Chosen, mask: Mask, tokens: int) -> None:
        """Raises ValueError for a mask, other than a band, that the variant can't do."""
        if self.decode:
            raise ValueError(f"{mask.asked()}: {self.name}, a decode, takes causal and window only; leave the mask out")
        if not self.any_mask:
            able = "causal attention" if self.causal_only else "full and causal attention"
            windows = " and windows" if self.windows else ""
            raise ValueError(
                f"{mask.asked()}: {self.name} takes {able}{windows} only; {takers(mask, tokens)} take this"
            )
        if self.causal_only and not mask.is_causal(tokens):
            raise self.not_causal(mask.asked(), takers(mask, tokens))

    def divides(self, cu_seqlens: CuSeqlens, world: int) -> bool:
        """Whether the layout takes these lengths, with the default options."""
        try:
            self.border(world, self.parse()).check(cu_seqlens, world)
        except ValueError:
            return False
        return True

    def padding(self, options: Chosen, cu_seqlens: CuSeqlens, world: int) -> int:
        """The tokens to add at the end for whatever mask a call has, 0 where every sequence divides."""
        layouts = [self.border(world, options)]
        if options.sharing(world) == 1:
            layouts += [self.q_layout(options, cu_seqlens, world, mask) for mask in (FULL, CAUSAL)]
        return max(layouts, key=lambda x: x.chunks).padding(cu_seqlens, world)

    def form(self, mask: Band | Mask, cu_seqlens: CuSeqlens) -> Band | Mask:
        """The band, if the mask is one band in every sequence: schedules have blocks for it. Any other mask is cut into
        blocks."""
        return mask if isinstance(mask, Band) else one_band(mask, cu_seqlens)

    # What follows holds for every variant.

    def not_causal(self, asked: str, others: str) -> ValueError:
        return ValueError(f"{asked}: some query sees a later key, and {self.name} is for causal masks; use {others}")

    def parse(self, options: Chosen | Mapping[str, Any] | None = None) -> Chosen:
        """Options by name as a dataclass, defaults for the rest. Raises ValueError for a name that the variant
        lacks."""
        if isinstance(options, Options):
            return options
        for option, value in (options or {}).items():
            if option not in (*self.options.names(), *self.options.from_call):
                known = ", ".join(self.options.names()) or "none"
                raise ValueError(f"{option}={value!r}: {self.name} has no such option; its options: {known}")
        return self.options(**(options or {}))

    def border(self, world: int, options: Chosen) -> Layout:
        """The layout in which a rank's tensors come in and go back."""
        outer, inner = self.outer(options), options.sharing(world)
        return replace(outer, inner=inner) if inner > 1 else outer

    def problem(
        self,
        cu_seqlens: CuSeqlens,
        world: int,
        mask: Band | Mask,
        options: Chosen | Mapping[str, Any] | None = None,
        q_tokens: int | None = None,
    ) -> Problem:
        """mask: the band within every sequence, or any mask over all positions. Raises ValueError when the variant cannot
        do this mask or these lengths in this world."""
        chosen = self.parse(options)
        form = self.form(mask, cu_seqlens)
        if isinstance(form, Mask):
            self.check_cut(chosen, form, cu_seqlens[-1])
            mask = CAUSAL if form.is_causal(cu_seqlens[-1]) else FULL  # by which a layout balances
        else:
            mask = form
            self.check_mask(chosen, mask)
        if len(cu_seqlens) > 2 and not self.packs:
            raise ValueError(
                f"a packed batch of {len(cu_seqlens) - 1} sequences: {self.name} takes batches of single sequences; use "
                "seqlens=null, or llama3"
            )
        sharing, border = chosen.sharing(world), self.border(world, chosen)
        q_layout = self.q_layout(chosen, cu_seqlens, world, mask)
        # strictest layout first; with groups only the border, whose rule implies that of q_layout
        for layout in [border] if sharing > 1 else sorted({border, q_layout}, key=lambda x: -x.chunks):
            try:
                layout.check(cu_seqlens, world)
            except ValueError as error:
                raise ValueError(f"{error}{ways_out(cu_seqlens, world, form)}") from None
        problem = Problem(
            cu_seqlens=cu_seqlens,
            world=world // sharing,
            form=form,
            layout=self.outer(chosen),
            q_layout=q_layout,
            schedule=self.schedule if isinstance(form, Mask) else self.plan(chosen, cu_seqlens, world, mask),
            q_tokens=q_tokens if self.decode else None,
            ulysses=sharing,
        )
        return known(problem)

    def unsuitable(self, world: int, decode: bool) -> str | None:
        """Why `auto` leaves this variant out, whatever its options, or None: it is for something else."""
        if self.decode != decode:
            return f"{self.name} is {'a' if self.decode else 'no'} decode"
        if not decode and self.layout.replicated != (world == 1):
            return "nothing is sharded" if self.layout.replicated else "dense is the same in a world of one"
        return None


REGISTERED: dict[str, Variant[Any]] = {}


def register(variant: Variant[Any]) -> Variant[Any]:
    """Makes a variant known by its name."""
    assert variant.name not in REGISTERED, f"two variants are called {variant.name}"
    REGISTERED[variant.name] = variant
    return variant


def _registered(name: str) -> Variant[Any]:
    return REGISTERED[name]


def words(variants: Iterable[Variant[Any]], last: str = "and") -> str:
    """Their names in a sentence."""
    *names, end = sorted(v.name for v in variants) or [""]
    return f"{', '.join(names)} {last} {end}" if names else end


def sharded(takes: Callable[[Variant[Any]], bool], last: str = "and") -> str:
    """As words, the variants of sharded batches under any mask for which `takes` holds, each by one name."""
    able = (v for v in REGISTERED.values() if v.any_mask and not v.layout.replicated and not v.alias_of)
    return words(filter(takes, able), last)


def takers(mask: Mask, tokens: int) -> str:
    """As words, the variants for sharded batches that take this mask, with their default options."""
    causal = mask.is_causal(tokens)
    return sharded(lambda v: causal or v.takes(FULL))


def ways_out(cu_seqlens: CuSeqlens, world: int, form: Band | Mask = CAUSAL) -> str:
    """How to go on with a packed batch whose lengths a layout does not divide; nothing for one sequence."""
    if len(cu_seqlens) == 2:
        return ""
    causal = form.right == 0 if isinstance(form, Band) else form.is_causal(cu_seqlens[-1])
    able = sharded(lambda v: (causal or v.takes(FULL)) and v.divides(cu_seqlens, world), "or")
    others = f", and {able} would take these cu_seqlens" if able else ""
    return f"; shard(x, cu_seqlens, pad=True) pads the whole batch{others}"


def able(mask: Band) -> str:
    """As words, the variants of sharded batches that take this band, whatever mask a layout was made for."""

    def takes(v: Variant[Any]) -> bool:
        listed = (v.windows or not mask.windowed) and (mask.right == 0 or not v.causal_only)
        return listed and not v.options.from_call and v.takes(mask)

    return sharded(takes)


def decodes() -> str:
    """The decodes, as words."""
    return words((v for v in REGISTERED.values() if v.decode), "or")
