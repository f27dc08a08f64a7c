"""The options of a variant as a frozen dataclass, and what the variants of one executor have in common. An executor reads its
options by name (`plan.options.heads_k_stride`), so each executor's base declares all that it reads: as a field where the variant
publishes the option, else as a property with the one value that there is. Pure Python."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

from attention.errors import nearest
from attention.masks.band import Band

Choices = Callable[[int, int], Sequence[Any]]  # of the KV heads and the world size
Found = TypeVar("Found", bound="Options")


def divisors(n: int) -> list[int]:
    """Of a whole number of at least 1, in order."""
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return small + [n // d for d in reversed(small) if d * d != n]


def option(default: Any, choices: Choices | None = None) -> Any:
    """A field whose values `best` tries are `choices(kv_heads, world)`; without choices `best` is refused."""
    return field(default=default, metadata={"choices": choices})


def from_call(default: Any) -> Any:
    """A field that says what calls will have: see `Options.from_call`."""
    return field(default=default, metadata={"from_call": True})


def one_of(values: tuple[Any, ...], default: Any) -> Any:
    """A field that takes one of `values`, or its default."""
    return field(default=default, metadata={"choices": lambda kv_heads, world: values, "values": values})


@dataclass(frozen=True)
class Options:
    """A variant's options; a subclass adds fields by `option` and `one_of`."""

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Those that a user may set: all but the ones that a call has anyway (`from_call`)."""
        return tuple(each.name for each in fields(cls) if not each.metadata.get("from_call"))

    @classmethod
    def from_call(cls) -> tuple[str, ...]:
        """The options that say what calls will have: given to `attention.make`, but no keys of a configuration."""
        return tuple(each.name for each in fields(cls) if each.metadata.get("from_call"))

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        return {each.name: each.default for each in fields(cls) if not each.metadata.get("from_call")}

    @classmethod
    def choices(cls, name: str, kv_heads: int, world: int) -> list[Any] | None:
        """The values of an option among which "best" decides; None for an option that has no list of them."""
        found = {each.name: each.metadata.get("choices") for each in fields(cls)}.get(name)
        return None if found is None else list(found(kv_heads, world))

    @classmethod
    def candidates(cls: type[Found], kv_heads: int, world: int, mask: Band) -> Iterable[Found]:
        """The settings that may differ in time, among which `auto` chooses."""
        yield cls()

    def check(self, heads: int, kv_heads: int, world: int) -> None:
        """Raises ValueError for a value that is unknown, or does not go with these heads in this world."""
        for each in fields(self):
            value, known = getattr(self, each.name), each.metadata.get("values")
            if known and not any(type(value) is type(x) and value == x for x in (*known, each.default)):
                raise ValueError(f"{each.name}={value}: {nearest(str(value), map(str, known))}")

    def resolved(self, writable: bool) -> Options:
        """These options with nothing left open. `writable`: the ranks can write into each other's GPU memory."""
        return self

    def plain(self) -> dict[str, Any]:
        """By name, as YAML and results have them."""
        return {name: getattr(self, name) for name in self.names()}

    @property
    def uncapturable(self) -> str | None:
        """Why a call with these options can't be replayed from a CUDA graph, or None."""
        return None


@dataclass(frozen=True)
class RingOptions(Options):
    """What the ring executor reads."""

    @property
    def head_parts(self) -> int | None:
        """In how many parts of the heads a backward goes through the ring; None: as many as the length asks for."""
        return 1


@dataclass(frozen=True)
class HeadParts(RingOptions):
    """A ring, or an exchange of heads, in parts of the heads."""

    head_parts: int | None = option(None, lambda kv_heads, world: divisors(kv_heads))

    def check(self, heads: int, kv_heads: int, world: int) -> None:
        """Each rank's KV heads can be computed in so many parts."""
        super().check(heads, kv_heads, world)
        if self.head_parts is None:
            return
        each = max(1, kv_heads // self.sharing(world))
        if not _positive(self.head_parts) or each % self.head_parts:
            raise ValueError(
                f"head_parts={self.head_parts}: must divide a rank's {each} KV heads; it may be {divisors(each)}"
            )

    def sharing(self, world: int) -> int:
        """Among how many ranks the heads are divided."""
        return 1


@dataclass(frozen=True)
class GatherOptions(Options):
    """What the gather executor reads. `heads_k_stride`: KV heads that are gathered at a time, all for None."""

    heads_k_stride: int | None = option(None, lambda kv_heads, world: divisors(kv_heads))

    @property
    def grouping(self) -> str:
        """How the query chunks become kernel calls: see `executors.nested_prefixes`."""
        return "separate"

    def check(self, heads: int, kv_heads: int, world: int) -> None:
        super().check(heads, kv_heads, world)
        check_stride(self.heads_k_stride, kv_heads)

    @classmethod
    def candidates(cls: type[Found], kv_heads: int, world: int, mask: Band) -> Iterable[Found]:
        strides = [None, *divisors(kv_heads)[:-1]]
        groupings = cls.choices("grouping", kv_heads, world)
        for how in groupings or [None]:
            for stride in strides:
                yield cls(**{"heads_k_stride": stride, **({"grouping": how} if how else {})})

    @property
    def uncapturable(self) -> str | None:
        if self.grouping != "packed":
            return None
        return "grouping=packed sends lengths to the GPU in each pass; take separate or fused"


GROUPINGS = ("separate", "packed", "fused")


@dataclass(frozen=True)
class TreeOptions(Options):
    """What the tree executor reads. `reduce`: how the partial results are reduced; None: fused where the ranks can write into each
    other's GPU memory, else packed."""

    reduce: str | None = one_of(("three", "two", "packed", "fused"), None)

    def resolved(self, writable: bool) -> TreeOptions:
        return replace(self, reduce="fused" if writable else "packed") if self.reduce is None else self

    @classmethod
    def candidates(cls, kv_heads: int, world: int, mask: Band) -> Iterable[TreeOptions]:
        for how in ("packed", "two", "three", "fused"):
            yield cls(reduce=how)


def check_stride(stride: int | None, kv_heads: int) -> int:
    """The KV heads that a gather brings at a time, all for None. Raises ValueError when they don't divide."""
    if stride is None:
        return kv_heads
    if not _positive(stride) or kv_heads % stride:
        raise ValueError(f"heads_k_stride={stride}: must divide kv_heads={kv_heads}; it may be {divisors(kv_heads)}")
    return stride


def check_sharing(
    name: str,
    ranks: int,
    heads: int,
    kv_heads: int,
    world: int,
    replicates: bool = True,
    others: Callable[[], str] | None = None,
) -> None:
    """Raises ValueError unless `ranks` can each have the same number of heads. `replicates`: where there are fewer KV heads than
    ranks, several ranks have the same one. others: the variants with the option `ulysses_size`, where this one has none."""

    def shared(n: int) -> bool:
        return heads % n == 0 and (kv_heads % n == 0 or (replicates and n % kv_heads == 0))

    if not shared(ranks):
        fits = [n for n in divisors(world) if shared(n)]
        raise ValueError(
            f"heads={heads}, kv_heads={kv_heads}: {name} gives each of {ranks} ranks the same number of heads; "
            f"{others() if others else name} with ulysses_size {' or '.join(map(str, fits))} would work"
        )


def ulysses_group(wanted: int | None, world: int) -> int:
    """Ranks of a group that exchanges heads for sequence; None: as near to a square as it goes, the larger half within the groups.
    Raises ValueError unless they divide the world."""
    able = divisors(world)
    if wanted is None:
        return next(n for n in able if n * n >= world)
    if wanted not in able:
        raise ValueError(f"ulysses_size={wanted}: must divide world_size={world}; it may be {able}")
    return wanted


def _positive(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def check_heads(heads: int, kv_heads: int) -> None:
    """Raises ValueError unless every KV head serves the same number of query heads."""
    if heads < 1 or kv_heads < 1:
        raise ValueError(
            f"heads={heads}, kv_heads={kv_heads}: both must be at least 1; for instance heads=32 kv_heads=8"
        )
    if heads % kv_heads:
        raise ValueError(
            f"heads={heads}, kv_heads={kv_heads}: heads must be a multiple of kv_heads; kv_heads may be {divisors(heads)}"
        )
