"""What a mask is: for a number of tokens, a list of rectangles with a band. Masks are frozen dataclasses: equal where
they are the same mask, and usable as keys. Sources and definitions stand with each mask."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps
from inspect import Signature, signature
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, get_type_hints

import numpy as np

from attention.masks.band import FULL, Band, narrower
from attention.masks.checks import whole_number
from attention.masks.overlap import both
from attention.masks.picture import picture
from attention.masks.rectangles import HI, K1, LO, Q0, UNBOUNDED, Rectangles, from_columns, pairs
from attention.memo import memo

if TYPE_CHECKING:
    from torch import Tensor

MOST_DENSE = 16384  # tokens of the largest boolean matrix
P = ParamSpec("P")


class Mask(ABC):
    """Which keys each query sees, both given by their position in the sequence (in a packed batch, in the whole batch).

    A subclass is a frozen dataclass that builds its rectangles."""

    @abstractmethod
    def build(self, tokens: int) -> Rectangles:
        """The rectangles for a sequence of so many tokens; no pair is in two. Raises ValueError for a number of tokens
        that the mask is not for."""

    def describe(self) -> str:
        """The call that makes the mask; long lists are cut short."""
        return repr(self)

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
            return Banded(narrower(self.band, other.band))
        return Both(self, other)

    def asked(self) -> str:
        """The arguments of the call that asks for the mask, for messages."""
        return f"mask={self.describe()}"

    def __str__(self) -> str:
        return self.describe()


@memo(lambda x, *_: len(x), 1 << 21)
def built(mask: Mask, tokens: int) -> Rectangles:
    x = mask.build(tokens)
    x.flags.writeable = False
    return x


def short(value: Any) -> str:
    """A value in a message or a label: of a long list the first four."""
    if not isinstance(value, tuple):
        return str(value)
    shown = list(map(short, value if len(value) <= 6 else value[:4]))
    if len(shown) < len(value):
        shown.append(f"… {len(value)} in all")
    return f"[{', '.join(shown)}]"


@dataclass(frozen=True)
class FamilyMask(Mask):
    """A mask of a family, the function that makes it. parameters: (name, value) in the order of the function's.

    request: the arguments of the call that asked for the mask other than by `mask=`."""

    name: str
    parameters: tuple[tuple[str, Any], ...]
    family: Callable[..., FamilyMask] = field(repr=False)
    request: str = field(default="", compare=False, repr=False)

    def build(self, tokens: int) -> Rectangles:
        x: Rectangles = self.family.__wrapped__(tokens, **dict(self.parameters))  # type: ignore[attr-defined]
        return x

    def describe(self) -> str:
        return f"{self.name}({', '.join(f'{name}={short(value)}' for name, value in self.parameters)})"

    def asked(self) -> str:
        return self.request or super().asked()


def family(build: Callable[Concatenate[int, P], Rectangles]) -> Callable[P, FamilyMask]:
    """The function that makes the masks of a family. build: returns the rectangles for a number of tokens and the
    parameters; the type of each is annotated with its check."""
    _, *parameters = signature(build).parameters.values()
    types = get_type_hints(build, include_extras=True)
    checks = {x.name: types[x.name].__metadata__[-1] for x in parameters}
    accepted = Signature(parameters)

    @wraps(build)
    def make(*args: P.args, **kwargs: P.kwargs) -> FamilyMask:
        call = accepted.bind(*args, **kwargs)
        call.apply_defaults()
        values = tuple([(name, checks[name](name, value)) for name, value in call.arguments.items()])
        return FamilyMask(build.__name__, values, make)

    make.__signature__ = accepted  # type: ignore[attr-defined]
    return make


@dataclass(frozen=True)
class Banded(Mask):
    """One band over the whole sequence: full, causal and sliding windows."""

    band: Band = FULL

    def build(self, tokens: int) -> Rectangles:
        return from_columns(0, tokens, 0, tokens, *self.band.bounds())

    def describe(self) -> str:
        return self.band.describe()


@dataclass(frozen=True)
class Both(Mask):
    """The pairs that two masks have in common."""

    a: Mask
    b: Mask

    def build(self, tokens: int) -> Rectangles:
        return both(self.a.rectangles(tokens), self.b.rectangles(tokens))

    def describe(self) -> str:
        return f"{self.a.describe()} & {self.b.describe()}"

    def asked(self) -> str:
        request = self.b.asked()
        return super().asked() if request.startswith("mask=") else f"{self.a.asked()}, {request}"


@dataclass(frozen=True)
class Padded(Mask):
    """`mask` over all but the last `padding` tokens, which see nothing and which nothing sees."""

    mask: Mask
    padding: int

    def build(self, tokens: int) -> Rectangles:
        return self.mask.rectangles(tokens - self.padding)

    def describe(self) -> str:
        return f"{self.mask.describe()} with padding={self.padding}"

    def asked(self) -> str:
        return f"{self.mask.asked()} with padding={self.padding}"
