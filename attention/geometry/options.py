"""The options of a variant as a frozen dataclass, and what the variants of one executor have in common. An executor reads its
options by name (`plan.options.heads_k_stride`), so each executor's base declares all that it reads: as a field where the variant
publishes the option, else as a property with the one value that there is. Pure Python."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, NamedTuple

from attention.errors import UnsupportedCall, nearest


def divisors(n: int) -> list[int]:
    """Of a whole number of at least 1, in order."""
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return small + [n // d for d in reversed(small) if d * d != n]


def one_of(values: tuple[Any, ...], default: Any) -> Any:
    """A field that takes one of `values`, or its default."""
    return field(default=default, metadata={"values": values})


class HeadCount(NamedTuple):
    """KV heads, and the query heads that each serves."""

    kv: int
    ratio: int


@dataclass(frozen=True)
class Options:
    """A variant's options; a subclass adds fields, some by `one_of`. `from_call`: the fields that say what calls will have.
    They are given to `attention.make`, but are no keys of a configuration. `mask`: what a layout was made for, and the mask of a call
    where none is given."""

    from_call: ClassVar[tuple[str, ...]] = ()
    mask: ClassVar[Any] = None

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Those that a user may set: all but the ones that a call has anyway."""
        return tuple(x.name for x in fields(cls) if x.name not in cls.from_call)

    def check(self, heads: int, kv_heads: int, world: int) -> None:
        """Raises ValueError for a value that is unknown, or does not go with these heads in this world."""
        for x in fields(self):
            value, known = getattr(self, x.name), x.metadata.get("values")
            if known and not any(type(value) is type(y) and value == y for y in (*known, x.default)):
                raise ValueError(f"{x.name}={value}: {nearest(str(value), map(str, known))}")

    def check_call(self, device: str, world: int, sinks: bool) -> None:
        """Raises ValueError for a call that these options do not go with. device: "cpu" or "cuda"."""

    def sharing(self, world: int) -> int:
        """Ranks among which heads are exchanged for sequence. Raises ValueError unless they divide the world."""
        return 1

    def computed(self, heads: HeadCount, world: int) -> HeadCount:
        """The heads that are computed of a call with these: more, where others would not divide."""
        return heads

    def padded(self, padding: int) -> Options:
        """The options for sequences with so many tokens of padding at their end."""
        return self

    def resolved(self, writable: bool) -> Options:
        """These options with nothing left open. `writable`: the ranks can write into each other's GPU memory."""
        return self

    def plain(self) -> dict[str, Any]:
        """By name, as YAML and results have them."""
        return {name: [*x] if isinstance(x := getattr(self, name), tuple) else x for name in self.names()}

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
    """A ring, or an exchange of heads, in parts of the heads. Where `sharing` ranks do not divide the heads, the fewest that they
    divide are computed. Fewer KV heads than ranks are computed by several ranks each."""

    head_parts: int | None = None  # type: ignore[override]

    def computed(self, heads: HeadCount, world: int) -> HeadCount:
        ranks = self.sharing(world)
        by_kv = HeadCount(-(-heads.kv // ranks) * ranks, heads.ratio)
        fewer = [HeadCount(n, -(-heads.ratio * n // ranks) * ranks // n) for n in divisors(ranks) if n >= heads.kv]
        return min([by_kv, *fewer], key=lambda x: x.kv * x.ratio)

    def check(self, heads: int, kv_heads: int, world: int) -> None:
        """Each rank's KV heads can be computed in so many parts."""
        super().check(heads, kv_heads, world)
        if self.head_parts is None:
            return
        own = max(1, self.computed(HeadCount(kv_heads, heads // kv_heads), world).kv // self.sharing(world))
        if not _positive(self.head_parts) or own % self.head_parts:
            raise ValueError(
                f"head_parts={self.head_parts}: must divide a rank's {own} KV heads; it may be {divisors(own)}"
            )


@dataclass(frozen=True)
class GatherOptions(Options):
    """What the gather executor reads. `heads_k_stride`: KV heads that are gathered at a time, all for None."""

    heads_k_stride: int | None = None

    @property
    def grouping(self) -> str:
        """How the query chunks become kernel calls: see `executors.nested_prefixes`."""
        return "separate"

    def check(self, heads: int, kv_heads: int, world: int) -> None:
        super().check(heads, kv_heads, world)
        check_stride(self.heads_k_stride, kv_heads)

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

    def check_call(self, device: str, world: int, sinks: bool) -> None:
        if self.reduce == "fused" and world > 1 and device != "cuda":
            raise UnsupportedCall("reduce=fused: needs CUDA GPUs with symmetric memory; reduce=packed works here")


def check_stride(stride: int | None, kv_heads: int) -> int:
    """The KV heads that a gather brings at a time, all for None. Raises ValueError when they don't divide."""
    if stride is None:
        return kv_heads
    if not _positive(stride) or kv_heads % stride:
        raise ValueError(f"heads_k_stride={stride}: must divide kv_heads={kv_heads}; it may be {divisors(kv_heads)}")
    return stride


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
