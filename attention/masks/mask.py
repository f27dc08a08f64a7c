"""What a mask is: for a number of tokens, a list of rectangles with a band. Masks are frozen dataclasses: equal where
they are the same mask, and usable as keys. Sources and definitions stand with each mask."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from attention.masks.band import Band
from attention.masks.checks import whole_number
from attention.masks.overlap import both
from attention.masks.picture import picture
from attention.masks.rectangles import HI, K1, LO, Q0, UNBOUNDED, Rectangles, pairs, rectangle, rectangles
from attention.memo import memo

if TYPE_CHECKING:
    from torch import Tensor

MOST_DENSE = 16384  # tokens of the largest boolean matrix


@dataclass(frozen=True)
class Mask(ABC):
    """Which keys each query sees, both given by their position in the sequence (in a packed batch, in the whole batch).

    A subclass is a frozen dataclass whose fields are the parameters, checks them in `__post_init__` (ValueError), and
    builds its rectangles."""

    name: ClassVar[str]

    @abstractmethod
    def build(self, tokens: int) -> Rectangles:
        """The rectangles for a sequence of so many tokens; no pair is in two. Raises ValueError for a number of tokens
        that the mask is not for."""

    def rectangles(self, tokens: int) -> Rectangles:
        """As `build`; read-only, the last ones are kept."""
        return built(self, whole_number("tokens", tokens))

    def pairs(self, tokens: int) -> int:
        """The exact number of (query, key) pairs in a sequence of so many tokens."""
        return int(pairs(self.rectangles(tokens)).sum())

    def density(self, tokens: int) -> float:
        """The share of all tokens**2 pairs that the mask keeps."""
        return self.pairs(tokens) / tokens**2 if tokens else 0.0

    def dense(self, tokens: int) -> Tensor:
        """The boolean matrix `[tokens, tokens]` on the CPU, for tests and pictures. Raises ValueError for more than
        16,384 tokens."""
        import torch

        tokens = whole_number("tokens", tokens)
        if tokens > MOST_DENSE:
            raise ValueError(f"tokens={tokens}: a boolean matrix is for at most {MOST_DENSE}")
        keep = torch.zeros(tokens, tokens, dtype=torch.bool)
        for q0, q1, k0, k1, lo, hi in self.rectangles(tokens).tolist():
            distance = torch.arange(k0, k1) - torch.arange(q0, q1).unsqueeze(1)
            keep[q0:q1, k0:k1] |= (distance >= lo) & (distance <= hi)
        return keep

    def picture(self, tokens: int = 32, width: int = 32) -> str:
        """The mask as text: a line for some queries, a cell of two characters for some keys, at most `width` of each. A
        cell is darker the more of its pairs the mask keeps."""
        return picture(self.rectangles(tokens), tokens, width)

    def is_causal(self, tokens: int) -> bool:
        """Whether no query sees a later key."""
        x = self.rectangles(tokens)
        return bool((np.minimum(x[:, HI], x[:, K1] - 1 - x[:, Q0]) <= 0).all())

    def windowed(self, tokens: int) -> bool:
        """Whether some rectangle has a lower bound, for which a kernel needs sliding windows."""
        return bool((self.rectangles(tokens)[:, LO] > -UNBOUNDED).any())

    @property
    def band(self) -> Band | None:
        """The band, if the mask is one over the whole sequence."""
        return None

    def __and__(self, other: Mask) -> Mask:
        """The intersection, exact."""
        if not isinstance(other, Mask):
            return NotImplemented
        if self.band is not None and other.band is not None:
            return Banded.of(narrower(self.band, other.band))
        return Both(self, other)

    def describe(self) -> str:
        """The call that makes the mask; long lists are cut short."""
        return (
            f"{self.name}({', '.join(f'{x.name}={short(getattr(self, x.name))}' for x in fields(self) if x.compare)})"
        )

    def asked(self) -> str:
        """The arguments of the call that asks for the mask, for messages."""
        return f"mask={self.describe()}"

    def __str__(self) -> str:
        return self.describe()


def _weight(found: Rectangles, *_: object) -> int:
    return len(found)


@memo(_weight, 1 << 21)
def built(mask: Mask, tokens: int) -> Rectangles:
    found = mask.build(tokens)
    found.flags.writeable = False
    return found


def short(value: Any) -> str:
    """A value in a message or a label: of a long list the first four."""
    if isinstance(value, tuple) and len(value) > 6:
        return f"[{', '.join(map(short, value[:4]))}, … {len(value)} in all]"
    if isinstance(value, tuple):
        return f"[{', '.join(map(short, value))}]"
    return str(value)


@dataclass(frozen=True)
class Banded(Mask):
    """One band over the whole sequence: full, causal and sliding windows."""

    left: int = -1
    right: int = -1

    name: ClassVar[str] = "band"

    def __post_init__(self) -> None:
        Band.of(False, (self.left, self.right))  # checks the bounds

    @staticmethod
    def of(band: Band) -> Banded:
        return Banded(band.left, band.right)

    @property
    def band(self) -> Band:
        return Band(self.left, self.right)

    def build(self, tokens: int) -> Rectangles:
        return rectangles([rectangle((0, tokens), (0, tokens), self.band)])

    def describe(self) -> str:
        return self.band.describe()


@dataclass(frozen=True)
class Both(Mask):
    """The pairs that two masks have in common."""

    a: Mask
    b: Mask

    name: ClassVar[str] = "and"

    def build(self, tokens: int) -> Rectangles:
        return both(self.a.rectangles(tokens), self.b.rectangles(tokens))

    def describe(self) -> str:
        return f"{self.a.describe()} & {self.b.describe()}"

    def asked(self) -> str:
        return (
            f"mask={self.describe()}" if self.b.asked().startswith("mask=") else f"{self.a.asked()}, {self.b.asked()}"
        )


def narrower(a: Band, b: Band) -> Band:
    def least(x: int, y: int) -> int:
        return max(x, y) if min(x, y) < 0 else min(x, y)

    return Band(least(a.left, b.left), least(a.right, b.right))
